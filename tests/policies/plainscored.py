"""Layers that keep tokens by score, the slow way: a list of tokens a head, in float64.

Keys and queries come with RoPE applied. What a token is worth is written anew for each policy, from
its paper or from KVPress, without a look at `kvrt.policies.scored`.
"""

import dataclasses
import math

import numpy as np


@dataclasses.dataclass
class Token:
    """A cached token of one head, and what it got."""

    pos: int
    k: np.ndarray
    v: np.ndarray
    total: float = 0.0


class PlainLayer:
    """One layer and sequence; heads hold lists of tokens, oldest first."""

    # How a step's keys and values are stored, behind it or before an eviction.
    stored = staticmethod(lambda x: x)

    def __init__(self, name, *, budget, interval, n_sink, n_recent, n_kv, **settings):
        self.name, self.budget, self.interval = name, budget, interval
        self.n_sink, self.n_recent, self.settings = n_sink, n_recent, settings
        self.heads = [[] for _ in range(n_kv)]
        self.raw = []
        self.n_read, self.every = settings.get("n_read"), settings.get("refresh_every")
        self.chosen, self.n_products, self.new = [set() for _ in range(n_kv)], 0, []

    def step(self, q, k, v, pos, raw=None):
        """The output [Q, Dv] of one token; q [Q, D], k [H, D], v [H, Dv].

        With the setting close_up both are without RoPE, and rotated to their places in the list.
        """
        n_kv, group = len(k), len(q) // len(k)
        out = np.zeros((len(q), v.shape[1]))
        self.n_mean = sum(map(len, self.heads)) // n_kv + 1
        if raw is not None and pos >= self.n_sink:
            self.raw.append(raw)
        for h, tokens in enumerate(self.heads):
            for token in tokens:
                token.total *= 1 - 1 / self.settings.get("score_horizon", math.inf)
            tokens.append(Token(pos, k[h], v[h]))
            self.new.append(tokens[-1])
            read = [t for t in tokens if self.reads(h, t, pos)]
            keys, values = self.compared(read), np.array([t.v for t in read])
            for g in range(group):
                query = self.placed(q[h * group + g], len(tokens) - 1)
                x = keys @ query * q.shape[1] ** -0.5
                p = softmax(x)
                out[h * group + g] = p @ values
                self.n_products += len(read)
                if self.refreshes(pos):
                    self.observe(h, x, p)
        assert n_kv == len(self.heads)
        if self.n_read and self.refreshes(pos):
            self.store()
            self.choose(pos)
        if self.n_read and self.refreshes(pos + 1):
            self.store()
        if sum(map(len, self.heads)) == n_kv * (self.budget + self.interval):
            self.store()
            self.evict(pos + 1)
        return out

    def placed(self, x, place):
        return rotation(place, len(x)) @ x if self.settings.get("close_up") else x

    def compared(self, tokens):
        """Keys of tokens with RoPE applied."""
        return np.array([self.placed(t.k, i) for i, t in enumerate(tokens)])

    def store(self):
        """Keys and values of new tokens as they are kept; until then their step sees them whole."""
        for token in self.new:
            token.k, token.v = self.stored(token.k), self.stored(token.v)
        self.new = []

    def refreshes(self, pos):
        """Whether a query reads all tokens, and its attention counts."""
        return not self.n_read or pos % self.every == 0

    def reads(self, h, token, pos):
        """Whether a query at pos reads a token."""
        near = self.n_read and token.pos > pos - self.n_read // 2
        return self.refreshes(pos) or near or token.pos in self.chosen[h]

    def choose(self, pos):
        """What is read beside the newest, until the next refresh; those will have left them."""
        last = pos + self.every - 1 - self.n_read // 2
        for h, tokens in enumerate(self.heads):
            best = sorted((t for t in tokens if t.pos <= last), key=lambda t: (-t.total, t.pos))
            self.chosen[h] = {t.pos for t in best[: self.n_read - self.n_read // 2]}

    def observe(self, h, x, p):
        """Sums, as the policy has them."""
        tokens, full = self.heads[h], self.budget + self.interval
        horizon = {"snapkv": self.settings.get("window"), "tova": 1}.get(self.name)
        horizon = self.interval if self.name == "scissorhands" else horizon
        if horizon is not None and self.n_mean <= full - horizon:
            return
        if self.name == "keyformer":
            s = self.settings
            part = min(tokens[-1].pos / s["n_anneal"], 1.0)
            tau = s["tau"] + (s["tau_end"] - s["tau"]) * part
            p = softmax((x + np.array([noise(t.pos) for t in tokens])) / tau)
        if self.name == "scissorhands":
            p = (p > 1 / len(p)).astype(float)
        for token, weight in zip(tokens, p, strict=True):
            token.total = max(token.total, weight) if self.name == "kvzip" else token.total + weight

    def evict(self, n_past):
        """Keeps sinks, the newest, and those of the greatest scores."""
        scores, least = self.scores(n_past), int(self.settings.get("head_share", 1) * self.budget)
        kept, others = [], []
        for h, tokens in enumerate(self.heads):
            worth = {
                t.pos: math.inf if t.pos < self.n_sink or t.pos >= n_past - self.n_recent else s
                for t, s in zip(tokens, scores[h], strict=True)
            }
            ranked = sorted((-worth[t.pos], h, t.pos, t) for t in tokens)
            kept.append([x[3] for x in ranked[:least]])
            others += ranked[least:]
        for _, h, _, token in sorted(others)[: (self.budget - least) * len(self.heads)]:
            kept[h].append(token)
        self.heads = [sorted(x, key=lambda t: t.pos) for x in kept]
        if self.name in ("snapkv", "tova", "scissorhands"):
            for tokens in self.heads:
                for token in tokens:
                    token.total = 0.0

    def scores(self, n_past):
        """By head, one a token."""
        if len({len(tokens) for tokens in self.heads}) > 1:
            return self.by_head(n_past)
        totals = np.array([[t.total for t in tokens] for tokens in self.heads])
        pos = np.array([[t.pos for t in tokens] for tokens in self.heads])
        keys = np.array([self.compared(tokens) for tokens in self.heads])
        match self.name:
            case "h2o" if self.settings.get("normalised"):
                return totals / (n_past - pos)
            case "h2o" | "keyformer" | "scissorhands" | "sparse_window" | "kvzip":
                return totals
            case "tova":
                return np.tile(totals.mean(0), (len(totals), 1))
            case "snapkv":
                totals = np.where(pos < n_past - self.settings["window"], totals, 0.0)
                kernel = np.ones(self.settings["kernel"]) / self.settings["kernel"]
                return np.array([np.convolve(x, kernel, "same") for x in totals])
            case "key_norm":
                return -np.linalg.norm(keys, axis=2)
            case "key_diff":
                unit = keys / np.linalg.norm(keys, axis=2, keepdims=True)
                mean = unit.mean(1, keepdims=True)
                cos = (unit * mean).sum(2) / np.linalg.norm(mean, axis=2)
                return -cos
            case "expected_attention":
                return self.expected(n_past, keys, pos)
            case "recent_only":
                return pos.astype(float)
            case "random_tokens":
                return np.array([[noise(p) for p in head] for head in pos])
        raise AssertionError(self.name)

    def by_head(self, n_past):
        """Scores of heads that keep different numbers of tokens: each as if it were alone."""
        heads, raw, found = self.heads, self.raw, []
        for h, tokens in enumerate(heads):
            group = len(raw[0]) // len(heads) if raw else 0
            self.heads, self.raw = [tokens], [x[h * group : (h + 1) * group] for x in raw]
            found.append(self.scores(n_past)[0])
        self.heads, self.raw = heads, raw
        return found

    def expected(self, n_past, keys, pos):
        """KVPress' `ExpectedAttentionPress.score`, head by head."""
        raw, (n_kv, n, d) = np.array(self.raw), keys.shape
        first = n if self.settings.get("close_up") else n_past
        matrix = np.mean(
            [rotation(p, d) for p in range(first, first + self.settings["n_future"])], axis=0
        )
        group, out = raw.shape[1] // n_kv, []
        for h in range(n_kv):
            found, candidates = [], pos[h] >= self.n_sink
            for q in range(h * group, h * group + group):
                mean = matrix @ raw[:, q].mean(0)
                cov = matrix @ np.cov(raw[:, q].T, bias=True) @ matrix.T
                x = keys[h] @ mean / d**0.5
                x += np.einsum("sd,de,se->s", keys[h], cov, keys[h]) / d / 2
                p = np.zeros(len(x))
                p[candidates] = softmax(x[candidates])
                found.append(p)
            values = np.array([t.v for t in self.heads[h]])
            out.append(np.mean(found, axis=0) * np.linalg.norm(values, axis=1))
        return np.array(out)


def rotation(pos, d, base=100.0):
    """The matrix of RoPE at a position, channels paired by halves."""
    out, half = np.zeros((d, d)), d // 2
    for i in range(half):
        angle = pos * base ** (-2 * i / d)
        out[i, i] = out[i + half, i + half] = math.cos(angle)
        out[i, i + half], out[i + half, i] = -math.sin(angle), math.sin(angle)
    return out


def noise(pos, seed=0):
    """Gumbel noise of a position: MurmurHash3's finaliser, in whole numbers."""
    x = (int(pos) + 0x9E3779B9 * (seed + 1)) % 2**32
    x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
    x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
    u = ((x ^ x >> 16) >> 9) + 0.5
    return -math.log(-math.log(u / 2**23))


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()
