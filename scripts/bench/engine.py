"""Many requests at once: throughput, prefix hits, blocks against cells, policies, host work.

    python -m scripts.bench.engine
    python -m scripts.bench.engine --model toy --rounds 1 --what throughput,prefix

Sides that are compared run in turn, interleaved in one process. The model is the default one,
float32; host work and fragmentation take a model that costs nothing.
"""

import functools
import time
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import nnx

from kvrt import CacheConfig, Decoder, Engine, GroupSpec, Request, RopeSpec, Rules
from kvrt.arrays import Array
from kvrt.options.cache import SelfExtend
from kvrt.options.engine import EngineConfig, Mode
from kvrt.policies import AttentionSinks, ContextShift, Policy
from kvrt.program.batch import Batch
from kvrt.program.sample import Sampler
from scripts._lib import commands, measure, rounds, shapes

# Comparable with earlier figures; the default is half precision.
_config = functools.partial(CacheConfig, type_k="f32", type_v="f32")

_KINDS = ["throughput", "prefix", "policy", "drop", "host", "ahead", "waste"]
_N_ROUNDS = flags.DEFINE_integer("rounds", 3, "Runs of each side.", lower_bound=1)
_WHAT = flags.DEFINE_list("what", _KINDS, f"Of {', '.join(_KINDS)}.")
_MODEL = flags.DEFINE_string("model", "smollm2-135m", "Known model; toy is one of random weights.")
_N_SHARED = flags.DEFINE_integer("shared", 1000, "prefix: tokens in common.", lower_bound=1)
_N_REQUESTS = flags.DEFINE_integer("requests", 200, "waste: requests of mixed length.", 1)

_SIDES = flags.DEFINE_list("sides", [], "throughput: sides beside blocks; empty is all.")

_N_SEQ = 16
_N_TOKENS = 256  # token ids that requests are made of; every vocabulary has them


def _decoder() -> Decoder:
    return shapes.decoder(_MODEL.value)


def main() -> None:
    commands.check_names(_WHAT, _KINDS)
    for what in _WHAT.value:
        _RUN[what]()


def mixed(n: int, seed: int) -> list[Request]:
    """Requests of mixed length, with nothing in common."""
    rng = np.random.default_rng(seed)
    return [
        Request(
            id=str(i),
            tokens=tuple(rng.integers(0, _N_TOKENS, rng.integers(20, 200)).tolist()),
            n_predict=int(rng.integers(40, 120)),
        )
        for i in range(n)
    ]


def serve(engine: Engine, asked: Sequence[Request]) -> dict[str, float]:
    """Serves requests that come together; seconds to the first token of each, and of all."""
    start, first = time.perf_counter(), {}
    for request in asked:
        engine.add_request(request)
    while engine.has_work:
        for out in engine.step():
            first.setdefault(out.id, time.perf_counter() - start)
    return first | {"all": time.perf_counter() - start}


class StepClock:
    """Seconds that an engine gives steps to its device, and waits for what they sampled."""

    def __init__(self, engine: Engine):
        """Listens to an engine from now on."""
        self.seconds, device = 0.0, engine.device
        self._forward, self._read = device.forward, device.read
        device.forward, device.read = self._timed_forward, self._timed_read

    def _timed_forward(
        self, batch: Batch, sampler: Sampler | None = None
    ) -> tuple[Array, Array | None]:
        start = time.perf_counter()
        out = self._forward(batch, sampler)
        self.seconds += time.perf_counter() - start
        return out

    def _timed_read(self, tokens: Array) -> np.ndarray:
        start = time.perf_counter()
        out = self._read(tokens)
        self.seconds += time.perf_counter() - start
        return out


def throughput() -> None:
    """16 requests at once, in blocks with and without a prefix cache and in cells; and singly."""
    sides = _sides(_decoder())
    commands.check_names(_SIDES, sides)
    wanted = {"blocks", *(_SIDES.value or sides)}
    sides = {name: side for name, side in sides.items() if name in wanted}
    for name, side in sides.items():
        for n_prompt in (5, 20, 100, 400):
            tokens = tuple(i % _N_TOKENS for i in range(n_prompt))
            serve(side, [Request(id=name, tokens=tokens, n_predict=2)])
    # The share of the time that is not the compiled steps': what a prefix cache can make longer.
    inside = {name: StepClock(side) for name, side in sides.items()}
    shares: dict[str, list[float]] = {name: [] for name in sides}

    def served(name: str) -> list[float]:
        inside[name].seconds = 0.0
        seconds = serve(sides[name], mixed(_N_SEQ, len(shares[name])))["all"]
        shares[name].append(1 - inside[name].seconds / seconds)
        return [seconds]

    runs = {name: functools.partial(served, name) for name in sides}
    _emit_throughput(rounds.interleaved(runs, _N_ROUNDS.value, n_warm=0), shares)


def _sides(decoder: Decoder) -> dict[str, Engine]:
    """Engines of the same model, by name."""

    def engine(n_seq: int, mode: Mode, block_size: int, *, caching: bool = True) -> Engine:
        config = _config(n_ctx=8192, n_seq_max=n_seq, block_size=block_size)
        return Engine(decoder, config, EngineConfig(mode=mode, prefix_cache=caching))

    sides = {
        "one at a time": engine(1, "paged", 16),
        "blocks": engine(_N_SEQ, "paged", 16),
        "blocks, no prefix cache": engine(_N_SEQ, "paged", 16, caching=False),
        "cells": engine(_N_SEQ, "cell", 256),
    }
    # What differs is on the host alone: the very same programs serve both.
    sides["blocks, no prefix cache"].device.programs = sides["blocks"].device.programs
    return sides


def _emit_throughput(times: rounds.Times, shares: dict[str, list[float]]) -> None:
    """Lines of each side, and of its times by those of blocks."""
    n_sampled = [sum(r.n_predict for r in mixed(_N_SEQ, i)) for i in range(_N_ROUNDS.value)]
    for name, seconds in times.items():
        rates = [n / s for n, s in zip(n_sampled, seconds, strict=True)]
        measure.emit(
            "throughput",
            side=name,
            tokens_a_second=measure.quartiles(rates, scale=1),
            host_percent=measure.quartiles(shares[name], scale=100),
        )
    for name, seconds in times.items():
        ratios = [a / b for a, b in zip(seconds, times["blocks"], strict=True)]
        of = {"of": name, "to": "blocks", "seconds": measure.quartiles(ratios, scale=1)}
        measure.emit("throughput ratio", **of)


def prefix() -> None:
    """Four requests that share a prefix: seconds to the first token of each.

    They come one after another, when the first one's blocks are all there, and at once, when the
    later ones find what is there by the time they are admitted; `by_prefix` lets them wait for it.
    """
    config, decoder = _config(n_ctx=8192, n_seq_max=4, block_size=16), _decoder()
    rules = Rules(n_batch=config.n_ubatch, by_prefix=True)
    sides = {
        "prefix cache": Engine(decoder, config),
        "prefix cache, by_prefix": Engine(decoder, config, EngineConfig(rules=rules)),
        "no prefix cache": Engine(decoder, config, EngineConfig(prefix_cache=False)),
    }
    for engine in sides.values():
        engine.device.programs = sides["prefix cache"].device.programs
    singly: dict[str, list[list[float]]] = {name: [] for name in sides}
    at_once: dict[str, list[list[float]]] = {name: [] for name in sides}
    for i in range(_N_ROUNDS.value + 1):
        for name, engine in sides.items():
            times = [serve(engine, [r])["all"] for r in _sharing(2 * i)]
            together = serve(engine, _sharing(2 * i + 1))
            if i:  # the first round compiles
                singly[name].append(times)
                at_once[name].append(sorted(together[str(j)] for j in range(4)))
    for name in sides:
        first, *later = np.asarray(singly[name]).T
        ratio = float(np.median(first) / np.median(later))
        measure.emit(
            "prefix, one after another",
            side=name,
            n_shared=_N_SHARED.value,
            first_ms=measure.quartiles(first.tolist()),
            later_ms=measure.quartiles(np.ravel(later).tolist()),
            ratio=round(ratio, 2),
        )
    for name in sides:
        first, *_, last = np.asarray(at_once[name]).T
        measure.emit(
            "prefix, four at once",
            side=name,
            n_shared=_N_SHARED.value,
            first_ms=measure.quartiles(first.tolist()),
            last_ms=measure.quartiles(last.tolist()),
        )


def _sharing(seed: int) -> list[Request]:
    """Four requests with a prefix in common, each with 12 tokens of its own behind it."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, _N_TOKENS, _N_SHARED.value).tolist()
    return [
        Request(id=str(j), tokens=(*shared, *rng.integers(0, _N_TOKENS, 12).tolist()), n_predict=1)
        for j in range(4)
    ]


class Nothing(nnx.Module):
    """A model of one head that hardly computes: what is left is the host's work."""

    recurrent = None
    n_vocab = 32

    def __init__(self) -> None:
        """One group of one layer."""
        rope = RopeSpec(n_rot=2)
        self.groups = (GroupSpec(layers=(0,), n_kv_heads=1, head_dim=2, rope=rope),)
        self.table = nnx.Param(jnp.ones((32, 32), jnp.float32))

    def __call__(self, tokens, attend, out_ids):
        """Rows of a table, whatever attention says."""
        x = self.table[...][tokens][:, None, :2]
        attend(0, x, x, x)
        return self.table[...][tokens[out_ids]]


def host() -> None:
    """A step of 256 requests that decode: the time outside the compiled program.

    Those with a policy will outgrow it, but not yet.
    """
    sinks = AttentionSinks(n_window=220)
    for mode in ("paged", "cell"):
        for caching, policy in ((True, None), (False, None), (True, sinks)):
            engine = _decoding(mode, caching, policy)
            spent, inside = [], StepClock(engine)
            for _ in range(120):
                inside.seconds, start = 0.0, time.perf_counter()
                engine.step()
                spent.append(time.perf_counter() - start - inside.seconds)
            assert not engine.stats().drops["tokens"], "the policy has dropped something already"
            figures = {"mode": mode, "caching": caching, "policy": policy is not None}
            n = len(engine.running)
            measure.emit("host work of a step", requests=n, **figures, ms=measure.quartiles(spent))


def _decoding(
    mode: Mode, caching: bool, policy: Policy | None, *, run_ahead: bool = False
) -> Engine:
    """An engine with 256 requests that decode."""
    n, block_size = 256, 16 if mode == "paged" else 256
    config = _config(n_ctx=n * 256, n_seq_max=n, block_size=block_size, n_ubatch=512)
    rules = Rules(n_batch=512, n_ctx_seq=1024 if policy is None or mode == "paged" else 256)
    options = EngineConfig(mode=mode, rules=rules, prefix_cache=caching, run_ahead=run_ahead)
    engine = Engine(Nothing(), config, options, policy=policy)
    for i in range(n):
        tokens = tuple(np.random.default_rng(i).integers(0, 32, 8 + i % 16).tolist())
        n_predict = 200 if policy is None else 1000
        engine.add_request(Request(id=str(i), tokens=tokens, n_predict=n_predict))
    while engine.stats().n_waiting:
        engine.step()
    return engine


def ahead() -> None:
    """Whole steps of 256 requests that decode, with and without running ahead, ten each in turn."""
    for mode in ("paged", "cell"):
        sides = {x: _decoding(mode, True, None, run_ahead=x) for x in (True, False)}
        runs = {str(x): rounds.timed(engine.step, 10) for x, engine in sides.items()}
        times = rounds.interleaved(runs, 12, n_warm=0)
        for name, engine in sides.items():
            figures = {"mode": mode, "run_ahead": name, "n_ahead": engine.stats().n_ahead}
            measure.emit("whole step", **figures, ms=times.ms(str(name)))


def waste() -> None:
    """Fragmentation: held cells that hold nothing, in blocks and if each reserved the most.

    Blocks are those that the pool says are held; no request shares any with another.
    """
    config = _config(n_ctx=16_384, n_seq_max=32, block_size=16, n_ubatch=256)
    engine = Engine(Nothing(), config, EngineConfig(rules=Rules(n_batch=256), prefix_cache=False))
    rng = np.random.default_rng(0)
    for i in range(_N_REQUESTS.value):
        n_prompt, n_predict = (int(x) for x in rng.integers((30, 20), (700, 300)))
        tokens = tuple(rng.integers(0, 32, n_prompt).tolist())
        engine.add_request(Request(id=str(i), tokens=tokens, n_predict=n_predict))
    n_max, empty, reserved = 1000, [], []
    while engine.has_work:
        engine.step()
        n_tokens = [state.n_computed for state in engine.running]
        (pool,) = engine.stats().pools
        n_cells = config.block_size * (pool.n_units - pool.n_free)
        if n_tokens:
            empty.append(1 - sum(n_tokens) / n_cells)
            reserved.append(1 - sum(n_tokens) / (n_max * len(n_tokens)))
    measure.emit(
        "waste",
        requests=_N_REQUESTS.value,
        blocks=round(float(np.mean(empty)), 4),
        reserving=round(float(np.mean(reserved)), 4),
    )


def policy() -> None:
    """Steps of 16 requests that decode: with a policy, or SelfExtend, that has moved nothing yet.

    Steps of the sides are interleaved, ten each.
    """
    decoder, n = _decoder(), _N_SEQ
    extend = SelfExtend(ga_n=4, ga_w=300)
    for mode in ("paged", "cell"):
        told = {"none": (None, None), "policy": (ContextShift(), None), "extend": (None, extend)}
        sides = {name: _outgrowing(decoder, mode, *x) for name, x in told.items()}
        for engine in sides.values():
            # What differs is on the host alone.
            engine.device.programs = sides["none"].device.programs
            engine.step()
        runs = {x: functools.partial(_ten_steps, engine) for x, engine in sides.items()}
        times = rounds.interleaved(runs, 6 * _N_ROUNDS.value, n_warm=0)
        for name, engine in sides.items():
            stats = engine.stats()
            assert len(engine.running) == n and not stats.n_waiting, "a request ended, or waits"
            assert not stats.drops["tokens"] and not stats.n_extend, "something moved already"
            # Ten steps by the ten beside them, for steps get longer with what is cached.
            by_ten = [np.median(np.reshape(times[x], (-1, 10)), axis=1) for x in (name, "none")]
            ratios = measure.quartiles((by_ten[0] / by_ten[1]).tolist(), scale=1, digits=3)
            figures = {"side": name, "mode": mode, "ms": times.ms(name)}
            measure.emit("step before a drop", requests=n, **figures, ratio=ratios)


def _ten_steps(engine: Engine) -> list[float]:
    return measure.clock(engine.step, 11)[1:]


def _outgrowing(
    decoder: Decoder, mode: Mode, policy: Policy | None, extend: SelfExtend | None
) -> Engine:
    """16 requests that decode and, with a policy or SelfExtend, will outgrow 400 tokens."""
    block = 16 if mode == "paged" else 256
    config = _config(n_ctx=_N_SEQ * 512, n_seq_max=_N_SEQ, block_size=block, self_extend=extend)
    options = EngineConfig(mode=mode, rules=Rules(n_batch=config.n_ubatch, n_ctx_seq=400))
    engine = Engine(decoder, config, options, policy=policy)
    for i in range(_N_SEQ):
        tokens = tuple(np.random.default_rng(i).integers(0, _N_TOKENS, 60).tolist())
        # None may end, nor drop anything, in the steps that are timed.
        n_predict = 340 if policy is None else 600
        engine.add_request(Request(id=str(i), tokens=tokens, n_predict=n_predict))
    while engine.stats().n_waiting:
        engine.step()
    return engine


def drop() -> None:
    """What a drop of 128 of 1,024 cells adds to the step that it comes in, K-shift included."""
    decoder = _decoder()
    for mode in ("paged", "cell"):
        block = 16 if mode == "paged" else 256
        config = _config(n_ctx=2048, n_seq_max=2, block_size=block)
        options = EngineConfig(mode=mode, rules=Rules(n_batch=config.n_ubatch, n_ctx_seq=1024))
        engine = Engine(decoder, config, options, policy=ContextShift(n_keep=4, n_discard=128))
        tokens = tuple(i % _N_TOKENS for i in range(1000))
        engine.add_request(Request(id="endless", tokens=tokens, n_predict=1 << 20))
        spent, dropped = [], []
        # The first drop compiles the K-shift.
        while len(dropped) < 1 + 4 * _N_ROUNDS.value or len(spent) < dropped[-1] + 6:
            before = engine.stats().drops["tokens"]
            spent += measure.clock(engine.step, 1)
            if engine.stats().drops["tokens"] > before:
                dropped.append(len(spent) - 1)
        beside = [float(np.median([*spent[i - 5 : i], *spent[i + 1 : i + 6]])) for i in dropped]
        added = [spent[i] - x for i, x in zip(dropped[1:], beside[1:], strict=True)]
        figures = {"step_ms": measure.quartiles(beside), "added_ms": measure.quartiles(added)}
        measure.emit("drop of 128 of 1,024 cells", mode=mode, n_drops=len(added), **figures)


_RUN = {
    **{"throughput": throughput, "prefix": prefix, "policy": policy, "drop": drop},
    **{"host": host, "ahead": ahead, "waste": waste},
}

if __name__ == "__main__":
    commands.run(main)
