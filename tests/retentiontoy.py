"""A tiny random YOCO whose first half has gated retention, and the same in NumPy."""

import functools

import jax
import numpy as np

from kvrt_models.decoder import Decoder
from kvrt_models.families.shared.registry import spec_from_config
from tests import yocotoy
from tests.models.plainretention import retention
from tests.yocotoy import CONFIG, EPS, N_HEADS, D, random_weights, rotated

_SIZES = {k: v for k, v in CONFIG.items() if k != "sliding_window"}


@functools.cache
def toy():
    """The decoder, and its weights for the oracle."""
    spec = spec_from_config(_SIZES | {"self_decoder": "gated_retention"})
    weights = random_weights(spec, seed=1)
    narrow = {k: x.astype(np.float32) for k, x in weights.items()}
    return Decoder(spec, jax.device_put(narrow)), weights


def decoder():
    return toy()[0]


class Dense(yocotoy.Dense):
    """A whole text at once; retention of every pair of its tokens."""

    def __init__(self):
        self.w = toy()[1]

    def first_layer(self, x, i, pos):
        at = f"blk.{i}."
        h = self.norm(x, at + "attn_norm")
        q, k, v, gate = np.split(self.product(h, at + "ssm_in"), 4, axis=1)
        q, k, v = (y.reshape(len(x), N_HEADS, D) for y in (q, k, v))
        g = -np.log1p(np.exp(-self.product(h, at + "ssm_gt"))) / 16
        y = retention(rotated(q, pos), rotated(k, pos) * D**-0.5, v, g)
        y = y / np.sqrt((y * y).mean(-1, keepdims=True) + EPS)
        y = y.reshape(len(x), -1) * gate / (1 + np.exp(-gate))
        return self.fed(x + self.product(y, at + "ssm_out"), at)
