"""Context checkpoints of a session: to tensors and entries of a manifest, and back with checks."""

from collections.abc import Mapping

import numpy as np

from kvrt.cellcache import history as histories
from kvrt.cellcache import window
from kvrt.cellcache.history import TokenHistory
from kvrt.cellcache.saved import one_owner
from kvrt.cellcache.window import Intervals
from kvrt.config import MaskSpec
from kvrt.errors import DAMAGED, BadSession
from kvrt.session import described, expected, kv_arrays
from kvrt.session.kv_file.blobs import Tensors
from kvrt.session.manifest import Blob, CheckpointEntry, Manifest, TailEntry
from kvrt.session.snapshot import (
    CheckpointPart,
    GroupPart,
    block_from,
    joined_block,
)


def checkpoint_tensors(part: CheckpointPart) -> Tensors:
    """Cells, keys and values by group, then the state of each recurrent layer."""
    out: dict = {}
    for i, tail in enumerate(part.tails):
        if tail is not None:
            block = joined_block(tail.blocks)
            out |= {f"{i}.index": tail.index, f"{i}.pos": tail.pos}
            out |= {**kv_arrays.tensors(f"{i}.k", block.k), **kv_arrays.tensors(f"{i}.v", block.v)}
    for i, layer in enumerate(part.state or ()):
        out |= {f"state.{i}.{j}": x for j, x in enumerate(layer)}
    return out


def checkpoint_entry(part: CheckpointPart, blob: Blob) -> CheckpointEntry:
    """What the manifest says of a checkpoint."""
    tails = (
        x
        and TailEntry(
            n_cells=x.n_cells, head=x.head, n_used=len(x.index), lost=tuple(x.lost.get(0, ()))
        )
        for x in part.tails
    )
    return CheckpointEntry(pos=part.pos, seq_ids=part.seq_ids, tails=tuple(tails), blob=blob)


def checkpoint_part(
    found: Manifest, said: CheckpointEntry, tensors: Tensors, history: TokenHistory
) -> CheckpointPart:
    """A checkpoint of a session.

    Raises:
      BadSession: it contradicts the manifest, its sequences' tokens, or itself.
    """
    wanted = expected.checkpoint_arrays(found, said)
    arrays = {name: kv_arrays.array(tensors, name, x.shape, x.dtype) for name, x in wanted.items()}
    for s in said.seq_ids:
        held = histories.positions(history, s)
        if not len(held) or held[-1] < said.pos - 1:
            raise _bad(said, f"sequence {s} ends before it")
        for i, tail in enumerate(said.tails):
            if tail is not None:
                seen = described.mask(found.fingerprint, i), arrays[f"{i}.pos"], tail.lost
                _check_seen(said, i, held[held < said.pos], seen)
    tails = tuple(
        None if x is None else _tail(found, said, i, x, arrays) for i, x in enumerate(said.tails)
    )
    state = None
    if found.held is not None:
        state = tuple(
            tuple(arrays[f"state.{i}.{j}"] for j in range(len(layer)))
            for i, layer in enumerate(described.state_arrays(found.fingerprint))
        )
    return CheckpointPart(pos=said.pos, seq_ids=said.seq_ids, tails=tails, state=state)


def _tail(
    found: Manifest, of: CheckpointEntry, group: int, said: TailEntry, arrays: Mapping
) -> GroupPart:
    index, pos = arrays[f"{group}.index"], arrays[f"{group}.pos"]
    n = len(index)
    ascend = n < 2 or (np.diff(index) > 0).all()
    inside = not n or (index[0] >= 0 and index[-1] < said.n_cells and pos.min() >= 0)
    if not (ascend and inside) or (n and pos.max() >= of.pos):
        raise _bad(of, f"cells of group {group} are out of order or range")
    named = {name.removeprefix(f"{group}."): x for name, x in arrays.items()}
    return GroupPart(
        n_cells=said.n_cells,
        head=said.head,
        index=index,
        pos=pos,
        seqs=one_owner(n, 0),
        lost={0: said.lost} if said.lost else {},
        blocks=[block_from(named, found.fingerprint, group)],
    )


def _check_seen(
    said: CheckpointEntry,
    group: int,
    held: np.ndarray,
    tail: tuple[MaskSpec, np.ndarray, Intervals],
) -> None:
    """Refuses a tail that lacks a token which the next one sees, or does not say what it lost.

    It may have others, those that a policy pins.
    """
    mask, pos, lost = tail
    floor = min(window.horizon(mask, said.pos), said.pos - 1)
    gone = np.zeros(len(held), bool)
    for a, b in lost:
        gone |= (held >= a) & (held < b)
    ends = not lost or lost[-1][1] <= floor
    if not (ends and np.array_equal(np.sort(pos), held[~gone])):
        raise _bad(said, f"cells of group {group} are not those that the next token sees")


def _bad(said: CheckpointEntry, what: str) -> BadSession:
    return BadSession(f"the checkpoint at position {said.pos}: {what}; {DAMAGED}")
