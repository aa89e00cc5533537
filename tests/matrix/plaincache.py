"""The oracle: a sequence is a list of (pos, k, v), which policies and SelfExtend edit as lists.

What is stored is rounded to its KV dtype, number by number; all else is float64. Keys by channel
are float16, and in an engine 32 of them are quantized together when the last of them is stored.
"""

import copy
import dataclasses
import functools

import ml_dtypes
import numpy as np

from tests import deltatoy
from tests.matrix import plainmodel
from tests.matrix.plainmodel import N_HEADS, N_KV, D
from tests.oracle import rotated
from tests.policies.plainscored import PlainLayer
from tests.store import plaincodec

# Tokens of a block of an engine with keys by channel.
RUN = 32
# Sparse reads: cells that a step of one token reads of a kv head, those among them that it always
# does, and the channels by which the others are chosen.
N_READ, N_SINK, N_RECENT, CHANNELS = 32, 4, 8, (0, 1)
# Policies by score: a text outgrows what a head keeps, and what it reads of that.
SIZES = {"budget": 24, "interval": 8, "n_sink": 2, "n_recent": 6}
SCORED = {"h2o": {}, "snapkv": {"window": 6, "kernel": 3}}
SCORED |= {"sparse_window": {"score_horizon": 8, "n_read": 16, "refresh_every": 8}}
FLOATS = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}


@dataclasses.dataclass
class Row:
    """One token: where it stands, how far its key still has to be rotated, and what is stored.

    Its number is how many tokens of its sequence were stored before it.
    """

    pos: int
    delta: int
    k: np.ndarray
    v: np.ndarray
    number: int = -1


def rounded(x, dtype):
    """Numbers as a store of this KV dtype keeps them; kivi's tail is float16."""
    if dtype in plaincodec.KINDS:
        return plaincodec.coded(x, dtype).astype(np.float64)
    return np.asarray(x, np.float32).astype(FLOATS.get(dtype, np.float16)).astype(np.float64)


def sees(mask, k, q):
    """MaskSpec's rules for positions k [n] and one query."""
    near = {
        "full": np.ones(len(k), bool),
        "window": q - k < mask.size,
        "chunked": k // max(mask.size, 1) == q // max(mask.size, 1),
    }
    return (k <= q) & (near[mask.kind] | (k < mask.n_sink))


def read_sparsely(q, keys, pos):
    """Which of n tokens, the last of which is the query's own, each query head reads. [n, Q]

    By their scores in some channels: softmax of each query head, summed over those of a kv head.
    """
    n, of = len(pos), list(CHANNELS)
    by_kv = q.reshape(N_KV, -1, D)[:, :, of]
    s = np.einsum("hgc,nhc->hgn", by_kv, keys[:-1][:, :, of]) * D**-0.5
    s = np.exp(s - s.max(2, keepdims=True))
    weights = (s / s.sum(2, keepdims=True)).sum(1)
    weights[:, (pos[:-1] < N_SINK) | (pos[:-1] >= pos[-1] - N_RECENT)] = np.inf
    first = np.argsort(-weights, axis=1, kind="stable")[:, :N_READ]
    found = np.arange(n)[:, None] == n - 1  # itself
    found = found | (np.arange(n)[:, None, None] == first).any(2)
    return np.repeat(found, N_HEADS // N_KV, axis=1)


class PlainSeq:
    """One sequence of a cell of the matrix."""

    def __init__(self, cell, policy, extend):
        self.cell, self.policy, self.extend = cell, policy, extend
        self.rows, self.ga_i = [], 0
        # In an engine keys by channel are quantized in runs, with those of dropped tokens.
        self.runs = cell.is_engine and cell.dtype.startswith("kivi")
        self.n_stored, self.dropped = 0, []
        self.n_whole = 0  # tokens of an engine's prompt, which read all
        self.state = plainmodel.state_of(cell.layers)
        shapes = plainmodel.STATES[self.state or "recurrent"]
        self.window, self.total = (np.zeros(shape) for shape in shapes)
        self.states = {0: (self.window, self.total)}  # by number of rows, after each step
        self.kept, self.kept_at = None, {}
        if cell.policy in SCORED:
            self.kept = PlainLayer(cell.policy, n_kv=N_KV, **SIZES, **SCORED[cell.policy])
            self.kept.stored = functools.partial(rounded, dtype=cell.dtype)
            self.kept_at[0] = copy.deepcopy(self.kept)

    @property
    def n_past(self):
        return max((row.pos for row in self.rows), default=-1) + 1

    # --- what moves ----------------------------------------------------------------------------

    def remove(self, p0, p1):
        self.dropped += [r for r in self.rows if p0 <= r.pos < p1] if self.runs else []
        self.rows = [r for r in self.rows if not p0 <= r.pos < p1]

    def cut(self, pos):
        """Back to a position; of a state only to where a step has ended."""
        self.remove(pos, self.n_past)
        if self.ga_i:  # SelfExtend goes on from the group in which the sequence ends
            group = self.extend.ga_w // self.extend.ga_n
            self.ga_i = min(self.ga_i, -(-pos // group) * group)
        if self.state:
            self.window, self.total = self.states[len(self.rows)]
        if self.kept:
            self.kept = copy.deepcopy(self.kept_at[len(self.rows)])

    def move(self, p0, p1, where):
        for row in self.rows:
            if p0 <= row.pos < p1:
                new = where(row.pos)
                row.delta += new - row.pos
                row.pos = new

    def make_room(self, n_new, n_ctx, n_others):
        """Drops by the policy's rule until n_new tokens fit beside the others in n_ctx cells."""
        n_past = self.n_past
        n_free = n_ctx - n_others - len(self.rows)
        if self.policy is None or self.fits(n_free, n_past) >= n_new:
            return
        if self.cell.rope == "write" and self.cell.dtype != "f32":
            n_new = max(n_new, -(-(n_past - self.policy.n_keep) // 4))
        while self.fits(n_free, n_past) < n_new:
            first, n = self.policy.n_keep, self.n_dropped(n_past, n_new)
            self.remove(first, first + n)
            self.move(first + n, n_past, lambda pos, n=n: pos - n)
            n_past, n_free = n_past - n, n_free + n

    def fits(self, n_free, n_past):
        if self.cell.policy == "context_shift":
            return n_free - 1 if n_past else n_free
        return min(n_free, self.policy.n_sink + self.policy.n_window - n_past)

    def n_dropped(self, n_past, n_new):
        n_left = n_past - self.policy.n_keep
        if self.cell.policy == "context_shift":
            return min(self.policy.n_discard, n_left)
        return min(max(n_past + n_new - self.policy.n_sink - self.policy.n_window, 1), n_left)

    def divide(self):
        """llama.cpp's rounds of SelfExtend, with its seq_div put right."""
        if self.extend is None or self.extend.kind == "paper":
            return
        n, w, n_past = self.extend.ga_n, self.extend.ga_w, self.n_past
        while n_past >= self.ga_i + w:
            up, bd = n * self.ga_i // w * (w // n * (n - 1)), w // n * (n - 1)
            at = self.ga_i
            self.move(at, n_past, lambda pos, up=up: pos + up)
            self.move(at + up, at + up + w, lambda pos: pos // n)
            down = w // n - up - w
            self.move(at + up + w, n_past + up, lambda pos, down=down: pos + down)
            n_past, self.ga_i = n_past - bd, self.ga_i + w // n

    def settle(self):
        """Rotates stored keys by what they were moved; every dtype is rounded again."""
        n_over = self.n_stored - self.n_stored % RUN if self.runs else 0
        moved = [r for r in self.rows if r.delta and self.cell.rope == "write"]
        for row in moved:
            row.k = rotated(row.k, row.delta)
            if row.number >= n_over:
                row.k = rounded(row.k, self.cell.dtype)
        self.quantize({r.number // RUN for r in moved if r.number < n_over})
        for row in self.rows:
            row.delta = 0

    def quantize(self, runs):
        """Keys of some runs by channel, those of dropped tokens among them."""
        for run in runs:
            of = [r for r in self.rows + self.dropped if r.number // RUN == run]
            assert len(of) == RUN, "a run is one sequence's, whatever became of its tokens"
            keys = np.stack([r.k for r in of], -1).astype(np.float32)
            kind = "int4"  # with a scale for 32 numbers, as here for 32 cells
            for row, k in zip(of, np.moveaxis(plaincodec.coded(keys, kind), -1, 0), strict=True):
                row.k = k.astype(np.float64)

    # --- tokens --------------------------------------------------------------------------------

    def step(self, tokens):
        """Logits [T, V] of a step's tokens, which see each other as they are, and are then kept."""
        self.divide()
        self.settle()
        own, q = self.own(tokens)
        out = np.stack(
            [self.logits(t, q, own) + self.scored(t, q, own) for t in range(len(tokens))]
        )
        self.store(own)
        return out

    def one_by_one(self, tokens):
        """What the last of a step's tokens has more if it sees those before it as stored.

        A step may take tokens so in layers that keep them by score. The sequence stays as it is.
        """
        (own, q), out = self.own(tokens), []
        for apart in (True, False):
            seq = copy.deepcopy(self)
            for t in range(len(tokens)):
                found = seq.scored(t, q, own)
                if apart:
                    seq.kept.store()
            out.append(found)
        return out[0] - out[1]

    def scored(self, t, q, own):
        """What a layer that keeps tokens by score gives the t-th of some new tokens."""
        if self.kept is None:
            return 0.0
        row = own[t]
        return self.kept.step(
            rotated(q[t], row.pos), rotated(row.k, row.pos), row.v, row.pos
        ).ravel()

    def keeps(self, heads):
        """Whether the layer that keeps tokens by score has these positions, by kv head."""
        mine = [[token.pos for token in head] for head in self.kept.heads]
        return [x.tolist() for x in heads] == mine

    def hold(self, tokens):
        """Takes in tokens that were computed before, whose logits nobody wants."""
        own, q = self.own(tokens)
        for t, row in enumerate(q):
            self.recur(row.ravel())
            self.scored(t, q, own)
        self.store(own)

    def own(self, tokens):
        """Rows of new tokens, neither rotated nor rounded, and their queries."""
        q, k, v = (x[list(tokens)].astype(np.float64) for x in plainmodel.tables()[:3])
        first = self.n_past
        n = 1 if self.cell.layers == "latent" else N_KV
        return [Row(first + i, 0, k[i, :n], v[i, :n]) for i in range(len(tokens))], q

    def store(self, own):
        keys, values = np.stack([row.k for row in own]), np.stack([row.v for row in own])
        if self.cell.rope == "write":
            keys = rotated(keys, np.array([row.pos for row in own]))
        kept = zip(
            own, rounded(keys, self.cell.dtype), rounded(values, self.cell.dtype), strict=True
        )
        before = self.n_stored
        for row, k, v in kept:
            self.rows.append(Row(row.pos, 0, k, v, self.n_stored))
            self.n_stored += 1
        self.quantize(range(before // RUN, self.n_stored // RUN) if self.runs else ())
        self.states[len(self.rows)] = self.window, self.total
        if self.kept:
            self.kept.store()
            self.kept_at[len(self.rows)] = copy.deepcopy(self.kept)

    def logits(self, t, q, own):
        state = self.recur(q[t].ravel()) if self.state else 0.0
        return state + self.attended(t, q, own, plainmodel.masks_of(self.cell.layers))

    def attended(self, t, q, own, masks):
        """What layers with these masks give the t-th of some new tokens."""
        rows, first, out = self.rows + own[: t + 1], own[0].pos, 0.0
        pos = np.array([row.pos for row in rows])
        keys, values = np.stack([r.k for r in rows]), np.stack([r.v for r in rows])
        is_rotated = (np.arange(len(rows)) < len(self.rows)) & (self.cell.rope == "write")
        asked = [(q[t], mask) for mask in masks if not (self.kept and mask.kind == "full")]
        if plainmodel.shares(self.cell.layers):
            asked += [(q[t][::-1], mask) for _, mask in asked]
        chosen = np.ones(len(rows), bool)
        if self.cell.layers == "indexed":
            chosen = self.chosen(q[t], first + t, (keys[:, 1:], values[:, 1:]), (pos, is_rotated))
            keys, values = keys[:, :1], values[:, :1]
        by_head = np.repeat(values, N_HEADS // values.shape[1], axis=1)
        for query, mask in asked:
            scores = self.scores(query, first + t, keys, (pos, is_rotated), mask)
            if plainmodel.is_latent(self.cell.layers):
                scores = scores + np.einsum("hd,nhd->nh", query[::-1], by_head) * D**-0.5
            seen = sees(mask, pos, first + t) & chosen
            scores = np.where(seen[:, None], scores, -np.inf)
            chooses = len(own) == 1 and self.n_stored >= self.n_whole and mask.kind == "full"
            if self.cell.attention == "sparse" and chooses:
                there = rotated(keys, np.where(is_rotated, 0, pos))
                scores = np.where(read_sparsely(rotated(query, first), there, pos), scores, -np.inf)
            weights = np.exp(scores - scores.max(0))
            weights /= weights.sum(0)
            out = out + np.einsum("nh,nhd->hd", weights, by_head).ravel()
        return out

    def chosen(self, q, at, rows, where):
        """Which rows [n] a query reads: those of the highest index scores, the lower positions."""
        pos, is_rotated = where
        keys, latents = rows
        there = np.where(is_rotated[:, None, None], keys, rotated(keys, pos))
        products = np.einsum("hd,nkd->nh", rotated(q, at)[:2], there)
        products += np.einsum("hd,nkd->nh", q[:2], latents)
        worth = np.maximum(products, 0.0) @ plainmodel.index_weights(q)
        best = sorted(range(len(pos)), key=lambda i: (-worth[i], pos[i]))
        chosen = np.zeros(len(pos), bool)
        chosen[best[: plainmodel.N_INDEXED]] = True
        return chosen

    def scores(self, q, at, keys, where, mask):
        """Scores [n, Q] of a query by exact positions or, in the paper's way, by grouped ones."""
        pos, is_rotated = where

        def compared(at, to):
            # Keys that are stored rotated move by the difference.
            there = rotated(keys, np.where(is_rotated, to - pos, to))
            there = np.repeat(there, N_HEADS // keys.shape[1], axis=1)
            return np.einsum("hd,nhd->nh", rotated(q, at), there) * D**-0.5

        exact, extend = compared(at, pos), self.extend
        if extend is None or extend.kind == "cache" or mask.kind != "full":
            return exact
        n, w = extend.ga_n, extend.ga_w
        return np.where((at - pos < w)[:, None], exact, compared(at // n + w - w // n, pos // n))

    def recur(self, row):
        if self.state == "delta":
            mix = plainmodel.tables()[3]
            self.window, self.total, out = deltatoy.plain(self.window, self.total, row, mix)
            return out
        self.window = np.concatenate([self.window[1:], row[None]])
        mixed = (self.window * plainmodel.tables()[3]).sum(0)
        self.total = plainmodel.DECAY * self.total + np.tanh(mixed)
        return self.total
