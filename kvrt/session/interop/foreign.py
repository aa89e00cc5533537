"""What files of other programs need beside their layout: order of channels, tokens, blocks.

Such files hold keys, values and positions and little else. Which token a cell is of, and which
positions a windowed layer forgot, is worked out here, and what cannot be is refused.
"""

from collections.abc import Collection, Mapping, Sequence

import ml_dtypes
import numpy as np

from kvrt.arrays import Bool, Int32, Shaped
from kvrt.cellcache.history import TokenHistory
from kvrt.cellcache.window import Intervals, horizon, union
from kvrt.config import GroupSpec, MaskSpec, RopeLayout
from kvrt.errors import BadSession, SessionMismatch, UsageError
from kvrt.session import owners
from kvrt.session.fingerprint import Fingerprint
from kvrt.session.owners import Owned
from kvrt.session.snapshot import BLOCK_CELLS, KVBlock, Snapshot
from kvrt.store.codec import AnyKVArray

DTYPES = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}

Tokens = Mapping[int, Sequence[int]]
KVElements = Shaped[np.ndarray, "L n H D"]


def refuse_unrotated(fingerprint: Fingerprint, what: str) -> None:
    """Refuses a cache that rotated keys cannot go into.

    Raises:
      SessionMismatch: rope="read".
    """
    if fingerprint["rope"] == "read":
        raise SessionMismatch(
            f"{what} holds keys with RoPE applied, this cache has rope='read'; use rope='write'"
        )


def refuse_latents(groups: Sequence[GroupSpec], what: str) -> None:
    """Refuses layers whose keys and values lie as one latent.

    Raises:
      SessionMismatch: a group keeps latents.
    """
    if any(group.latent_rank for group in groups):
        raise SessionMismatch(
            f"{what} has keys and values apart, this model keeps one latent a token (MLA); only "
            "kvrt's own sessions hold it"
        )


def refuse_caches(fingerprint: Fingerprint, groups: Sequence[GroupSpec], what: str) -> None:
    """Refuses caches that keep keys otherwise; see `refuse_unrotated` and `refuse_latents`."""
    refuse_unrotated(fingerprint, what)
    refuse_latents(groups, what)


def refuse_states(fingerprint: Fingerprint, what: str) -> None:
    """Refuses caches with states.

    Raises:
      SessionMismatch: recurrent layers.
    """
    if fingerprint["recurrent"] is not None:
        raise SessionMismatch(
            f"{what} of a model with recurrent layers is not supported; only attention is"
        )


def chosen(snapshot: Snapshot, seq_id: int | None, *, whole: bool) -> int | None:
    """The one sequence to write, None for all.

    Raises:
      UsageError: the session is empty, or which of several sequences is not said.
    """
    held = list(snapshot.seq_ids)
    if not held:
        raise UsageError("the session holds nothing; there is nothing to write")
    if whole:
        return None
    if seq_id is None and len(held) > 1:
        raise UsageError(f"one sequence is wanted, the session holds {held}; name one (--seq)")
    if seq_id is not None and seq_id not in held:
        raise UsageError(f"sequence {seq_id} is wanted, the session holds {held}; name another")
    return held[0] if seq_id is None else seq_id


def order(found: RopeLayout, wanted: RopeLayout, group: GroupSpec) -> np.ndarray | None:
    """Which channel of a key stands where: wanted = found[..., order]; None for the same order.

    A model in the other layout has the rows of its projection the other way round, so that both
    compute the same scores from the same pairs.
    """
    if found == wanted or group.rope is None:
        return None
    n = group.rope.n_rot
    to_neox = np.concatenate([np.arange(0, n, 2), np.arange(1, n, 2), np.arange(n, group.head_dim)])
    return to_neox if wanted == "neox" else np.argsort(to_neox)


def blocks(k: AnyKVArray, v: AnyKVArray, n: int) -> list[KVBlock]:
    """Keys and values of n cells of a group in blocks, which share their memory.

    Those of bf16 become their bits, as a cache has them.
    """
    whole = KVBlock(k=_as_bits(k), v=_as_bits(v))
    return [whole.some(slice(i, i + BLOCK_CELLS)) for i in range(0, n, BLOCK_CELLS)]


def _as_bits(kv: AnyKVArray) -> AnyKVArray:
    if not isinstance(kv, np.ndarray) or kv.dtype != DTYPES["bf16"]:
        return kv
    return kv.view(np.uint16)


def check_finite(name: str, what: str, rows: np.ndarray) -> None:
    """Refuses keys and values that no model writes; the only damage to them that can be seen.

    Raises:
      BadSession: an infinity, or not a number.
    """
    if not np.isfinite(rows).all():
        raise BadSession(
            f"{name}: {what} hold values that are no finite numbers; the file is damaged, make it "
            "again"
        )


def unseen(owned: Owned, mask: MaskSpec, n_more: int) -> Bool[np.ndarray, " n"]:
    """Cells that no owner's newest token sees, nor any later one.

    Args:
      owned: cells of windowed layers.
      mask: of the layers.
      n_more: positions right before those that are seen, which do not count as unseen either.
    """
    seen = np.zeros(len(owned.pos), bool)
    for s in owned.seq_ids:
        cells = owned.of(s)
        first = horizon(mask, int(owned.pos[cells[-1]])) - n_more
        seen[cells[owned.pos[cells] >= first]] = True
    return ~seen


def lost(name: str, near: Owned, far: Owned, mask: MaskSpec) -> dict[int, Intervals]:
    """Positions that windowed layers lack, by sequence.

    Args:
      name: of the file.
      near: cells of the windowed layers.
      far: cells of the layers that keep every position.
      mask: of the windowed layers.

    Raises:
      BadSession: the windowed layers hold what the others do not, or lack what is still seen.
    """
    strange = np.setdiff1d(owners.as_numbers(near), owners.as_numbers(far))
    if strange.size:
        seq, pos = divmod(int(strange[0]), 1 << 32)
        raise BadSession(
            f"{name}: position {pos} of sequence {seq} is in windowed layers alone; the file is "
            "damaged, make it again"
        )
    found = {}
    for s in far.seq_ids:
        held = far.pos[far.of(s)]
        missing = np.setdiff1d(held, near.pos[near.of(s)])
        first = horizon(mask, int(held[-1]))
        if missing.size and missing[-1] >= first:
            raise BadSession(
                f"{name}: windowed layers lack position {missing[-1]} of sequence {s}, and see "
                f"all from {first} on; make the file again"
            )
        if missing.size:
            found[s] = _runs(missing)
    return found


def history_of(
    name: str, owned: Owned, ids: Sequence[int], given: Tokens, n_vocab: int
) -> TokenHistory:
    """Which token made which cell.

    Args:
      name: of the file.
      owned: cells of the layers that keep every position.
      ids: tokens of the lowest sequence, from position to position.
      given: the same by sequence, in place of what the file says.
      n_vocab: ids there are.

    Raises:
      BadSession: the number of tokens does not fit the positions, or a sequence has none.
      SessionMismatch: a token is not in the vocabulary.
    """
    made = np.full(len(owned.pos), -1, np.int32)
    pieces = {}
    for i, s in enumerate(owned.seq_ids):
        cells = owned.of(s)
        if i == 0 or s in given:
            made[cells] = _matched(name, owned.pos[cells], given.get(s, ids), s, n_vocab)
        n = int(np.count_nonzero(made[cells] < 0))
        if n:
            raise BadSession(
                f"{name}: {n} of {len(cells)} cells of sequence {s} have no token, the file names "
                "those of one sequence; give the others' tokens"
            )
        pieces[s] = (np.stack([owned.pos[cells], made[cells], cells]),)
    return TokenHistory(pieces=pieces, n_marks=len(owned.pos))


def _matched(
    name: str, pos: Int32[np.ndarray, " n"], ids: Sequence[int], seq_id: int, n_vocab: int
) -> Int32[np.ndarray, " n"]:
    """The token of each position. More tokens than positions were not evaluated yet."""
    found = np.asarray(ids, np.int64)
    wrong = found[(found < 0) | (found >= n_vocab)]
    if wrong.size:
        raise SessionMismatch(
            f"{name}: token {wrong[0]} of sequence {seq_id}, the vocabulary has {n_vocab}; the "
            "file is of another model, or damaged"
        )
    n = len(pos)
    if len(found) < n or (len(found) > n and int(pos[-1]) != n - 1):
        raise BadSession(
            f"{name}: {len(found)} tokens for {n} positions up to {pos[-1]} of sequence {seq_id}; "
            "give the tokens of its positions"
        )
    return found[:n].astype(np.int32)


def _runs(pos: np.ndarray) -> Intervals:
    """Ascending positions as intervals."""
    ends = np.flatnonzero(np.diff(pos) > 1)
    starts = pos[np.concatenate([[0], ends + 1])]
    stops = pos[np.concatenate([ends, [len(pos) - 1]])] + 1
    return union(zip(starts.tolist(), stops.tolist(), strict=True))


def kv_dtype(snapshot: Snapshot, which: str, known: Collection[str], program: str) -> str:
    """The type of a snapshot's keys or values, `which` is type_k or type_v.

    Raises:
      SessionMismatch: another program does not know it.
    """
    name = snapshot.fingerprint[which]
    name = ",".join(name) if isinstance(name, list) else name
    if name not in known:
        raise SessionMismatch(
            f"KV dtype {name} cannot be written for {program}; convert the session to one of "
            f"{', '.join(known)}"
        )
    return name
