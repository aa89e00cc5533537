"""A tiny random YOCO of `kvrt_models`, and the same in NumPy, which hands keys and values on.

Pairs of channels and how far they turn are those of the published code (unilm, YOCO).

The oracle knows no layer but those of the paper: windowed ones, one projection of what they give,
and layers that attend to that projection's keys and values of all tokens before.
"""

import functools

import jax
import numpy as np

from kvrt_models.decoder import Decoder
from kvrt_models.families.shared.registry import spec_from_config
from kvrt_models.layers.tensors import weight_parts, weight_shape

N_LAYERS, N_VOCAB, N_HEADS, N_KV, D, WINDOW = 4, 32, 4, 2, 8, 9
HALF, WIDTH, BASE, EPS = N_LAYERS // 2, N_HEADS * D, 100.0, 1e-5
CONFIG = {
    "model_type": "yoco",
    "vocab_size": N_VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": N_LAYERS,
    "num_attention_heads": N_HEADS,
    "num_key_value_heads": N_KV,
    "max_position_embeddings": 512,
    "rms_norm_eps": EPS,
    "rope_theta": BASE,
    "sliding_window": WINDOW,
}


def random_weights(of, seed=0):
    """Weights by which scores are neither all alike nor of one key, in float64."""
    rng, found = np.random.default_rng(seed), {}
    for name, parts in weight_parts(of).items():
        shape = weight_shape(of, parts)
        if len(shape) == 1:
            found[name] = rng.uniform(0.5, 1.5, shape)
            continue
        wide = 1.7 if "qkv" in name else 0.57
        found[name] = rng.normal(0.0, wide / shape[1] ** 0.5, shape)
    return found


@functools.cache
def toy():
    """The decoder, and its weights for the oracle."""
    spec = spec_from_config(CONFIG)
    weights = random_weights(spec)
    narrow = {k: x.astype(np.float32) for k, x in weights.items()}
    return Decoder(spec, jax.device_put(narrow)), weights


def decoder():
    return toy()[0]


def rotated(x, pos):
    """x [T, H, D] rotated to pos [T], in pairs (2i, 2i + 1)."""
    angle = np.multiply.outer(np.asarray(pos), BASE ** -np.linspace(0, 1, D // 2))[:, None]
    a, b, c, s = x[..., ::2], x[..., 1::2], np.cos(angle), np.sin(angle)
    return np.stack([a * c - b * s, a * s + b * c], -1).reshape(x.shape)


def attend(q, k, v, sees):
    """Attention of q [T, Q, D] over k and v [C, H, D], as `sees` [T, C] allows."""
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    s = np.where(sees[:, None], np.einsum("tqd,cqd->tqc", q, k) * D**-0.5, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    return np.einsum("tqc,cqd->tqd", p / p.sum(-1, keepdims=True), v)


class Dense:
    """A whole text at once, in float64, from its tokens and their positions."""

    def __init__(self, window=WINDOW):
        self.w, self.window = toy()[1], window

    def first_layer(self, x, i, pos):
        """What a layer of the first half makes of the stream."""
        back = pos[:, None] - pos

        def within(heads):
            q, k, v = np.split(heads, (N_HEADS, N_HEADS + N_KV), axis=1)
            near = (back >= 0) & (back < self.window)
            return attend(rotated(q, pos), rotated(k, pos), v, near).reshape(len(pos), -1)

        return self.layer(x, i, within)

    def norm(self, x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * self.w[name + ".weight"]

    def product(self, x, name):
        return x @ self.w[name + ".weight"].T

    def heads(self, x, name):
        return self.product(x, name).reshape(len(x), -1, D)

    def layer(self, x, i, attended):
        """What a layer makes of the stream; `attended` is what attention gives of its queries."""
        at = f"blk.{i}."
        h = self.norm(x, at + "attn_norm")
        return self.fed(
            x + self.product(attended(self.heads(h, at + "attn_qkv")), at + "attn_output"), at
        )

    def fed(self, x, at):
        """The stream after the network of a layer."""
        gate, up = np.split(self.product(self.norm(x, at + "ffn_norm"), at + "ffn_gate_up"), 2, 1)
        return x + self.product(gate / (1 + np.exp(-gate)) * up, at + "ffn_down")

    def logits(self, tokens, pos=None):
        """Logits of all tokens."""
        pos = np.arange(len(tokens)) if pos is None else np.asarray(pos)
        back = pos[:, None] - pos
        x = self.w["token_embd.weight"][list(tokens)] * WIDTH**0.5

        for i in range(HALF):
            x = self.first_layer(x, i, pos)
        # What is cached of all tokens.
        h = self.norm(x, f"blk.{HALF}.attn_norm")
        k, v = np.split(self.heads(h, f"blk.{HALF}.attn_qkv"), 2, axis=1)

        def across(q):
            return attend(rotated(q, pos), rotated(k, pos), v, back >= 0).reshape(len(pos), -1)

        for i in range(HALF + 1, N_LAYERS + 1):
            x = self.layer(x, i, across)
        return self.norm(x, "output_norm") @ self.w["output.weight"].T
