"""Context checkpoints in a file of one sequence, as llama.cpp's server adds them to a slot.

    "SCKP", version, how many; of each: tokens before it (8 bytes), least and greatest position (4
    each), size (8) and data, and two more sizes with their data, which are 0 without a draft model

The data is what a server keeps in memory: a mark, a sequence, and the section of windowed layers,
of states, or both, as in the file. Of windowed layers it has the cells that the newest token sees.

Source: llama.cpp `server-task.cpp` (server_prompt_checkpoint), `llama-kv-cache-iswa.cpp`.
"""

import dataclasses
import struct
from collections.abc import Iterator, Sequence

import numpy as np

from kvrt.config import GroupSpec
from kvrt.errors import BadSession, SessionMismatch
from kvrt.session import owners
from kvrt.session.fingerprint import Fingerprint
from kvrt.session.interop import foreign
from kvrt.session.interop.llama_format import CHECKPOINTS, CHECKPOINTS_VERSION, Place, sections
from kvrt.session.interop.llama_sections import (
    FileOf,
    Section,
    Written,
    WrittenCells,
    read_section,
    section,
)
from kvrt.session.interop.llama_states import checkpoint_section, read_states
from kvrt.session.interop.source import Source
from kvrt.session.owners import Owned
from kvrt.session.snapshot import CheckpointPart, GroupPart, Snapshot, packed_part

_IN_MEMORY = 0xAF143CD8  # before what a server keeps
_LEAST = 40  # bytes of a checkpoint


def read_checkpoints(
    at: Source, fingerprint: Fingerprint, found: Sequence[Section], of: FileOf
) -> tuple[CheckpointPart, ...]:
    """What a server may go back to, as checkpoints of sequence 0; none where there are none.

    Those beyond the end of the sequence are left out.

    Args:
      at: behind the sections of the file.
      fingerprint: of the cache that will go on.
      found: the sections of keys and values.
      of: the file.

    Raises:
      BadSession: they are damaged.
      SessionMismatch: of a version, or a model, that is not known.
    """
    if at.left < 8:
        return ()
    magic = at.number("u4", "the server's checkpoints")
    if magic != CHECKPOINTS:
        at.back(4)
        return ()
    version = at.number("u4", "the version of the server's checkpoints")
    if version != CHECKPOINTS_VERSION:
        raise SessionMismatch(
            f"{at.name}: version {version} of the server's checkpoints is not supported, only "
            f"{CHECKPOINTS_VERSION}; save the slot again with another llama.cpp"
        )
    windows = _windows(of.groups)
    if not _has_checkpoints(fingerprint, of.groups, windows):
        at.skip(at.left)
        return ()
    kept: dict[int, CheckpointPart] = {}
    for _ in range(_count(at)):
        part = _checkpoint(at, fingerprint, found, windows, of)
        if part is not None:
            kept[part.pos] = part
    return tuple(kept[pos] for pos in sorted(kept))


def write_checkpoints(snapshot: Snapshot, seq_id: int, how: Written) -> Iterator[bytes]:
    """The context checkpoints of a sequence, as a server writes them; nothing without any.

    Where windowed layers keep every position (`swa_full`) there is nothing to write of them.
    """
    windows = _windows(how.groups)
    mine = [x for x in snapshot.checkpoints if seq_id in x.seq_ids and _is_whole(x, windows)]
    if not mine or not _has_checkpoints(snapshot.fingerprint, how.groups, windows):
        return
    yield struct.pack("<III", CHECKPOINTS, CHECKPOINTS_VERSION, len(mine))
    for part in mine:
        first = last = part.pos - 1
        data = b""
        if windows:
            cells, tails = _tails(snapshot, part, windows)
            data = b"".join(section(tails, cells, how))
            # A server evaluates the greatest position again, for which a window here is too short.
            first, last = int(cells.owned.pos.min(initial=last)), part.pos
        if part.state is not None:
            data += b"".join(checkpoint_section(snapshot, how.groups, part))
            first = last = part.pos - 1
        yield struct.pack("<qiiQIi", part.pos, first, last, len(data) + 8, _IN_MEMORY, 0)
        yield data + struct.pack("<QQ", 0, 0)


def _windows(groups: Sequence[GroupSpec]) -> Sequence[Place]:
    """The windowed layers that llama.cpp keeps apart from those that keep every position."""
    found = sections(groups)
    return found[1] if len(found) == 2 else ()


def _has_checkpoints(
    fingerprint: Fingerprint, groups: Sequence[GroupSpec], windows: Sequence[Place]
) -> bool:
    """Whether checkpoints of a model hold windows, states, or both.

    Where all layers of attention are windowed llama.cpp keeps every position of them.
    """
    if windows:
        return True
    return fingerprint["recurrent"] is not None and all(g.mask.kind == "full" for g in groups)


def _is_whole(part: CheckpointPart, windows: Sequence[Place]) -> bool:
    return all(part.tails[place.group] is not None for place in windows)


def _tails(
    snapshot: Snapshot, part: CheckpointPart, windows: Sequence[Place]
) -> tuple[WrittenCells, Snapshot]:
    """The cells of a checkpoint's windows, and a snapshot of these groups as they were then."""
    groups: list[GroupPart] = list(snapshot.groups)
    for g in {place.group for place in windows}:
        tail = part.tails[g]
        assert tail is not None
        groups[g] = tail
    pos = groups[windows[0].group].pos
    for place in windows:
        if not np.array_equal(groups[place.group].pos, pos):
            raise SessionMismatch(
                f"windows of the checkpoint at position {part.pos} that llama.cpp keeps in one "
                "cache have other cells here; leave its checkpoints out with convert --to f16"
            )
    n = len(pos)
    owned = Owned(pos=pos, cell=np.arange(n, dtype=np.int32), seq=np.zeros(n, np.int32))
    cells = WrittenCells(places=windows, owned=owned, keep=np.ones(n, bool))
    return cells, dataclasses.replace(snapshot, groups=tuple(groups))


def _count(at: Source) -> int:
    n = at.number("u4", "the number of checkpoints")
    at.need(_LEAST * n, f"{n:,} checkpoints")
    return n


def _checkpoint(
    at: Source,
    fingerprint: Fingerprint,
    found: Sequence[Section],
    windows: Sequence[Place],
    of: FileOf,
) -> CheckpointPart | None:
    """One of them; None of one beyond the end of the sequence."""
    n_tokens = at.number("i8", "the tokens of a checkpoint")
    at.skip(8)  # its least and greatest position, which its data says too
    size = at.number("u8", "the size of a checkpoint")
    at.need(size, "a checkpoint")
    left = at.left
    mark = at.number("u4", "a checkpoint")
    at.skip(4)  # the sequence that it was of
    near = read_section(at, windows, of) if windows else None
    states = read_states(at, fingerprint, of.groups, whole=False)
    ends = [] if near is None else [int(near.owned.pos.max(initial=-1))]
    ends += [] if states is None else [states.held[0][0][0]]
    if mark != _IN_MEMORY or left - at.left != size or set(ends) != {n_tokens - 1}:
        raise BadSession(
            f"{at.name}: a checkpoint of {n_tokens} tokens is of position {ends[0]} in "
            f"{left - at.left:,} of {size:,} bytes; the file is damaged, make it again"
        )
    for _ in range(2):
        at.skip(at.number("u8", "the size of a draft's checkpoint"))
    state = None
    if states is not None:
        ((_, index),) = states.held[0]
        state = states.one(index)
    tails: tuple[GroupPart | None, ...] = (None,) * len(of.groups)
    if near is not None:
        far = found[0].owned
        if n_tokens > int(far.pos.max(initial=-1)) + 1:
            return None
        _check_types(at.name, n_tokens, near, found)
        before = owners.narrowed(far, far.pos < n_tokens)
        mask = of.groups[windows[0].group].mask
        lost = foreign.lost(at.name, near.owned, before, mask)
        tails = tuple(_tail(near, g, lost) if g in near.k else None for g in range(len(of.groups)))
    return CheckpointPart(pos=n_tokens, seq_ids=(0,), tails=tails, state=state)


def _check_types(name: str, n_tokens: int, near: Section, found: Sequence[Section]) -> None:
    """Refuses windows of another KV dtype than the file's."""
    here, there = (near.types, near.rotations), (found[1].types, found[1].rotations)
    if found[1].types[0] and here != there:
        raise BadSession(
            f"{name}: a checkpoint of {n_tokens} tokens has keys and values of {here}, the file "
            f"of {there}; make it again"
        )


def _tail(near: Section, group: int, lost: dict[int, foreign.Intervals]) -> GroupPart:
    blocks = foreign.blocks(near.k[group], near.v[group], len(near.owned.pos))
    return packed_part(near.owned.pos, lost, blocks)
