"""Blocks that left the device come back from the host and the disk, and give the same tokens."""

import numpy as np
import pytest

from kvrt import errors
from kvrt.options.serving import Rules, TierConfig
from kvrt.paged.hashing import Chain
from tests.marks import slow
from tests.serving.engines import N_BATCH, B, alone, ask, make, one, run

pytestmark = pytest.mark.usefixtures("numpy_device")

HOST = TierConfig(host_bytes=1 << 20, always=True)


def small(kind, tiers, **rules):
    """Room for one and a half of the sequences below."""
    rules = Rules(n_batch=N_BATCH, **rules)
    return make(kind, rules=rules, tiers=tiers, n_ctx=64)


def settled(engine):
    engine.tiers.flush()
    engine.space.begin_step()
    return engine


def evict(engine, rng):
    """Fills the device with other texts, so that nothing of the others is left there."""
    for i in range(3):
        one(engine, ask(f"filler {i}", rng.integers(0, 32, 55), 4, salt=rng.bytes(4)))


# The matrix has other kinds.
@pytest.mark.parametrize("kind", ["full", *map(slow, ("window", "recurrent", "latent"))])
def test_an_evicted_prefix_comes_back_from_the_host(kind):
    rng = np.random.default_rng(0)
    with small(kind, HOST) as engine:
        tokens = rng.integers(0, 32, 40)
        wanted = one(engine, ask("a", tokens, 5))
        # What a part of it gives depends on which block is which.
        part = one(engine, ask("part", tokens[:21], 5))[0]
        evict(settled(engine), rng)
        chain = Chain(B)
        chain.extend(tokens.tolist())
        assert engine.space.manager.find_hit(chain).n_tokens == 0
        n_cached, found = _cached(settled(engine), ask("b", tokens, 5))
        # States are where steps ended.
        n_found = 32 if kind == "recurrent" else 36
        assert (n_cached, found) == (n_found, wanted[0])
        assert engine.stats().tiers["host"].counts["loaded"] > 0
        assert one(engine, ask("part again", tokens[:21], 5))[0] == part


def _cached(engine, request):
    engine.add_request(request)
    outs = [x for _ in range(200) if engine.has_work for x in engine.step()]
    return outs[0].n_cached, [t for o in outs for t in o.tokens]


@pytest.mark.slow
def test_a_disk_serves_the_next_engine(tmp_path):
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 32, 40)
    tiers = TierConfig(host_bytes=1 << 16, disk=tmp_path, disk_bytes=1 << 20, always=True)
    with small("full", tiers) as engine:
        wanted = one(engine, ask("a", tokens, 5))[0]
        with pytest.raises(errors.BadConfig, match="in use"):
            small("full", tiers)
    with small("full", tiers) as engine:
        n_cached, found = _cached(engine, ask("b", tokens, 5))
        assert (n_cached, found) == (36, wanted)
    path = next(tmp_path.glob("*.blocks"))
    data = bytearray(path.read_bytes())
    for i in range(4096, len(data), 97):
        data[i] ^= 0x40
    path.write_bytes(data)
    with small("full", tiers) as engine:
        n_cached, found = _cached(engine, ask("c", tokens, 5))
        assert (n_cached, found) == (0, wanted)
        assert engine.stats().tiers["disk"].counts["damaged"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("preempt", ["recompute", "swap"])
def test_who_is_preempted_resumes_as_if_nothing_had_been(preempt):
    rng = np.random.default_rng(2)
    asked = [ask(i, rng.integers(0, 32, 20), 24) for i in range(4)]
    with small("full", HOST, preempt=preempt, admit="chunk") as engine:
        found, _ = run(engine, asked)
        for request in asked:
            assert found[request.id, 0] == alone("full", request)
        counts = engine.stats().sequences
        assert counts["preempted"] > 0 and (counts["offloaded"] > 0) == (preempt == "swap")


def test_cells_with_tiers_are_given_out_in_blocks():
    with make(mode="cell", tiers=HOST) as engine:
        assert engine.space.hit_size == engine.config.block_size


def test_a_tier_has_room_for_a_block():
    with pytest.raises(errors.BadConfig, match="no room for a block"):
        make(tiers=TierConfig(host_bytes=10))
