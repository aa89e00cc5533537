"""Takes out of a step's block lists what several begin with, so that it is read once for them.

Source: Hydragen (arXiv:2402.05099), sec. 3; ChunkAttention (arXiv:2402.15220); the cascade
attention of FlashInfer (arXiv:2501.01005).
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from kvrt.attention import registry, xla
from kvrt.cells.slots import Places, SeqBlocks, SharedBlocks, StepTokens
from kvrt.errors import BadConfig
from kvrt.program.device import Device
from kvrt.serving.reading.cost import ReadCost, choose_runs
from kvrt.serving.reading.runs import SharedRun, find_runs

# Runs of a step and group of layers, at most; lists of more than that are read as they are.
_MOST_RUNS = 16

# Runs to read once, of all runs of some lists and their lengths.
Choice = Callable[[Sequence[SharedRun], np.ndarray, ReadCost], list[SharedRun]]


class SharedReads:
    """Finds what the sequences of each step share.

    Attributes:
      choose: which runs of some lists to read once, see `kvrt.serving.reading.cost.choose_runs`.
      counts: cells in runs that were "read_once", and those that this spared: "not_read_again"; of
        each step and group of layers.
    """

    def __init__(self, device: Device) -> None:
        """Nothing is shared yet.

        Raises:
          BadConfig: what computes attention on this device reads no runs.
        """
        name = device.attention.implementation
        if not registry.reads_shared(name):
            raise BadConfig(
                f"shared_reads with attention {name!r}, which was registered without reads_shared; "
                "use attention='chunked', or leave shared_reads out"
            )
        layout = device.layout
        self._sizes = [layout.stores[i].extent.block_size for i in layout.store_of]
        self.choose: Choice = choose_runs
        self._nothing: dict[tuple[int, int], SharedBlocks] = {}
        self.counts = Counter(read_once=0, not_read_again=0)

    def share(self, step: StepTokens, places: Sequence[Places]) -> tuple[Places, ...]:
        """Places of a step by group of layers; lists of sequences that decode may have runs."""
        done: dict[int, SeqBlocks] = {}  # groups of a pool have the same lists
        out = []
        for at, size in zip(places, self._sizes, strict=True):
            lists = at.seq_blocks
            if lists is None or len(lists.tables) < 2:
                out.append(at)
                continue
            if id(lists) not in done:
                done[id(lists)] = self._shared(lists, step.n_single, size)
            out.append(dataclasses.replace(at, seq_blocks=done[id(lists)]))
        return tuple(out)

    def _shared(self, lists: SeqBlocks, n: int, block_size: int) -> SeqBlocks:
        tables, n_blocks = np.asarray(lists.tables), np.asarray(lists.n_blocks)
        nothing = self._no_runs(*tables.shape)
        found = find_runs(tables[:n], n_blocks[:n])
        if found:
            cost = ReadCost(
                n_lists=len(tables),
                n_side=xla.blocks_a_tile(block_size),
                widths=nothing.widths,
                most=len(nothing.tables),
            )
            found = self.choose(found, n_blocks[:n], cost)
        if not found:
            return dataclasses.replace(lists, shared=nothing)
        for run in found:
            n_cells = run.n_blocks * block_size
            self.counts["read_once"] += n_cells
            self.counts["not_read_again"] += n_cells * (len(run.members) - 1)
        return read_apart(lists, found, nothing)

    def _no_runs(self, n_lists: int, n_entries: int) -> SharedBlocks:
        shape = n_lists, n_entries
        if shape not in self._nothing:
            n_runs = min(n_lists - 1, _MOST_RUNS)
            self._nothing[shape] = SharedBlocks(
                tables=np.zeros((n_runs, n_entries), np.int32),
                n_blocks=np.zeros(n_runs, np.int32),
                members=np.full((n_runs, n_lists), n_lists, np.int32),
            )
        return self._nothing[shape]


def read_apart(lists: SeqBlocks, runs: Sequence[SharedRun], nothing: SharedBlocks) -> SeqBlocks:
    """Lists without what is read as runs, and the runs, in arrays of the shapes of `nothing`.

    Args:
      lists: as they are; their arrays stay so.
      runs: each comes behind the one that it goes on from.
      nothing: no runs.
    """
    tables, n_blocks = np.array(lists.tables), np.array(lists.n_blocks)
    cut, ids = np.zeros(len(tables), np.int32), np.array(nothing.tables)
    n_shared, members = np.array(nothing.n_blocks), np.array(nothing.members)
    for i, run in enumerate(runs):
        ids[i, : run.n_blocks] = lists.tables[run.members[0], run.start : run.end]
        n_shared[i] = run.n_blocks
        members[i, : len(run.members)] = run.members
        cut[run.members] = run.end
    for n in np.unique(cut[cut > 0]).tolist():
        rows = np.flatnonzero(cut == n)
        # What is left moves to the front; what was there behind it is not read any more.
        tables[rows, : tables.shape[1] - n] = lists.tables[rows, n:]
        n_blocks[rows] -= n
    shared = SharedBlocks(tables=ids, n_blocks=n_shared, members=members)
    return SeqBlocks(tables=tables, n_blocks=n_blocks, shared=shared)
