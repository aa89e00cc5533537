"""Layers that keep one latent a token (MLA): against NumPy with keys and values of every head."""

import dataclasses
import functools
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvrt import CacheConfig, GroupSpec, MaskSpec, RopeSpec, Runtime, session
from kvrt.arrays import array_bytes
from kvrt.errors import BadConfig, SessionMismatch
from kvrt.program.estimate import of_blocks, of_cells
from kvrt.session.change import edit
from kvrt.session.interop import llama, mlx
from tests.latentlm import RANK, ROPE, SCALE, LatentLm, Plain
from tests.marks import slow
from tests.runtime.alongside import TEXT, read, run_history

WINDOW = MaskSpec(kind="window", size=9)
MODELS = {
    "norm": {},
    "neox": {"layout": "neox"},
    "no positions": {"layout": None},
    "windows": {"masks": [WINDOW, MaskSpec()]},
    "shared": {"n_layers": 3, "kv_of": (0, 0, 2)},
}
GROUP = {"layers": (0,), "n_kv_heads": 1, "head_dim": 40, "rope": RopeSpec(n_rot=8)}


@functools.cache
def model(name):
    return LatentLm(**MODELS[name])


@functools.cache
def latent_runtime(name, **options):
    config = {"n_ctx": 80, "block_size": 8, "n_ubatch": 8, "n_seq_max": 3, **options}
    return Runtime(model(name), CacheConfig(**config))


def runtime(name, **options):
    found = latent_runtime(name, **options)
    found.clear()
    return found


@pytest.mark.parametrize(
    ("name", "rope"),
    [
        ("norm", "write"),
        slow("neox", "write"),
        slow("no positions", "write"),
        slow("no positions", "read"),
        slow("windows", "read"),
        slow("shared", "write"),
    ],
)
def test_logits_are_those_of_the_plain_form(name, rope):
    run_history(runtime(name, rope=rope), Plain(model(name)))


@pytest.mark.parametrize("size", [slow(1), 7, slow(64)])
def test_a_prompt_in_chunks_is_a_forward_without_a_cache(size):
    at = runtime("norm", n_ubatch=64)
    whole = Plain(model("norm")).step(TEXT[:70])
    for start in range(0, 70, size):
        found = at.append(TEXT[start : min(start + size, 70)], out_ids=[0])[0]
        np.testing.assert_allclose(found, whole[start], atol=1e-4, rtol=0)


def test_a_scale_of_the_rows_width_is_seen():
    """The control: 1 / sqrt(r + d_rope) in place of the heads' own."""
    wrong = LatentLm(scale=(RANK + ROPE) ** -0.5)
    at = Runtime(wrong, CacheConfig(n_ctx=80, block_size=8, n_ubatch=64, n_seq_max=3))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        read(at, Plain(wrong), TEXT[:16])


def stored(at):
    (store,) = at.cache.stores
    return jax.tree.map(np.asarray, (store.k, store.v))


@pytest.mark.parametrize("dtype", ["f32", slow("int8")])
def test_a_shift_rotates_what_lies_behind_the_latent_and_nothing_else(dtype):
    at = runtime("norm", type_k=dtype, type_v=dtype)
    at.append(TEXT[:20])
    keys, latents = stored(at)
    at.seq_add(0, 5, None, 11)
    at.flush()
    moved, same = stored(at)
    jax.tree.map(np.testing.assert_array_equal, same, latents)
    assert any(
        not np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(moved), jax.tree.leaves(keys), strict=True)
    )


def test_a_shift_without_rope_moves_positions_alone():
    at, oracle = runtime("no positions"), Plain(model("no positions"))
    read(at, oracle, TEXT[:20])
    before = stored(at)
    at.seq_add(0, 5, None, 11)
    oracle.move(5, 11)
    at.flush()
    jax.tree.map(np.testing.assert_array_equal, stored(at), before)
    assert (at.stats().cells_used, at.seq_pos_max(0)) == (20, 30)
    read(at, oracle, TEXT[20:30])


def test_bytes_are_of_one_row_a_token():
    """(r + d_rope) numbers a token and layer, in arrays, estimates and pools of blocks."""
    config = CacheConfig(n_ctx=80, block_size=8)
    (store,) = Runtime(model("norm"), config).cache.stores
    wanted = 2 * 80 * (RANK + ROPE) * 4
    assert array_bytes(store) == wanted
    assert [x.shape for x in (store.k[0], store.v[0])] == [(10, 1, ROPE, 8), (10, 1, 8, RANK)]
    groups = model("norm").groups
    assert of_cells(groups, None, config).parts[0].n_bytes == wanted
    assert of_blocks(groups, None, config).plan.pools[0].block_bytes == wanted // 10


def test_a_session_has_each_number_once(tmp_path):
    at, oracle = runtime("norm"), Plain(model("norm"))
    read(at, oracle, TEXT[:16])
    snapshot = at.snapshot()
    block = snapshot.groups[0].blocks[0]
    assert block.k.shape == (2, 16, 1, ROPE) and block.v.shape == (2, 16, 1, RANK)
    assert snapshot.fingerprint["groups"][0]["latent_rank"] == RANK
    session.save(tmp_path / "x.kv", snapshot)
    at.clear()
    at.restore(session.read(tmp_path / "x.kv"))
    read(at, oracle, TEXT[23:24])
    other = {**snapshot.fingerprint}
    other["groups"] = [{**other["groups"][0], "latent_rank": RANK + 1}]
    with pytest.raises(SessionMismatch, match=r"latent_rank is 33 in the session and 32 here"):
        at.restore(dataclasses.replace(snapshot, fingerprint=other))


@pytest.mark.slow
def test_quantized_latents_convert_and_read(tmp_path):
    """Coarsely: the matrix has each KV dtype number by number."""
    options = {"type_k": "int8", "type_v": "int8", "hadamard": True}
    run_history(runtime("norm", **options), Plain(model("norm")), 0.25)
    at, oracle = runtime("norm"), Plain(model("norm"))
    read(at, oracle, TEXT[:16])
    session.save(tmp_path / "x.kv", at.snapshot())
    coarse = edit.convert(session.read(tmp_path / "x.kv"), "int8", "int8", hadamard=True)
    there = runtime("norm", **options)
    there.restore(coarse)
    read(there, oracle, TEXT[23:24], tolerance=0.25)


def test_other_programs_files_are_refused():
    at = runtime("norm")
    at.append(TEXT[:4])
    snapshot, groups = at.snapshot(), model("norm").groups
    with pytest.raises(SessionMismatch, match="one latent a token") as caught:
        llama.write(io.BytesIO(), snapshot, groups, arch="llama", whole=False)
    assert "\n" not in str(caught.value)
    with pytest.raises(SessionMismatch, match=r"a prompt cache of .* has keys and values apart"):
        mlx.write(io.BytesIO(), snapshot, groups, arch="llama")
    with pytest.raises(SessionMismatch, match=r"a session file of .* has keys and values"):
        llama.read("none", snapshot.fingerprint, groups, arch="llama", n_vocab=32)


class Broken(LatentLm):
    """A token 31 has a latent that is no number."""

    def embed(self, tokens):
        return super().embed(tokens) + jnp.where(tokens == 31, jnp.nan, 0.0)[:, None]


@pytest.mark.slow
def test_a_latent_that_is_no_number_stays_with_its_sequence():
    at = Runtime(Broken(), CacheConfig(n_ctx=80, block_size=8, n_ubatch=64, n_seq_max=3))
    at.append([1, 31, 2], 0)
    assert np.isnan(at.append([3], 0)).all()
    oracle = Plain(model("norm"))
    read(at, oracle, TEXT[:9], 1)


REFUSED = {
    "latent_rank 40 leaves no channel of head_dim 40": {"latent_rank": 40, "scale": SCALE},
    "latent_rank is -1; it must not be negative": {"latent_rank": -1, "scale": SCALE},
    "latent_rank 32 with 2 kv heads; all query heads read one latent": {
        "latent_rank": 32,
        "scale": SCALE,
        "n_kv_heads": 2,
    },
    "latent_rank 32 without a scale; it comes from the heads": {"latent_rank": 32},
    "n_rot 8 exceeds the channels behind latent_rank, 6": {"latent_rank": 34, "scale": SCALE},
}


@pytest.mark.parametrize("says", REFUSED)
def test_sizes_that_do_not_fit_are_refused(says):
    with pytest.raises(BadConfig, match=says) as caught:
        GroupSpec(**{**GROUP, **REFUSED[says]})
    assert "\n" not in str(caught.value)


def test_codecs_that_do_not_fit_a_latent_are_refused():
    """Groups of 32 channels fill a latent of 32 and no rotated part of 8."""
    with pytest.raises(BadConfig, match="fill a head of 8"):
        Runtime(model("norm"), CacheConfig(n_ctx=80, block_size=8, type_k="q8_0", type_v="q8_0"))


class Wrong(LatentLm):
    """Gives values beside its latents."""

    def __call__(self, tokens, attend, out_ids):
        row = self.embed(tokens)[:, None, :1] * np.ones((1, 1, RANK + ROPE), np.float32)
        return attend(0, row, row, row)[out_ids, 0]


@pytest.mark.slow
def test_a_model_that_gives_values_too_is_refused():
    with pytest.raises(BadConfig, match="layer 0 keeps a latent of 32 channels, which are its val"):
        Runtime(Wrong(), CacheConfig(n_ctx=32, attention="chunked")).append([1])
