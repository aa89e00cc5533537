"""The manifest of a session: everything but the arrays, as JSON, and back with checks.

What a file says is believed only within limits: each value is checked for its type and range, so
that a file made on purpose cannot make a reader crash, hang or allocate.
"""

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from msgspec import Meta

from kvrt.cellcache.window import union
from kvrt.config import MAX_SEQUENCES
from kvrt.errors import DAMAGED, BadSession
from kvrt.files.typed_json import json_value, shown_json, typed
from kvrt.session import described, divided
from kvrt.session.divided import Division
from kvrt.session.fingerprint import Fingerprint, completed
from kvrt.session.snapshot import SamplingState
from kvrt.whole_numbers import Count, Whole

_DIGEST = Meta(pattern="^[0-9a-f]{32}$", extra={"wanted": "32 hexadecimal digits"})
# 128k tokens of two groups of layers in 4,096 sequences take 1.0 MB, a million tokens 0.7 MB more;
# what a reader makes of so many bytes takes ten times as much, and a tenth of a second.
MAX_BYTES = 1 << 22
MAX_GROUPS, MAX_BLOBS = 4096, 1 << 20

SeqId = Annotated[int, Meta(ge=0, le=MAX_SEQUENCES - 1)]
SeqIds = Annotated[tuple[SeqId, ...], Meta(max_length=MAX_SEQUENCES)]
Pairs = Annotated[tuple[tuple[Count, Count], ...], Meta(max_length=1 << 20)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blob:
    """A stretch of the file that holds tensors: where, how long, and the xxh3-128 of its bytes."""

    offset: Whole
    n_bytes: Whole
    digest: Annotated[str, _DIGEST]


Blobs = Annotated[tuple[Blob, ...], Meta(max_length=MAX_BLOBS)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupEntry:
    """One group: see `GroupPart`; keys and values are in `blocks`, other arrays in `meta`.

    Where devices of a mesh wrote it, `division` says how, and `blocks` are its pieces.
    """

    n_cells: Count
    head: Count
    n_used: Count
    lost: Mapping[SeqId, Pairs]
    blocks: Blobs
    division: Division | None = None

    @property
    def parts(self) -> Division:
        """Its division; all in one part where nothing divides it."""
        return self.division or divided.undivided(self.n_used)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TailEntry:
    """What a checkpoint keeps of one group: see `GroupPart`; arrays are in its blob."""

    n_cells: Count
    head: Count
    n_used: Count
    lost: Pairs


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointEntry:
    """One context checkpoint: see `CheckpointPart`."""

    pos: Count
    seq_ids: SeqIds
    tails: Annotated[tuple[TailEntry | None, ...], Meta(max_length=MAX_GROUPS)]
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

    version: Annotated[str, Meta(max_length=1000)]
    fingerprint: Fingerprint
    groups: Annotated[tuple[GroupEntry, ...], Meta(max_length=MAX_GROUPS)]
    held: Mapping[SeqId, Pairs] | None = None
    states: Blob | None = None
    n_marks: Whole
    n_tokens: Mapping[SeqId, Count]
    exact: Mapping[SeqId, Count]
    ga_i: Mapping[SeqId, Count]
    logits: Mapping[SeqId, Count]
    draws: Mapping[SeqId, SamplingState]
    policy: Mapping[str, Any] | None = None
    meta: Blob
    checkpoints: Annotated[tuple[CheckpointEntry, ...], Meta(max_length=MAX_BLOBS)] = ()
    in_blocks: SeqIds = ()
    select: Mapping[str, Any] | None = None
    policies: Mapping[SeqId, Mapping[str, Any]] = dataclasses.field(default_factory=dict)

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
        value = json_value(data)
    except ValueError as error:
        raise BadSession(f"the manifest is {error}; {DAMAGED}") from error
    try:
        found = typed(Manifest, value, "manifest")
    except ValueError as error:
        raise BadSession(f"{error}; {DAMAGED}") from error
    for name in ("fingerprint", "policy", "select", "policies"):
        described.check_values(f"manifest.{name}", getattr(found, name))
    for name, bad, wanted in _contradictions(found):
        raise BadSession(f"manifest.{name} is {shown_json(bad)}; {wanted}; {DAMAGED}")
    fingerprint = completed(found.fingerprint)
    states = None if found.held is None else found.states
    return dataclasses.replace(found, fingerprint=fingerprint, states=states)


def _contradictions(found: Manifest) -> Iterator[tuple[str, Any, str]]:
    """Values that each alone may be, but not together: place, value and what is wanted."""
    tails = [
        (f"checkpoints[{i}].tails[{j}]", tail)
        for i, point in enumerate(found.checkpoints)
        for j, tail in enumerate(point.tails)
        if tail is not None
    ]
    for name, x in [*((f"groups[{i}]", x) for i, x in enumerate(found.groups)), *tails]:
        for key in ("head", "n_used"):
            if getattr(x, key) > x.n_cells:
                yield f"{name}.{key}", getattr(x, key), f"at most its {x.n_cells} cells are wanted"
        lost = [x.lost] if isinstance(x, TailEntry) else x.lost.values()
        for pairs in lost:
            if union(pairs) != pairs:
                yield f"{name}.lost", pairs, "ascending disjoint intervals are wanted"
        parts = None if isinstance(x, TailEntry) else x.division
        if parts and len(parts.writers) != len(parts.cells) * parts.n_heads:
            n = f"{len(parts.cells)} times {parts.n_heads} processes are wanted"
            yield f"{name}.division.writers", parts.writers, n
    if found.held is not None and found.states is None:
        yield "states", None, "an object is wanted"
    for seq_id, pairs in (found.held or {}).items():
        if not pairs or any(b[0] != a[0] + 1 for a, b in itertools.pairwise(pairs)):
            yield f"held.{seq_id}", pairs, "positions that follow each other are wanted"
    if any(b <= a for a, b in itertools.pairwise(found.in_blocks)):
        yield "in_blocks", found.in_blocks, "ascending sequence numbers are wanted"
