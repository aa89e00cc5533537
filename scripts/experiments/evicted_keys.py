"""What evictions leave of keys that are stored rotated: their errors against float64.

Run it with `python -m scripts.experiments.evicted_keys`. Random keys of one layer; once a window is
full, each drop moves all later tokens down, and the K-shift that follows rounds their keys to their
type again. One JSON line a type and size of a drop: the error of the keys held, relative to the
keys, when they were written and after the tokens. A runtime with a policy never drops less than a
quarter of the window at once unless keys are f32; here the drops are made by hand.
"""

from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import nnx

from kvrt import Attend, CacheConfig, GroupSpec, RopeSpec, Runtime
from kvrt.kv_types import CODECS, FLOAT_DTYPES, KVDtype
from kvrt.store import kv as kv_store
from kvrt.store import rope
from scripts._lib import commands, measure

_KINDS = [*FLOAT_DTYPES, *CODECS]
_TYPES = flags.DEFINE_multi_enum("type", _KINDS, _KINDS, "Of keys; repeat it.")
_N_TOKENS = flags.DEFINE_integer("n_tokens", 1000, "Tokens past the window.", lower_bound=1)
_N_WINDOW = flags.DEFINE_integer("n_window", 256, "Cells besides the sinks.", lower_bound=8)
_N_DROPS = flags.DEFINE_multi_integer("n_drop", [1, 64], "Tokens dropped at once.", lower_bound=1)

N_SINK, N_VOCAB = 4, 512


class KeyTable(nnx.Module):
    """One layer of attention without weights: a token's key is its line of a table."""

    n_vocab, recurrent = N_VOCAB, None
    groups = (GroupSpec(layers=(0,), n_kv_heads=2, head_dim=64, rope=RopeSpec(n_rot=64)),)

    def __init__(self):
        """Draws the keys."""
        self.keys = nnx.Param(jax.random.normal(jax.random.key(0), (N_VOCAB, 2, 64)))

    def __call__(self, tokens: jax.Array, attend: Attend, out_ids: jax.Array) -> jax.Array:
        """Nothing of interest: keys do not depend on it."""
        keys = self.keys[...][tokens]
        out = attend(0, keys, keys, keys).reshape(tokens.shape[0], -1)[out_ids]
        return jnp.tile(out, (1, N_VOCAB // out.shape[1]))


def main() -> None:
    n = N_SINK + _N_WINDOW.value
    tokens = np.random.default_rng(0).integers(0, N_VOCAB, n + _N_TOKENS.value).tolist()
    model = KeyTable()
    for kind in _TYPES.value:
        key_type = cast(KVDtype, kind)
        config = CacheConfig(n_ctx=n, block_size=32, n_ubatch=64, type_k=key_type, type_v="f32")
        for n_drop in _N_DROPS.value:
            runtime = Runtime(model, config)
            runtime.append(tokens[:n])
            written = error(runtime, model)
            for token in tokens[n:]:
                if not runtime.n_free:
                    runtime.seq_rm(0, N_SINK, N_SINK + n_drop)
                    runtime.seq_add(0, N_SINK + n_drop, None, -n_drop)
                runtime.append([token])
            figures = {"written": written, "after": error(runtime, model)}
            measure.emit("evicted_keys", type=kind, n_drop=n_drop, **figures)


def error(runtime: Runtime, model: KeyTable) -> float:
    """Norm of the errors of all keys held, relative to that of the keys."""
    store, (pos, ids) = runtime.cache.stores[0], runtime.token_history()
    cell_of = {int(p): c for c, p in enumerate(runtime.cells.pos) if p >= 0}
    slots = np.array([cell_of[int(p)] for p in pos], np.int32)
    found = np.asarray(kv_store.read_kv(store, 0, slots)[0], np.float64)
    spec = model.groups[0].rope
    assert spec is not None
    angles = pos[:, None] * np.asarray(rope.frequencies(spec, len(pos)), np.float64)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = np.split(np.asarray(model.keys[...], np.float64)[ids], 2, axis=-1)
    wanted = np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
    return float(f"{np.linalg.norm(found - wanted) / np.linalg.norm(wanted):.2g}")


if __name__ == "__main__":
    commands.run(main)
