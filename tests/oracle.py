"""A slow, obvious cache: for each sequence a list of rows. No cells, no blocks, no deltas.

Rows hold unrotated keys; attention rotates them by their position and is computed from scratch in
float64. Two sequences share a row when both lists hold the same object.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """One token: position, unrotated key and value [H, D]. Compared by identity."""

    pos: int
    k: np.ndarray
    v: np.ndarray


class Oracle:
    """Sequences of rows, with the operations of the cache."""

    def __init__(self):
        self.rows: dict[int, list[Row]] = {}

    def of(self, seq):
        """Rows of a sequence, by position."""
        return sorted(self.rows.get(seq, []), key=lambda row: row.pos)

    def positions(self, seq):
        return [row.pos for row in self.of(seq)]

    def pos_min(self, seq):
        return min(self.positions(seq), default=-1)

    def pos_max(self, seq):
        return max(self.positions(seq), default=-1)

    def n_used(self):
        """Rows in all, a shared one counted once: the cells that a cache needs."""
        return len({id(row) for rows in self.rows.values() for row in rows})

    def n_shared(self, seq, p0=0, p1=None):
        """Rows of seq's range that another sequence holds as well: what a move has to copy."""
        others = {id(r) for s, rows in self.rows.items() if s != seq for r in rows}
        return sum(id(r) in others for r in self.rows.get(seq, []) if inside(r, p0, p1))

    def append(self, seq, positions, rows):
        """Adds tokens; rows are pairs (k, v)."""
        new = [
            Row(int(p), np.array(k), np.array(v)) for p, (k, v) in zip(positions, rows, strict=True)
        ]
        self.rows.setdefault(seq, []).extend(new)

    def rm(self, seq, p0=0, p1=None):
        """Drops [p0, p1) of a sequence, or of all with None."""
        for s in list(self.rows) if seq is None else [seq]:
            self.rows[s] = [r for r in self.rows.get(s, []) if not inside(r, p0, p1)]

    def cp(self, src, dst, p0=0, p1=None):
        """Shares rows of src with dst, which keeps what it has."""
        has = self.rows.setdefault(dst, [])
        new = [r for r in self.rows.get(src, []) if inside(r, p0, p1)]
        has.extend([r for r in new if not any(r is h for h in has)])

    def keep(self, seq):
        """Drops all sequences but one."""
        self.rows = {seq: self.rows.get(seq, [])}

    def add(self, seq, p0, p1, d):
        """Moves [p0, p1) of this sequence alone; what would be negative is dropped."""
        if d != 0:
            self._renumber(seq, p0, p1, lambda pos: pos + d)

    def div(self, seq, p0, p1, d):
        """Divides [p0, p1) of this sequence alone."""
        if d != 1:
            self._renumber(seq, p0, p1, lambda pos: pos // d)

    def clear(self):
        self.rows = {}

    def _renumber(self, seq, p0, p1, new_pos):
        # A new row is no longer shared, even if its position stays: the cache has copied it.
        moved = [
            dataclasses.replace(r, pos=new_pos(r.pos)) if inside(r, p0, p1) else r
            for r in self.rows.get(seq, [])
        ]
        self.rows[seq] = [r for r in moved if r.pos >= 0]

    def attend(self, seq, q, q_pos, mask, scale, rope_fn=None, soft_cap=None, sinks=None):
        """Attention of queries [T, Q, D] at q_pos [T] over everything their sequence holds.

        The queries' own tokens have been appended before. rope_fn(x, pos) turns [N, D]; None
        leaves queries and keys as they are. sinks: a logit a query head, without a value.
        """
        q = np.asarray(q, np.float64)
        out = np.zeros_like(q)
        for t, pos in enumerate(q_pos):
            seen = [r for r in self.of(seq) if sees(mask, r.pos, int(pos))]
            for head in range(q.shape[1]):
                sink = None if sinks is None else float(sinks[head])
                rows = [kv_head(r, head, q.shape[1]) for r in seen]
                out[t, head] = one_query(q[t, head], int(pos), rows, scale, rope_fn, soft_cap, sink)
        return out


def inside(row, p0, p1):
    return row.pos >= p0 and (p1 is None or row.pos < p1)


def kv_head(row, head, n_heads):
    """(pos, k, v) of the kv head that a query head reads."""
    h = head // (n_heads // row.k.shape[0])
    return row.pos, row.k[h].astype(np.float64), row.v[h].astype(np.float64)


def one_query(q, pos, rows, scale, rope_fn, soft_cap, sink):
    """Softmax over scores of the rows (pos, k, v), times their values; zeros if there are none."""
    if not rows:
        return np.zeros_like(q)
    turn = rope_fn or (lambda x, pos: x)
    turned = turn(q[None], pos)[0]
    scores = np.array([float(turned @ turn(k[None], p)[0]) * scale for p, k, _ in rows])
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    all_scores = scores if sink is None else np.append(scores, sink)
    weights = np.exp(scores - all_scores.max())
    total = np.exp(all_scores - all_scores.max()).sum()
    return sum(w * v for w, (_, _, v) in zip(weights, rows, strict=True)) / total


def sees(mask, k, q):
    """The rules of MaskSpec, one pair of positions at a time."""
    if k <= q and k < mask.n_sink:
        return True
    if mask.kind == "full":
        return k <= q
    if mask.kind == "window":
        return k <= q and q - k < mask.size
    if mask.kind == "chunked":
        return k <= q and k // mask.size == q // mask.size
    assert mask.kind == "symmetric"
    return abs(q - k) <= mask.size // 2


def rope(x, pos, *, n_rot, base=10000.0, layout="neox"):
    """x [N, D] turned to one position: pair i by the angle pos * base^(-2 i / n_rot)."""
    out = np.array(x, np.float64)
    for i in range(n_rot // 2):
        a, b = (2 * i, 2 * i + 1) if layout == "norm" else (i, i + n_rot // 2)
        angle = pos * base ** (-2.0 * i / n_rot)
        c, s = np.cos(angle), np.sin(angle)
        out[:, a] = x[:, a] * c - x[:, b] * s
        out[:, b] = x[:, a] * s + x[:, b] * c
    return out


def rotated(x, pos, base=100.0):
    """x [..., H, D] rotated to pos [...]: channels (i, i + D/2) by the angle pos * base^(-2 i / D).

    Toys have this base.
    """
    n = x.shape[-1] // 2
    angle = np.multiply.outer(np.asarray(pos), base ** (-np.arange(n) / n))[..., None, :]
    c, s, a, b = np.cos(angle), np.sin(angle), x[..., :n], x[..., n:]
    return np.concatenate([a * c - b * s, a * s + b * c], axis=-1)
