"""A runtime whose keys are coded by channel: what it draws, keeps, moves, saves and refuses."""

import numpy as np
import pytest

from kvrt import CacheConfig, Runtime, SelfExtend
from kvrt.errors import BadConfig, NoKernel, SessionMismatch
from kvrt.program.estimate import of_cells
from tests.interpreted import TPU
from tests.toys import ToyLm

PROMPT = np.random.default_rng(0).integers(0, 32, 144).tolist()
SIZES = dict(n_ctx=512, block_size=64, n_ubatch=16)


def runtime(type_k="kivi4", **options):
    return Runtime(ToyLm(head_dim=32), CacheConfig(**SIZES, type_k=type_k, **options))


def all_keys(at):
    """Keys of the used cells, by their position."""
    cells = at.cache.cells[0]
    pos = np.asarray(cells.pos)
    index = np.flatnonzero(pos >= 0).astype(np.int32)
    k, _ = at._cache.device.take_kv(0, index)
    return np.asarray(k).astype(np.float32)[:, np.argsort(pos[index])]


def ids(drawn):
    return [t.id for t in drawn]


@pytest.mark.slow
def test_what_fits_the_tail_is_what_f16_rows_give():
    at, plain = runtime(type_v="f16"), runtime("f16", type_v="f16")
    for x in (at, plain):
        x.append(PROMPT[:96])
    assert ids(at.generate(20)) == ids(plain.generate(20))
    np.testing.assert_array_equal(all_keys(at), all_keys(plain))


@pytest.mark.slow
@pytest.mark.parametrize("rope", ["write", "read"])
def test_keys_that_were_coded_are_near_those_of_f16_rows(rope):
    at, plain = runtime(rope=rope), runtime("f16", rope=rope)
    for x in (at, plain):
        x.append(PROMPT[:96])
        x.append(PROMPT[96:])
    # Keys of a layer depend on what layers before it read in codes.
    found, wanted = all_keys(at)[0], all_keys(plain)[0]
    last = len(PROMPT) // 32 * 32 - 96
    np.testing.assert_array_equal(found[last:], wanted[last:])
    coded, exact = found[:last].reshape(-1, 32, 2, 32), wanted[:last].reshape(-1, 32, 2, 32)
    assert (coded != exact).any()
    step = (exact.max(1) - exact.min(1)) / 15
    assert (np.abs(coded - exact) <= 0.51 * step[:, None] + 1e-2).all()


@pytest.mark.slow
def test_a_shift_a_move_and_a_hole_keep_every_token():
    at = runtime("kivi2")
    at.append(PROMPT)
    at.seq_rm(0, 40, 60)
    at.seq_add(0, 60, None, -20)
    at.flush()
    before = all_keys(at)
    assert at.defrag() > 0
    np.testing.assert_allclose(all_keys(at), before, atol=1.0)
    np.testing.assert_array_equal(np.sort(np.asarray(at.cache.cells[0].pos))[-124:], np.arange(124))
    at.append([1])
    assert len(ids(at.generate(300))) == 300
    # The hole's cells were filled; groups that were coded came back for it.
    assert at.stats().cells_used == 424


@pytest.mark.slow
def test_a_session_holds_keys_as_f16_and_goes_on():
    at = runtime(type_v="q8_0")
    at.append(PROMPT)
    saved = at.snapshot()
    assert saved.fingerprint["type_k"] == "f16"
    plain, again = runtime("f16", type_v="q8_0"), runtime(type_v="q8_0")
    for x in (plain, again):
        x.restore(saved)
        assert x.seq_pos_max(0) == len(PROMPT) - 1
    np.testing.assert_array_equal(all_keys(plain), all_keys(at))
    # Keys of a tail that were read back are coded like those before them.
    np.testing.assert_allclose(all_keys(again), all_keys(at), atol=0.5)
    assert len(ids(again.generate(5))) == 5
    other = runtime(type_v="int4")
    other.restore(saved, convert=True)
    np.testing.assert_array_equal(all_keys(other)[:, -128:], all_keys(at)[:, -128:])
    with pytest.raises(SessionMismatch, match="type_k"):
        runtime("f32", type_v="q8_0").restore(saved)


@pytest.mark.slow
@pytest.mark.parametrize("rope", ["read", "write"])
def test_self_extend_reads_them(rope):
    extend = SelfExtend(kind="paper", ga_n=2, ga_w=16)
    at = runtime(rope=rope, self_extend=extend)
    plain = runtime("f16", rope=rope, self_extend=extend)
    for x in (at, plain):
        x.append(PROMPT[:96])
    assert ids(at.generate(10)) == ids(plain.generate(10))


def test_what_fit_says_is_what_is_allocated():
    config = CacheConfig(**SIZES, type_k="kivi4", type_v="int4", n_seq_max=3)
    at = Runtime(ToyLm(head_dim=32), config)
    (part,) = of_cells(ToyLm(head_dim=32).groups, None, config).parts
    assert part.n_bytes == at.stats().cache_bytes


def test_what_cannot_be_is_refused():
    with pytest.raises(BadConfig, match=r"block_size is 48; make it a multiple of 32"):
        CacheConfig(type_k="kivi4", block_size=48)
    at = runtime(attention=TPU)
    with pytest.raises(NoKernel, match="of f16: TPUs have no such vectors"):
        at.append(PROMPT[:1])
