"""Host work of the scheduler and of the tiers, without a model.

Run it with `python -m scripts.bench.schedule`: the time to plan a step in which 256 sequences
decode, with and without a queue behind them; blocks taken and freed a second, in pools of three
sizes; keys stored and found a second; blocks of 256 KiB written to a disk and read back.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from absl import flags

from kvrt.cells.edits import SeqEdit
from kvrt.options.serving import Rules
from kvrt.paged.pool import BlockPool
from kvrt.paged.tiers.block_file import BlockFile
from kvrt.paged.tiers.index import TierIndex
from kvrt.serving import request as requests
from kvrt.serving.request import Request, SeqState
from kvrt.serving.scheduling.scheduler import Scheduler
from scripts._lib import commands, measure

_N_ROWS = flags.DEFINE_integer("rows", 256, "Sequences that decode.", lower_bound=1)
_N_STEPS = flags.DEFINE_integer("steps", 500, "Steps that are timed.", lower_bound=30)
_N_WAITING = flags.DEFINE_integer("waiting", 5000, "Requests in the queue.", lower_bound=0)

_BLOCK = 16
_BLOCK_BYTES = 256 << 10


class Endless:
    """A cache that always has room, in blocks of 16 tokens; see `kvrt.serving.cache.base.Space`."""

    n_max = 1 << 30

    def __init__(self, n_seq_max: int) -> None:
        """Empty."""
        self.n_seq_max = n_seq_max
        self._free = list(range(n_seq_max))

    def find_hit(self, state: SeqState) -> int | None:
        """Nothing is found."""
        return 0

    def n_cached(self, state: SeqState) -> int:
        """Nothing is cached."""
        return 0

    def admit(self, state: SeqState, n_tokens: int, whole: int | None) -> int | None:
        """Everybody is admitted."""
        state.seq_id = self._free.pop()
        self.grow(state, n_tokens)
        return 0

    def grow(self, state: SeqState, n_tokens: int) -> bool:
        """There is always room, in whole blocks."""
        state.capacity = -(-n_tokens // _BLOCK) * _BLOCK
        return True

    def grow_by_one(self, states: Sequence[SeqState]) -> bool:
        """Likewise."""
        return all(self.grow(state, state.n_computed + 1) for state in states)

    def chunk(self, state: SeqState, start: int, n: int) -> int:
        """Everything at once."""
        return n

    def edit(self, state: SeqState, edits: Sequence[SeqEdit]) -> None:
        """Never called."""
        raise AssertionError("no request has a schedule")

    def fork(self, src: SeqState, dst: SeqState, n_tokens: int) -> bool:
        """Nobody forks."""
        return False

    def holds(self, state: SeqState) -> bool:
        """Endless."""
        return True

    def release(self, state: SeqState, *, damaged: bool = False, kept: bool = True) -> None:
        """Takes a sequence number back."""
        assert state.seq_id is not None
        self._free.append(state.seq_id)
        state.seq_id, state.capacity = None, 0

    def offload(self, state: SeqState) -> bool:
        """Nobody is offloaded."""
        return False


def main() -> None:
    for n_waiting, by_prefix in ((0, False), (_N_WAITING.value, False), (_N_WAITING.value, True)):
        plan(n_waiting, by_prefix)
    for n_blocks in (1_000, 100_000, 1_000_000):
        pool(n_blocks)
    for policy in ("lru", "arc"):
        keys(policy)
    disk()


def plan(n_waiting: int, by_prefix: bool) -> None:
    """A step of sequences that all decode."""
    rules = Rules(n_batch=4096, by_prefix=by_prefix)
    scheduler = Scheduler(Endless(_N_ROWS.value), rules)
    for i in range(_N_ROWS.value + n_waiting):
        request = Request(id=str(i), tokens=tuple(range(64)), n_predict=_N_STEPS.value + 100)
        scheduler.add(requests.samples_of(request)[0])
    planning, ending = [], []
    for _ in range(_N_STEPS.value + 10):
        start = time.perf_counter()
        step = scheduler.plan()
        planned = time.perf_counter()
        scheduler.ran(step)
        for state in step.ending:
            state.append(1)
        planning.append(planned - start)
        ending.append(time.perf_counter() - planned)
    figures = {
        "plan_ms": measure.quartiles(planning[10:]),
        "ran_ms": measure.quartiles(ending[10:]),
    }
    sizes = {"rows": _N_ROWS.value, "waiting": n_waiting, "by_prefix": by_prefix}
    measure.emit("schedule", **sizes, **figures)


def pool(n_blocks: int) -> None:
    """Blocks taken and given back, 16 at a time, half of the pool held."""
    blocks, n, rounds = BlockPool(n_blocks), 16, 2000
    held = [blocks.take(n) for _ in range(n_blocks // n // 2)]

    def run() -> None:
        for i in range(rounds):
            at = i * 7919 % len(held)
            blocks.free(held[at])
            held[at] = blocks.take(n)

    rate = rounds * n / _clock(run)
    measure.emit("pool", n_blocks=n_blocks, taken_and_freed_a_second=round(rate))


def keys(policy) -> None:
    """Keys that come and go in a tier of 10,000 blocks, 64 at a time, one of each pushed out."""
    index = TierIndex(10_000, policy=policy)
    n, rounds = 64, 2000

    def run() -> None:
        for i in range(rounds):
            some = range(i * n, (i + 1) * n)
            index.reserve(index.wanted(some), keep=set(some))
            index.complete_store(some)
            index.touch(some)

    run()
    per_key = _clock(run) / (rounds * n)
    measure.emit("tier_keys", policy=policy, keys_a_second=round(1 / per_key))


def disk() -> None:
    """Blocks of a file, digests included."""
    n = 200
    block = np.random.default_rng(0).integers(0, 256, _BLOCK_BYTES).astype(np.uint8)
    out = np.empty_like(block)
    with tempfile.TemporaryDirectory() as folder:
        file = BlockFile(Path(folder) / "blocks", _BLOCK_BYTES, n, b"bench")
        wrote = _clock(lambda: [file.write(i, b"%d" % i, block) for i in range(n)])
        read = _clock(lambda: [file.read(i, b"%d" % i, out) for i in range(n)])
        file.close()
    mb = n * _BLOCK_BYTES / 1e6
    measure.emit("tier_disk", write_mb_s=round(mb / wrote), read_mb_s=round(mb / read))


def _clock(work: Callable[[], object]) -> float:
    """Seconds, the median of five runs."""
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))


if __name__ == "__main__":
    commands.run(main)
