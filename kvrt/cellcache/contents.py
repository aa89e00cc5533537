"""What a cell cache contains, without its bytes: cells, states, token history and checkpoints.

Every change is asked of all parts before any of them is replaced: new contents, or an error.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from kvrt.arrays import Int32
from kvrt.cellcache import blocks, history, recurrent
from kvrt.cellcache import group as groups
from kvrt.cellcache.blocks import CellCopies
from kvrt.cellcache.checkpoint import checkpoints
from kvrt.cellcache.checkpoint.checkpoints import Checkpoints
from kvrt.cellcache.group import CellGroup
from kvrt.cellcache.history import TokenHistory
from kvrt.cellcache.recurrent import RecurrentStates
from kvrt.cells.cells import owned
from kvrt.cells.edits import Copy, SeqEdit
from kvrt.errors import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheContents:
    """Cells by group of attention layers, states of recurrent layers if any, and all tokens.

    Beside them the checkpoints: where a sequence can be resumed although its layers have moved on.
    """

    groups: tuple[CellGroup, ...]
    states: RecurrentStates | None = None
    history: TokenHistory = dataclasses.field(default_factory=TokenHistory)
    checkpoints: Checkpoints = dataclasses.field(default_factory=Checkpoints)


# New contents, and by group the cells to copy before they are committed.
Changed = tuple[CacheContents, tuple[CellCopies, ...]]


def apply(contents: CacheContents, edit: SeqEdit) -> Changed:
    """The contents after an edit, and by group the cells to copy first.

    Each part has its own `apply`, whose errors are raised; recurrent states are asked first.
    """
    states = contents.states and recurrent.apply(contents.states, edit)
    new = [groups.apply(g, edit) for g in contents.groups]
    joins = isinstance(edit, Copy) and bool(contents.history.pieces.get(edit.dst))
    if isinstance(edit, Copy) and joins:
        _check_shared_alike(contents, edit)
    after = dataclasses.replace(
        contents,
        states=states,
        history=history.apply(contents.history, edit),
        checkpoints=checkpoints.apply(contents.checkpoints, edit, joins=joins),
    )
    return _changed(after, new)


def _check_shared_alike(contents: CacheContents, edit: Copy) -> None:
    """Refuses to share again what one group shares and another one has copied, as blocks make it.

    The token would be in the sequence once in one group, and twice in the other.
    """
    shared, apart = set(), set()
    for group in contents.groups:
        pos, ours = group.cells.pos, owned(group.cells, edit.dst)
        theirs = owned(group.cells, edit.src) & (pos >= edit.p0)
        theirs &= pos < edit.p1 if edit.p1 is not None else True
        both = set(pos[ours & theirs].tolist())
        shared |= both
        copied = (set(pos[ours].tolist()) & set(pos[theirs].tolist())) - both
        # A window has lost these positions: no token sees them, even twice.
        lost = group.lost.get(edit.dst, ())
        apart |= {x for x in copied if not any(a <= x < b for a, b in lost)}
    if shared & apart:
        raise UsageError(
            f"sequences {edit.src} and {edit.dst} share position {min(shared & apart)} in some "
            "layers and have copies of it in others, for one of them lies or lay in blocks; remove "
            f"it from sequence {edit.dst} first"
        )


def edited(
    contents: CacheContents, seq_id: int, edits: Sequence[SeqEdit]
) -> tuple[CacheContents, tuple[tuple[CellCopies, ...], ...]]:
    """The contents after a schedule's edits of a sequence, and for each the cells to copy first.

    A state of recurrent layers has all tokens before it, whatever their positions, and stays.
    """
    if not edits:
        return contents, ()
    after, copies = dataclasses.replace(contents, states=None), []
    for edit in edits:
        after, some = apply(after, edit)
        copies.append(some)
    n_past = groups.n_past(groups.main_group(after.groups), seq_id)
    states = contents.states and recurrent.folded(contents.states, seq_id, n_past)
    return dataclasses.replace(after, states=states), tuple(copies)


def clear(contents: CacheContents) -> CacheContents:
    """The contents of an empty cache."""
    return CacheContents(
        groups=tuple(map(groups.clear, contents.groups)),
        states=contents.states and recurrent.clear(contents.states),
    )


def unmoved(old: CacheContents, new: CacheContents) -> bool:
    """Whether an edit left every position where it was, as a shift by nothing does."""
    same = zip((*old.groups, old.states), (*new.groups, new.states), strict=True)
    return all(a is b for a, b in same)


def to_blocks(contents: CacheContents, seq_id: int, size: int) -> Changed:
    """The contents with a sequence in blocks; see `groups.group_to_blocks`."""
    return _copied(
        contents, [groups.group_to_blocks(g, seq_id, size) for g in contents.groups], [seq_id]
    )


def to_cells(contents: CacheContents, seq_id: int) -> CacheContents:
    """The contents with a sequence in cells."""
    new = tuple(groups.group_to_cells(g, [seq_id]) for g in contents.groups)
    return dataclasses.replace(contents, groups=new)


def tables(contents: CacheContents, seq_id: int) -> tuple[tuple[int, ...] | None, ...]:
    """Block table of a sequence by group, None where it lies in cells."""
    return tuple(
        blocks.block_table(g.cells, seq_id, g.blocks.size)
        if g.blocks and seq_id in g.blocks.seqs
        else None
        for g in contents.groups
    )


def copy_on_write(
    contents: CacheContents, seq_ids: Int32[np.ndarray, " n"], first: Mapping[int, int]
) -> Changed:
    """The contents with blocks of their own for tokens; see `groups.group_copy_on_write`."""
    new = [groups.group_copy_on_write(g, seq_ids, first) for g in contents.groups]
    return _copied(contents, new, first)


def n_tokens_free(contents: CacheContents) -> int:
    """Tokens that there are cells for."""
    return groups.n_free_in(contents.groups)


def _changed(contents: CacheContents, new: list[tuple[CellGroup, CellCopies]]) -> Changed:
    after = dataclasses.replace(contents, groups=tuple(g for g, _ in new))
    return after, tuple(copies for _, copies in new)


def _copied(
    contents: CacheContents, new: list[tuple[CellGroup, CellCopies]], seqs: Iterable[int]
) -> Changed:
    """After cells were copied for sequences, which now own tokens alone that they shared."""
    tokens = contents.history
    after, (src, dst) = next((x for x in new if not x[0].rolls), (None, blocks.no_copies()))
    if after is not None and len(src):
        for s in seqs:
            mine = owned(after.cells, s)[dst] & (after.cells.pos[src] >= 0)
            tokens = history.split(tokens, s, np.asarray(after.cells.pos)[dst[mine]])
    return _changed(dataclasses.replace(contents, history=tokens), new)
