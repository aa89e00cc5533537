"""What llama.cpp's server adds to a file of one sequence when it saves a slot.

    tokens       -1, version, how many, the tokens, how many pieces of media
    ... sections of keys and values, and states
    checkpoints  "SCKP", version, how many; of each: tokens before it (8 bytes), least and greatest
                 position (4 each), size (8) and data, and two more sizes with their data, which
                 are 0 without a draft model. The data is what a server keeps in memory: a mark, a
                 sequence, and the section of windowed layers, or of states, or both.

Source: llama.cpp `server-task.cpp` (server_tokens, server_prompt_checkpoint).
"""

import struct
from collections.abc import Iterator, Sequence

import numpy as np

from kvrt.config import GroupSpec
from kvrt.errors import BadSession, SessionMismatch
from kvrt.session.fingerprint import Fingerprint
from kvrt.session.interop.llama_format import (
    CHECKPOINTS,
    CHECKPOINTS_VERSION,
    SLOT_MARK,
    SLOT_VERSION,
)
from kvrt.session.interop.llama_states import checkpoint_section, read_states
from kvrt.session.interop.source import Source
from kvrt.session.snapshot import CheckpointPart, Snapshot

_IN_MEMORY = 0xAF143CD8  # before what a server keeps
_LEAST = 40  # bytes of a checkpoint


def read_tokens(at: Source) -> Sequence[int]:
    """The tokens, also where a server has packed them.

    Raises:
      BadSession: they are damaged.
      SessionMismatch: of a version that is not known, or with media.
    """
    n = at.number("u4", "the number of tokens")
    words = at.array(n, np.dtype("<i4"), "the tokens").tolist()
    if not words or words[0] != SLOT_MARK:
        return words
    if len(words) < 4:
        raise BadSession(f"{at.name}: the server's tokens end after {n} words; make it again")
    version, n_tokens = words[1:3]
    if version != SLOT_VERSION:
        raise SessionMismatch(
            f"{at.name}: version {version} of the server's tokens is not supported, only "
            f"{SLOT_VERSION}; save the slot again with another llama.cpp"
        )
    if not 0 <= n_tokens <= n - 4:
        raise BadSession(
            f"{at.name}: the server names {n_tokens} tokens in {n} words; the file is damaged, "
            "make it again"
        )
    rest = words[3 + n_tokens :]
    if rest[0] > 0:
        raise SessionMismatch(
            f"{at.name}: {rest[0]} pieces of pictures or sound are not supported, only text"
        )
    if rest != [0]:
        raise BadSession(f"{at.name}: {len(rest)} words follow the server's tokens, 1 is allowed")
    return words[3 : 3 + n_tokens]


def read_checkpoints(
    at: Source, fingerprint: Fingerprint, groups: Sequence[GroupSpec]
) -> tuple[CheckpointPart, ...]:
    """States that a server may go back to, as checkpoints of sequence 0; none where there are none.

    Those of models with windows are passed over: the server keeps whole windows in them.

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
    if not _of_states(fingerprint, groups):
        at.skip(at.left)
        return ()
    found = [_checkpoint(at, fingerprint, groups) for _ in range(_count(at))]
    return tuple({x.pos: x for x in found}[pos] for pos in sorted({x.pos for x in found}))


def write_checkpoints(
    snapshot: Snapshot, groups: Sequence[GroupSpec], seq_id: int
) -> Iterator[bytes]:
    """The context checkpoints of a sequence, as a server writes them; nothing without any.

    Those of models with windows are left out.
    """
    mine = [x for x in snapshot.checkpoints if seq_id in x.seq_ids]
    if not mine or not _of_states(snapshot.fingerprint, groups):
        return
    yield struct.pack("<III", CHECKPOINTS, CHECKPOINTS_VERSION, len(mine))
    for part in mine:
        data = b"".join(checkpoint_section(snapshot, groups, part))
        last = part.pos - 1
        yield struct.pack("<qiiQIi", part.pos, last, last, len(data) + 8, _IN_MEMORY, 0)
        yield data + struct.pack("<QQ", 0, 0)


def _of_states(fingerprint: Fingerprint, groups: Sequence[GroupSpec]) -> bool:
    """Whether checkpoints of a model hold states and nothing else."""
    return fingerprint["recurrent"] is not None and all(g.mask.kind == "full" for g in groups)


def _count(at: Source) -> int:
    n = at.number("u4", "the number of checkpoints")
    at.need(_LEAST * n, f"{n:,} checkpoints")
    return n


def _checkpoint(
    at: Source, fingerprint: Fingerprint, groups: Sequence[GroupSpec]
) -> CheckpointPart:
    """One of them."""
    n_tokens = at.number("i8", "the tokens of a checkpoint")
    at.skip(8)  # its least and greatest position, which its data says too
    size = at.number("u8", "the size of a checkpoint")
    at.need(size, "a checkpoint")
    left = at.left
    mark = at.number("u4", "a checkpoint")
    at.skip(4)  # the sequence that it was of
    states = read_states(at, fingerprint, groups, whole=False)
    assert states is not None
    ((pos, index),) = states.held[0]
    if mark != _IN_MEMORY or left - at.left != size or n_tokens != pos + 1:
        raise BadSession(
            f"{at.name}: a checkpoint of {n_tokens} tokens has the state of position {pos} in "
            f"{left - at.left:,} of {size:,} bytes; the file is damaged, make it again"
        )
    for _ in range(2):
        at.skip(at.number("u8", "the size of a draft's checkpoint"))
    state = tuple(tuple(t[index] for t in layer) for layer in states.tables)
    return CheckpointPart(pos=pos + 1, seq_ids=(0,), tails=(None,) * len(groups), state=state)
