"""The manifest of a session: everything but the arrays, as JSON, and back with checks.

What a file says is believed only within limits: each value is checked for its type and range, so
that a file made on purpose cannot make a reader crash, hang or allocate.
"""

import dataclasses
import itertools
import json
from collections.abc import Mapping
from typing import Any

from kvrt.cellcache.saved import KeptStates
from kvrt.cellcache.window import Intervals, union
from kvrt.config import MAX_POS, MAX_SEQUENCES
from kvrt.errors import DAMAGED, BadSession
from kvrt.session import described
from kvrt.session.divided import division
from kvrt.session.divided.division import Division
from kvrt.session.fingerprint import Fingerprint
from kvrt.session.older_fingerprint import completed
from kvrt.session.snapshot import SamplingState

# 128k tokens of two groups of layers in 4,096 sequences take 1.0 MB, a million tokens 0.7 MB more;
# what a reader makes of so many bytes takes ten times as much, and a tenth of a second.
MAX_BYTES = 1 << 22
MAX_GROUPS, MAX_BLOBS = 4096, 1 << 20
MAX_PARTS = 1 << 16  # of a group, and processes that wrote them


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blob:
    """A stretch of the file that holds tensors: where, how long, and the xxh3-128 of its bytes."""

    offset: int
    n_bytes: int
    digest: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupEntry:
    """One group: see `GroupPart`; keys and values are in `blocks`, other arrays in `meta`.

    Where devices of a mesh wrote it, `division` says how, and `blocks` are its pieces.
    """

    n_cells: int
    head: int
    n_used: int
    lost: Mapping[int, Intervals]
    blocks: tuple[Blob, ...]
    division: Division | None = None

    @property
    def parts(self) -> Division:
        """Its division; all in one part where nothing divides it."""
        return self.division or division.undivided(self.n_used)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TailEntry:
    """What a checkpoint keeps of one group: see `TailPart`; arrays are in the checkpoint's blob."""

    n_cells: int
    head: int
    n_used: int
    lost: Intervals


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointEntry:
    """One context checkpoint: see `CheckpointPart`."""

    pos: int
    seq_ids: tuple[int, ...]
    tails: tuple[TailEntry | None, ...]
    blob: Blob


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a session says of itself.

    Attributes:
      version: of kvrt, that wrote it.
      fingerprint: what a runtime must share.
      groups: by group of attention layers.
      held: (pos, state index) of the states of each sequence, None without recurrent layers.
      states: their tables.
      n_marks: marks handed out to tokens.
      n_tokens: tokens by sequence.
      exact: how many of them at the beginning are exact, see `kvrt.cellcache.history.TokenHistory`.
      ga_i: how far SelfExtend in the cache has come, by sequence.
      logits: position of the newest token, by sequence, where its logits are known.
      draws: where sampling was left, by sequence.
      policy: what made room, None for nothing.
      meta: cells, tokens and logits.
      checkpoints: context checkpoints; a session without any does not name them.
      in_blocks: sequences that lie in blocks; likewise.
      select: sparse reads, see `Snapshot`; likewise.
      policies: policies by position, by sequence; likewise.
    """

    version: str
    fingerprint: Fingerprint
    groups: tuple[GroupEntry, ...]
    held: Mapping[int, KeptStates] | None
    states: Blob | None
    n_marks: int
    n_tokens: Mapping[int, int]
    exact: Mapping[int, int]
    ga_i: Mapping[int, int]
    logits: Mapping[int, int]
    draws: Mapping[int, SamplingState]
    policy: Mapping[str, Any] | None
    meta: Blob
    checkpoints: tuple[CheckpointEntry, ...] = ()
    in_blocks: tuple[int, ...] = ()
    select: Mapping[str, Any] | None = None
    policies: Mapping[int, Mapping[str, Any]] = dataclasses.field(default_factory=dict)

    @property
    def blobs(self) -> tuple[Blob, ...]:
        """All of them, rows first."""
        rows = tuple(b for g in self.groups for b in g.blocks)
        states = (self.states,) if self.states else ()
        return (*rows, *states, *(c.blob for c in self.checkpoints), self.meta)


def to_json(manifest: Manifest) -> bytes:
    """The manifest in bytes."""
    said = dataclasses.asdict(manifest)
    for name in ("checkpoints", "in_blocks", "select", "policies"):
        if not said[name]:
            del said[name]
    for group in said["groups"]:
        if group["division"] is None:
            del group["division"]
    return json.dumps(said, separators=(",", ":")).encode()


def from_json(data: bytes) -> Manifest:
    """The manifest in such bytes.

    Raises:
      BadSession: they are something else.
    """
    try:
        top = _Fields(json.loads(data, parse_constant=_refuse_constant), "manifest")
    except (ValueError, RecursionError) as error:
        raise BadSession(f"the manifest is no JSON: {_line(error)}; {DAMAGED}") from error
    groups = tuple(map(_group, top.items("groups", MAX_GROUPS)))
    held = top.values.get("held")
    return Manifest(
        version=top.text("version"),
        fingerprint=completed(top.plain("fingerprint")),
        groups=groups,
        held=None if held is None else top.by_seq("held", _held),
        states=None if held is None else _blob(top.inner("states")),
        n_marks=top.whole("n_marks"),
        n_tokens=top.by_seq("n_tokens", _whole),
        exact=top.by_seq("exact", _whole),
        ga_i=top.by_seq("ga_i", _whole),
        logits=top.by_seq("logits", _whole),
        draws=top.by_seq("draws", _draw),
        policy=None if top.values.get("policy") is None else top.plain("policy"),
        meta=_blob(top.inner("meta")),
        checkpoints=_checkpoints(top),
        in_blocks=_in_blocks(top),
        select=None if top.values.get("select") is None else top.plain("select"),
        policies=top.by_seq("policies", _settings) if "policies" in top.values else {},
    )


@dataclasses.dataclass(frozen=True)
class _Fields:
    """Typed look-ups in a JSON object."""

    values: Any
    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.values, dict):
            raise _bad(self.name, self.values, "an object")

    def whole(self, key: str, most: int = 2**63 - 1) -> int:
        return _whole(f"{self.name}.{key}", self.values.get(key), most)

    def text(self, key: str) -> str:
        value = self.values.get(key)
        if not isinstance(value, str) or len(value) > 1000:
            raise _bad(f"{self.name}.{key}", value, "a short string")
        return value

    def inner(self, key: str) -> "_Fields":
        return _Fields(self.values.get(key), f"{self.name}.{key}")

    def plain(self, key: str) -> dict[str, Any]:
        """An object of short texts and finite numbers."""
        values = self.inner(key).values
        described.check_values(f"{self.name}.{key}", values)
        return values

    def items(self, key: str, most: int) -> list["_Fields"]:
        found = _list(f"{self.name}.{key}", self.values.get(key), most)
        return [_Fields(x, f"{self.name}.{key}[{i}]") for i, x in enumerate(found)]

    def by_seq(self, key: str, read: Any) -> dict[int, Any]:
        """An object whose keys are sequence numbers."""
        out = {}
        for k, value in self.inner(key).values.items():
            name = f"{self.name}.{key}.{k[:20]}"
            if not (k.isascii() and k.isdigit() and len(k) <= 4 and int(k) < MAX_SEQUENCES):
                raise _bad(name, k, f"a sequence number below {MAX_SEQUENCES}")
            out[int(k)] = read(name, value)
        return out


def _group(x: _Fields) -> GroupEntry:
    n_cells = x.whole("n_cells", MAX_POS)
    return GroupEntry(
        n_cells=n_cells,
        head=x.whole("head", n_cells),
        n_used=x.whole("n_used", n_cells),
        lost=x.by_seq("lost", _intervals),
        blocks=tuple(map(_blob, x.items("blocks", MAX_BLOBS))),
        division=None if x.values.get("division") is None else _division(x.inner("division")),
    )


def _division(x: _Fields) -> Division:
    def numbers(key: str) -> tuple[int, ...]:
        name = f"{x.name}.{key}"
        most = MAX_POS if key == "cells" else MAX_PARTS - 1
        return tuple(_whole(name, n, most) for n in _list(name, x.values.get(key), MAX_PARTS))

    cells, writers, n_heads = numbers("cells"), numbers("writers"), x.whole("n_heads", MAX_PARTS)
    if not n_heads:
        raise _bad(f"{x.name}.n_heads", n_heads, "at least 1")
    if not cells or len(writers) != len(cells) * n_heads:
        raise _bad(f"{x.name}.writers", list(writers), f"{len(cells)} times {n_heads} processes")
    return Division(cells=cells, n_heads=n_heads, writers=writers)


def _checkpoints(top: _Fields) -> tuple[CheckpointEntry, ...]:
    if "checkpoints" not in top.values:
        return ()
    return tuple(map(_checkpoint, top.items("checkpoints", MAX_BLOBS)))


def _in_blocks(top: _Fields) -> tuple[int, ...]:
    name = f"{top.name}.in_blocks"
    seqs = _sequences(name, top.values.get("in_blocks", []))
    if any(b <= a for a, b in itertools.pairwise(seqs)):
        raise _bad(name, list(seqs), "ascending sequence numbers")
    return seqs


def _sequences(name: str, value: Any) -> tuple[int, ...]:
    found = _list(name, value, MAX_SEQUENCES)
    return tuple(_whole(name, s, MAX_SEQUENCES - 1) for s in found)


def _checkpoint(x: _Fields) -> CheckpointEntry:
    tails = _list(f"{x.name}.tails", x.values.get("tails"), MAX_GROUPS)
    return CheckpointEntry(
        pos=x.whole("pos", MAX_POS),
        seq_ids=_sequences(f"{x.name}.seq_ids", x.values.get("seq_ids")),
        tails=tuple(
            None if t is None else _tail(_Fields(t, f"{x.name}.tails[{i}]"))
            for i, t in enumerate(tails)
        ),
        blob=_blob(x.inner("blob")),
    )


def _tail(x: _Fields) -> TailEntry:
    n_cells = x.whole("n_cells", MAX_POS)
    return TailEntry(
        n_cells=n_cells,
        head=x.whole("head", n_cells),
        n_used=x.whole("n_used", n_cells),
        lost=_intervals(f"{x.name}.lost", x.values.get("lost")),
    )


def _blob(x: _Fields) -> Blob:
    digest = x.text("digest")
    if len(digest) != 32:
        raise _bad(f"{x.name}.digest", digest, "32 hexadecimal digits")
    return Blob(offset=x.whole("offset"), n_bytes=x.whole("n_bytes"), digest=digest)


def _intervals(name: str, value: Any) -> Intervals:
    pairs = tuple((a, b) for a, b in _pairs(name, value))
    if union(pairs) != pairs:
        raise _bad(name, pairs, "ascending disjoint intervals")
    return pairs


def _held(name: str, value: Any) -> KeptStates:
    pairs = tuple(_pairs(name, value))
    if not pairs or any(b[0] != a[0] + 1 for a, b in itertools.pairwise(pairs)):
        raise _bad(name, pairs, "positions that follow each other")
    return pairs


def _pairs(name: str, value: Any) -> list[tuple[int, int]]:
    out = []
    for i, x in enumerate(_list(name, value, 1 << 20)):
        if not isinstance(x, list) or len(x) != 2:
            raise _bad(f"{name}[{i}]", x, "a pair")
        out.append((_whole(name, x[0], MAX_POS), _whole(name, x[1], MAX_POS)))
    return out


def _draw(name: str, value: Any) -> SamplingState:
    x = _Fields(value, name)
    token = value.get("token")
    sampling = x.plain("sampling")
    if any(type(v) not in (int, float) for v in sampling.values()):
        raise _bad(f"{name}.sampling", sampling, "numbers")
    return SamplingState(
        token=None if token is None else x.whole("token", MAX_POS),
        n_drawn=x.whole("n_drawn"),
        sampling=sampling,
    )


def _settings(name: str, value: Any) -> dict[str, Any]:
    described.check_values(name, value)
    if not isinstance(value, dict):
        raise _bad(name, value, "an object")
    return value


def _list(name: str, value: Any, most: int) -> list:
    if not isinstance(value, list) or len(value) > most:
        raise _bad(name, value, f"a list of at most {most}")
    return value


def _whole(name: str, value: Any, most: int = MAX_POS) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise _bad(name, value, f"a whole number from 0 to {most}")
    return value


def _bad(name: str, value: Any, wanted: str) -> BadSession:
    found = repr(value)
    found = found if len(found) <= 60 else found[:57] + "..."
    return BadSession(f"{name} is {found}, {wanted} is wanted; {DAMAGED}")


def _refuse_constant(name: str) -> None:
    """NaN and infinities, which JSON does not have and Python's reads."""
    raise ValueError(f"{name} is no number")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
