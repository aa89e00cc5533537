"""Chunks that were computed alone, one behind the other in a sequence, and blended.

The chunks' entries are copied to where they stand now; layers up to the check layer are computed
for all their tokens, the others for those that `kvrt.reuse.blend` chooses, and for the suffix.

Source: arXiv:2405.16444 (CacheBlend). Departures: masks go by position, so no token sees a later
one; the chunks themselves stay as they are.
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from kvrt.arrays import Array, Float, Int32, TokenIds
from kvrt.cache import capture, checks, schedules
from kvrt.cache.cell_cache import CellCache
from kvrt.cache.runner import CellSteps, Runner
from kvrt.cellcache import history
from kvrt.cells.edits import Copy, Remove, Shift
from kvrt.cells.slots import StepTokens, pad
from kvrt.config import GroupSpec
from kvrt.errors import BadConfig, BadRange, BadSequence, UsageError
from kvrt.options.compose import check_together
from kvrt.program.batch import Batch, bucket, some_outputs, to_batch
from kvrt.program.layer_range import LayerRange
from kvrt.reuse.blend import BlendSpec, hidden_ratio, to_recompute
from kvrt.reuse.diff import common_prefix
from kvrt.runtime.chunks.chunk import CachedChunk, StoredChunk
from kvrt.runtime.chunks.loading import Loading, Pace
from kvrt.runtime.stepper import Stepper
from kvrt.session.change import edit
from kvrt.session.fingerprint import Fingerprint
from kvrt.session.snapshot import Snapshot

_TILE = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blended:
    """What a blend gave.

    Attributes:
      logits: of the suffix's last token. `[1, V]`
      n_reused: tokens of chunks in the sequence.
      computed: positions of those that were computed in every layer, ascending.
      ratio: that decided how many they are; the spec's, or with `auto_ratio` a greater one.
      load_s: that reading stored chunks took on the worker; 0 if they were in memory.
      prefill_s: what computing the chunks in all layers would take, by the time that the first
        ones took; None without `auto_ratio`.
    """

    logits: Float[Array, "1 V"]
    n_reused: int
    computed: Int32[np.ndarray, " m"]
    ratio: float
    load_s: float = 0.0
    prefill_s: float | None = None


AnyChunk = CachedChunk | StoredChunk


def compute(
    stepper: Stepper,
    text: tuple[TokenIds, TokenIds],
    here: Fingerprint,
    begun: Snapshot | None = None,
) -> CachedChunk:
    """See `Runtime.chunk`; `text` is its tokens and the lead."""
    cache, n_vocab, (tokens, lead) = stepper.cache, stepper.n_vocab, text
    ids = [*(checks.token_ids(lead, n_vocab).tolist() if len(lead) else ())]
    ids += checks.token_ids(tokens, n_vocab).tolist()
    _check_cache(cache)
    seq_id = _empty(cache, set())
    schedules.check_free(cache, len(ids), cache.host.n_free)
    try:
        n = 0 if begun is None else _restore_begun(cache, begun, ids, (seq_id, here))
        if n < len(ids):
            stepper.append(ids[n:], seq_id, None, None)
        snapshot = capture.capture(cache, here, {})
        for other in set(snapshot.seq_ids) - {seq_id}:
            snapshot = edit.cut(snapshot, other, 0)
    finally:
        cache.apply(Remove(seq_id=seq_id))
    return CachedChunk(snapshot=snapshot, n_lead=len(lead))


def _restore_begun(
    cache: CellCache, begun: Snapshot, ids: Sequence[int], where: tuple[int, Fingerprint]
) -> int:
    """Takes in what the first sequence of a session has of some tokens; how many.

    Those behind a hole, or approximate, are left out: computed alone they are others.
    """
    seq_id, here = where
    found = capture.fitted(begun, here, cache.config, convert=False)
    s = min(found.seq_ids)
    n = common_prefix(history.tokens(found.history, s), np.asarray(ids, np.int32))
    n = min(n, history.n_as_alone(found.history, s))
    if n:
        capture.restore(cache, edit.cut(found, s, n), {s: seq_id})
    return n


def blend(
    cache: CellCache,
    chunks: Sequence[AnyChunk],
    suffix: TokenIds,
    spec: BlendSpec,
    where: tuple[int, Fingerprint],
) -> Blended:
    """See `Runtime.blend`; `where` is the sequence, and what chunks must share with this cache."""
    seq_id, here = where
    ids = checks.token_ids(suffix, cache.device.n_vocab)
    _check_cache(cache)
    groups = cache.device.layout.groups
    check_spec(len(chunks), cache.device.layout.n_layers, spec)
    _check_shared(groups, spec)
    scratch = _scratch(cache, seq_id)
    schedules.check_free(cache, sum(_sizes(chunks)) + len(ids), cache.host.n_free)

    def fitted(chunk: CachedChunk) -> CachedChunk:
        found = capture.fitted(chunk.snapshot, here, cache.config, convert=False)
        return dataclasses.replace(chunk, snapshot=found)

    try:
        with Loading(chunks, fitted) as loading:
            placing = _Placing(cache, loading, (seq_id, scratch))
            return _Blend(cache, seq_id, spec, placing).run(_sizes(chunks), ids)
    except BaseException:
        for s in (scratch, seq_id):
            cache.apply(Remove(seq_id=s))
        raise


class _Placing:
    """Puts copies of chunks one behind the other, keys rotated to where they stand."""

    def __init__(self, cache: CellCache, loading: Loading, seq_ids: tuple[int, int]):
        """Of the sequences one is theirs, through the other they go."""
        self._cache, self.loading, self._seq_ids = cache, loading, seq_ids
        self._end = 0

    def up_to(self, pos: int) -> bool:
        """Places chunks until one holds the position, and those in memory; whether there was one.

        Nothing is pending behind it.
        """
        before = self._end
        while self._end <= pos or self.loading.is_ready:
            self._place(*self.loading.next())
        if placed := self._end > before:
            self._cache.flush()
        return placed

    def _place(self, chunk: CachedChunk, n_lead: int) -> None:
        cache, (seq_id, scratch), end = self._cache, self._seq_ids, self._end
        capture.restore(cache, chunk.snapshot, {chunk.seq_id: scratch})
        if n_lead:
            cache.apply(Remove(seq_id=scratch, p0=0, p1=n_lead))
        if end != n_lead:
            cache.apply(Shift(seq_id=scratch, p0=n_lead, p1=None, d=end - n_lead))
        cache.apply(Copy(src=scratch, dst=seq_id, p0=end, p1=None))
        cache.apply(Remove(seq_id=scratch))
        self._end += len(chunk.tokens) - n_lead


class _Blend:
    """One blend of a sequence whose chunks are placed as they come, from position 0 on."""

    def __init__(self, cache: CellCache, seq_id: int, spec: BlendSpec, placing: _Placing):
        """Takes a cache with nothing pending."""
        self._cache, self._seq_id, self._spec = cache, seq_id, spec
        self._layers = LayerRange(cache.device, spec.check_layer + 1)
        self._runner, self._placing = Runner(cache.device, CellSteps(cache)), placing
        # By position, the tokens and, by group, their cells: none of them moves meanwhile.
        self._ids, self._slots = np.zeros(0, np.int32), list[np.ndarray]()

    def run(self, sizes: Sequence[int], suffix: np.ndarray) -> Blended:
        """Checks all tokens, then finishes those that are chosen, and the suffix."""
        n = sum(sizes)
        pos, pace = np.arange(n + len(suffix), dtype=np.int32), Pace()
        found = []
        for at in self._parts(pos[:n]):
            self._place(int(at[-1]))
            with pace.of(len(at), self._cache.device.programs):
                batch = self._held(at, [])
                found.append(self._check(batch, at)[:, : len(at)])
                if self._spec.auto_ratio:
                    jax.block_until_ready(found[-1])  # sync: it is timed
        self._ids = np.concatenate([self._ids, suffix])
        for at in self._parts(pos[n:]):
            step, none = self._tokens(at), some_outputs([], self._size(at))
            self._runner.run(step, none, lambda batch, at=at: self._check(batch, at))
        self._slots = [x.by_position(self._seq_id) for x in self._cache.host.groups]
        # sync: the host has to know which tokens the other layers compute.
        apart = np.concatenate([np.asarray(x) for x in found], axis=1)
        spec, prefill_s = self._settled(n, pace)
        again = to_recompute(apart, sizes, spec)
        logits = [self._finish(at) for at in self._parts(np.concatenate([again, pos[n:]]))][-1]
        self._cache.logits.put(self._seq_id, int(pos[-1]), logits)
        return Blended(
            logits=logits,
            n_reused=n,
            computed=again,
            ratio=spec.ratio,
            load_s=self._placing.loading.load_s,
            prefill_s=prefill_s,
        )

    def _place(self, pos: int) -> None:
        """Has the chunks in place up to a position, and knows their tokens and cells."""
        if self._placing.up_to(pos):
            self._ids = history.tokens(self._cache.host.history, self._seq_id)
            groups = self._cache.host.groups
            self._slots = [x.by_position(self._seq_id) for x in groups]

    def _settled(self, n: int, pace: Pace) -> tuple[BlendSpec, float | None]:
        """The spec with the ratio that it says, and how long n tokens take in all layers."""
        spec = self._spec
        if not spec.auto_ratio:
            return spec, None
        n_layers = self._cache.device.layout.n_layers
        prefill_s = pace.per_token_s * n * n_layers / (spec.check_layer + 1)
        hidden = hidden_ratio(self._placing.loading.load_s, prefill_s)
        return dataclasses.replace(spec, ratio=max(spec.ratio, hidden)), prefill_s

    def _check(self, batch: Batch, at: np.ndarray) -> Array:
        """Distances of tokens at positions `at` from what was cached, after the first layers."""
        return self._layers.check(batch, pad(at, self._size(at), self._cache.config.n_ctx))

    def _finish(self, at: np.ndarray) -> Array:
        """Logits of the last of some tokens, after the other layers."""
        return self._layers.finish(self._held(at, [len(at) - 1]), pad(at, self._size(at), 0))

    def _held(self, at: np.ndarray, wanted: list[int]) -> Batch:
        """Tokens at positions `at`, in the cells that they have."""
        step = self._tokens(at)
        where = self._cache.host.places(step, [of[at] for of in self._slots])
        return to_batch(step, where, some_outputs(wanted, step.size))

    def _tokens(self, at: np.ndarray) -> StepTokens:
        mine = np.full(len(at), self._seq_id, np.int32)
        return StepTokens(tokens=self._ids[at], pos=at, seq_ids=mine, size=self._size(at))

    def _size(self, at: np.ndarray) -> int:
        return padded_size(len(at), self._cache.config.n_ubatch)

    def _parts(self, pos: np.ndarray) -> list[np.ndarray]:
        n = self._cache.config.n_ubatch
        return [pos[i : i + n] for i in range(0, len(pos), n)]


def padded_size(n: int, n_ubatch: int) -> int:
    """What n tokens are padded to: steps' buckets up to 128, multiples of 128 above.

    A share of a text is any number of tokens, and the next bucket may be twice as many.
    """
    if n <= _TILE:
        return bucket(n, n_ubatch)
    return min(-(-n // _TILE) * _TILE, n_ubatch)


def _check_cache(cache: CellCache) -> None:
    """Refuses caches whose entries cannot be replaced token by token."""
    check_together({"chunks": ""}, cache.traits)
    programs = cache.device.programs
    programs.kind.in_parts(programs.params)


def check_spec(n_chunks: int, n_layers: int, spec: BlendSpec) -> None:
    """Refuses a blend of nothing, and one without a layer behind the check layer.

    Raises:
      UsageError: there is no chunk.
      BadConfig: the model has no layer behind the check layer.
    """
    if not n_chunks:
        raise UsageError("there is no chunk to blend; give at least one, or prefill the suffix")
    if spec.check_layer >= n_layers - 1:
        most = f"so at most {n_layers - 2}" if n_layers > 1 else "so prefill the text"
        raise BadConfig(
            f"check_layer {spec.check_layer} leaves no layer behind it; the model has {n_layers}, "
            f"{most}"
        )


def _check_shared(groups: Sequence[GroupSpec], spec: BlendSpec) -> None:
    """Refuses a check layer that parts layers from those whose keys and values they read."""
    at = spec.check_layer
    for group in groups:
        if at in group.all_layers and at not in group.layers:
            raise BadConfig(
                f"check_layer {at} reads the keys and values of another layer and has none to "
                f"compare; take one of {', '.join(map(str, group.layers))}"
            )
        parted = [pair for pair in group.kv_of if pair[1] <= at < pair[0]]
        if parted:
            raise BadConfig(
                f"check_layer {at} lies between layer {parted[0][1]} and layer {parted[0][0]}, "
                "which reads its keys and values of all tokens; take a layer outside of them"
            )


def _scratch(cache: CellCache, seq_id: int) -> int:
    """A sequence that chunks go through on their way to an empty one."""
    end = cache.host.pos_max(cache.check_seq_id(seq_id))
    if end >= 0:
        raise BadRange(
            f"sequence {seq_id} holds tokens up to position {end}; blend into an empty one"
        )
    return _empty(cache, {seq_id})


def _empty(cache: CellCache, but: set[int]) -> int:
    n = cache.config.n_seq_max
    found = [s for s in range(n) if s not in but and cache.host.pos_max(s) < 0]
    if not found:
        raise BadSequence(f"of {n} sequences no other one is empty; clear one, or raise n_seq_max")
    return found[-1]


def _sizes(chunks: Sequence[AnyChunk]) -> list[int]:
    return [len(x.tokens) - (x.n_lead if i else 0) for i, x in enumerate(chunks)]
