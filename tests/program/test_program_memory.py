"""No program copies the cache: what is donated is written in place."""

import jax
import numpy as np
import pytest

from kvrt import CacheConfig, Engine, EngineConfig, LayerSkip, Request, Runtime, Speculation
from kvrt.arrays import array_bytes
from kvrt.policies.scored import H2O
from kvrt.reuse.blend import BlendSpec
from tests.toys import KindedLm, ToyLm

pytestmark = pytest.mark.slow
OPTIMISED = True  # see conftest.py: aliases and temporaries are those of the real programs
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


KINDS = {
    "write": {"rope": "write"},
    "read": {"rope": "read"},
    "pieces": {"n_ubatch": 64},
    "codes": {"type_k": "q8_0", "type_v": "int4", "hadamard": True},
    "by channel": {"type_k": "kivi4", "type_v": "int4"},
}


# So many cells that a layer's keys are far more than what a program takes for its tokens.
N_CTX = 32768


def model(kind):
    """Keys of a layer are far wider than what a program computes for each cell.

    That is a mask, and the cosines and sines of its position where keys are rotated.
    """
    return ToyLm(n_layers=1, n_kv_heads=16, head_dim=32 if "type_k" in KINDS[kind] else 16)


def run_all(kind):
    """A runtime that has called every program."""
    options = {"n_ubatch": 8} | KINDS[kind]
    runtime = Runtime(model(kind), CacheConfig(n_ctx=N_CTX, n_seq_max=2, **options))
    runtime.append(PROMPT * (options["n_ubatch"] // 8))
    list(runtime.generate(5, stride=4))
    runtime.seq_cp(0, 1)
    runtime.seq_add(1, 2, None, 5)
    runtime.append([1], 1)
    runtime.scrub()
    return runtime


# "pieces" has the programs of "write", with longer prompts; an engine reads rotated keys below.
@pytest.fixture(scope="module", params=[k for k in KINDS if k not in ("write", "read")])
def used(request):
    """A cache far larger than what a step touches, after one call of every program."""
    return run_all(request.param)


def layer_bytes(cache):
    """Bytes of one layer's keys, or of its values if these are less."""
    (store,) = cache.stores
    each = [sum(x.nbytes for x in jax.tree.leaves(of[0])) for of in (store.k, store.v)]
    assert len(store.k) * sum(each) == array_bytes(store)
    return min(each)


def temp_bytes(programs):
    """The most temporaries of each kind of program that takes the cache, and what it aliases."""
    found = {}
    for key, program in programs.compiled().items():
        memory = program.memory_analysis()
        temp, alias = found.get(key[0], (0, memory.alias_size_in_bytes))
        temp = max(temp, memory.temp_size_in_bytes)
        found[key[0]] = temp, min(alias, memory.alias_size_in_bytes)
    return found


def check(found, n_bytes, of_layer):
    """What a program takes beside the cache is less than a copy of one layer's keys or values."""
    for kind, (temp, alias) in found.items():
        print(kind, f"{temp} bytes, of a layer {of_layer}")
        assert alias >= n_bytes, kind
        assert temp < of_layer, kind


def test_no_program_copies_the_cache(used, request):
    kind = request.node.callspec.params["used"]
    found = temp_bytes(used.programs)
    del found["sampled_once"]
    move = "move_kv" if kind == "by channel" else "move_blocks"
    expected = {"forward", "decode_steps", move, "shift", "scrub"}
    assert set(found) == expected - ({"shift"} if used.config.rope == "read" else set())
    check(found, used.stats().cache_bytes, layer_bytes(used.cache))


def serve_all(kind, mode):
    """An engine that has called its programs, also where samples part within a block."""
    sizes = dict(n_ctx=N_CTX, n_seq_max=2, n_ubatch=8, block_size=16 if mode == "paged" else 256)
    fine = 4 if mode == "paged" else None
    config = CacheConfig(**sizes, **KINDS[kind])
    options = EngineConfig(mode=mode, hash_block_size=fine)
    engine = Engine(model(kind), config, options)
    for i in range(2):
        prompt = tuple(range(20 + 2 * i))
        engine.add_request(Request(id=str(i), tokens=prompt, n_predict=4, n=2))
        while engine.has_work:
            engine.step()
    return engine


@pytest.mark.parametrize(("kind", "mode"), [("read", "cell"), ("codes", "paged")])
def test_no_program_of_an_engine_copies_the_cache(kind, mode):
    engine = serve_all(kind, mode)
    cache, found = engine.device.cache, temp_bytes(engine.programs)
    assert set(found) == ({"forward", "move_blocks"} if mode == "paged" else {"forward"})
    check(found, sum(map(array_bytes, cache.stores)), layer_bytes(cache))


@pytest.mark.parametrize(
    ("kind", "close_up"), [("write", False), ("write", True), ("codes", False)]
)
def test_no_step_copies_slots(kind, close_up):
    """Of one token: neither before it writes, nor where an eviction moves what stays."""
    policy = H2O(budget=N_CTX - 512, interval=512, close_up=close_up)
    config = CacheConfig(n_ctx=64, n_seq_max=2, n_ubatch=1, **KINDS[kind])
    runtime = Runtime(model(kind), config, policy=policy)
    runtime.append(PROMPT[:2])
    list(runtime.generate(5, stride=4))
    (tables,) = runtime.cache.states.tables
    found = temp_bytes(runtime.programs)
    del found["sampled_once"]
    assert set(found) == {"forward", "decode_steps"}
    # Keys of one of two states.
    check(found, sum(x.nbytes for x in tables), tables[0].nbytes // 2)


class Ones:
    """Drafts the token 1."""

    def check(self, n_vocab):
        pass

    def draft(self, context, n):
        return [1] * n


def run_by_layer():
    """A runtime that has called the programs of steps, rounds, layers that draft and blends."""
    model = KindedLm(n_layers=2, n_kv_heads=16)
    config = CacheConfig(n_ctx=N_CTX, n_seq_max=2, n_ubatch=8, programs="by_layer")
    runtime = Runtime(model, config)
    chunk = runtime.chunk(PROMPT)
    runtime.blend([chunk], PROMPT[:2], BlendSpec(check_layer=0))
    for drafter in (Ones(), LayerSkip(exit_layer=1)):
        list(runtime.generate(3, speculation=Speculation(drafter=drafter, n_draft=3)))
    return runtime


def test_no_program_by_layer_copies_the_cache():
    runtime = run_by_layer()
    of_layer, found = layer_bytes(runtime.cache), temp_bytes(runtime.programs)
    writers = {"layers", "write_layers"}
    assert set(found) >= writers | {"unwritten_layers", "accept_round", "draft_tokens"}
    for name, (temp, alias) in found.items():
        assert temp < of_layer, name
        assert name not in writers or alias >= 2 * of_layer, name


def test_every_writer_donates(used):
    def dead(write):
        """Which arrays of the cache `write` has consumed: all of them, or it made a copy."""
        old = jax.tree.leaves(used.cache.stores)
        write()
        return {x.is_deleted() for x in old}

    def shift():
        used.seq_add(1, 0, None, 1)
        used.flush()

    assert dead(lambda: used.append([1])) == {True}
    assert dead(lambda: list(used.generate(5, stride=4))) == {True}
    assert dead(lambda: used.decode({1: 2})) == {True}
    # The first time, rows of shared cells are copied before they turn.
    assert dead(shift) == {True}
    assert dead(shift) == {used.config.rope == "write"}
    used.seq_rm(None, 0, 2)
    assert dead(used.defrag) == {True}
    assert dead(used.clear) == {False}
    assert dead(used.scrub) == {True}
    # Indices of what is kept beside codes are no rows.
    kept = [x for x in jax.tree.leaves(used.cache.stores) if x.dtype != np.int32]
    assert not any(np.any(np.asarray(x)) for x in kept)
