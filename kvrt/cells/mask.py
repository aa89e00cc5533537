"""Which cells a query sees: by positions and owners, never by where a cell lies."""

import dataclasses

import numpy as np

from kvrt.arrays import AnyArray, Bool, Int32, UInt32, namespace
from kvrt.config import MaskSpec


def visible(
    mask: MaskSpec,
    k_pos: Int32[AnyArray, " B"],
    k_seqs: UInt32[AnyArray, "B W"],
    q_pos: Int32[AnyArray, " T"],
    q_bits: UInt32[AnyArray, "T W"],
) -> Bool[AnyArray, "T B"]:
    """Which of B cells each of T queries sees; equal positions see each other.

    Args:
      mask: the rule.
      k_pos: positions of the cells, -1 empty.
      k_seqs: their owners.
      q_pos: positions of the queries; a query of padding has no owner and sees nothing.
      q_bits: the queries' sequences, one bit or several.

    Source: llama.cpp `set_input_kq_mask`, `is_masked_swa`; arXiv:2309.17453 for sinks.
    """
    k, q = k_pos[None, :], q_pos[:, None]
    return _shares(k_seqs, q_bits) & (k >= 0) & in_sight(mask, k, q)


def visibility(
    mask: MaskSpec,
    k_pos: Int32[AnyArray, " B"],
    k_seqs: UInt32[AnyArray, "B W"],
    q_pos: Int32[AnyArray, " T"],
    q_bits: UInt32[AnyArray, "T W"],
) -> Int32[AnyArray, ""]:
    """How much of some cells some queries see: 0 nothing, 1 some, 2 all; arguments as `visible`.

    Found of the greatest and least positions alone, so 1 may also stand for nothing or all. Queries
    of padding do not count.
    """
    xp = namespace(k_pos)
    held, real = k_pos >= 0, q_pos >= 0
    most = np.iinfo(np.int32).max
    # The nearest and the farthest pair, for each bound of the rule.
    k0, k1 = xp.min(xp.where(held, k_pos, most)), xp.max(k_pos)
    q0, q1 = xp.min(xp.where(real, q_pos, most)), xp.max(q_pos)
    none = ~xp.any(held) | ~xp.any(real)
    if mask.kind != "symmetric":
        none = none | (k0 > q1)
    if not mask.n_sink:
        match mask.kind:
            case "window":
                none = none | (q0 - k1 >= mask.size)
            case "chunked":
                none = none | (k1 < q0 // mask.size * mask.size)
            case _:
                pass
    any_k, any_q = (xp.bitwise_or.reduce(x, axis=0) for x in (k_seqs, q_bits))
    none = none | ~xp.any((any_k & any_q) != 0)
    plain = dataclasses.replace(mask, n_sink=0)
    ends = in_sight(plain, xp.stack([k0, k1])[None, :], xp.stack([q1, q0])[:, None])
    # One sequence that owns every cell and every token.
    owned = k_seqs, xp.where(real[:, None], q_bits, ~xp.zeros_like(q_bits))
    every = xp.bitwise_and.reduce(owned[0], axis=0) & xp.bitwise_and.reduce(owned[1], axis=0)
    whole = xp.all(held) & ends[0, 0] & ends[1, 1] & xp.any(every != 0)
    return xp.where(none, 0, xp.where(whole, 2, 1)).astype(np.int32)


def _shares(
    k_seqs: UInt32[AnyArray, "B W"], q_bits: UInt32[AnyArray, "T W"]
) -> Bool[AnyArray, "T B"]:
    if k_seqs.shape[1] == 1:
        return (k_seqs[:, 0][None, :] & q_bits) != 0
    return namespace(k_seqs).any((k_seqs[None] & q_bits[:, None]) != 0, axis=2)


def in_sight(
    mask: MaskSpec, k: Int32[AnyArray, "#T B"], q: Int32[AnyArray, "T #B"]
) -> Bool[AnyArray, "T B"]:
    """Which positions `k` a query at `q` may see, whoever owns them; also runs in a kernel."""
    past = k <= q
    match mask.kind:
        case "full":
            return past
        case "window":
            sees = past & (q - k < mask.size)
        case "chunked":
            sees = past & (k >= q // mask.size * mask.size)
        case "symmetric":
            sees = abs(q - k) <= mask.size // 2
    return sees | (past & (k < mask.n_sink)) if mask.n_sink else sees
