"""Which cells a query sees: by positions and owners, never by where a cell lies."""

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


def _shares(
    k_seqs: UInt32[AnyArray, "B W"], q_bits: UInt32[AnyArray, "T W"]
) -> Bool[AnyArray, "T B"]:
    if k_seqs.shape[1] == 1:
        return (k_seqs[:, 0][None, :] & q_bits) != 0
    return namespace(k_seqs).any((k_seqs[None] & q_bits[:, None]) != 0, axis=2)


def in_sight(
    mask: MaskSpec, k: Int32[AnyArray, "1 B"], q: Int32[AnyArray, "T 1"]
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
