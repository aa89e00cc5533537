"""A prompt of a YOCO model that stops after the first half of the layers, against all layers.

    python -m scripts.bench.layers.yoco --n_tokens 4096

Random weights, one `Runtime` each, interleaved runs. The second half of the layers reads the keys
and values that the first half's output makes, so a prompt needs it for its last token alone; the
other runtime runs it for every token. `worst` is the largest difference of the logits.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from absl import flags

from kvrt import CacheConfig, Runtime
from kvrt.arrays import Array
from kvrt.attention import Attend
from kvrt_models.decoder import Decoder
from kvrt_models.families.shared.registry import spec_from_config
from kvrt_models.layers.tensors import weight_parts, weight_shape
from scripts._lib import commands, measure, rounds

_N_TOKENS = flags.DEFINE_integer("n_tokens", 4096, "Tokens of the prompt.", lower_bound=2)
_N_UBATCH = flags.DEFINE_integer("n_ubatch", 512, "Tokens of a step.", lower_bound=1)
_N_LAYERS = flags.DEFINE_integer("n_layers", 8, "Layers, an even number.", lower_bound=2)
_WIDTH = flags.DEFINE_integer("width", 256, "Channels of the stream.", lower_bound=64)
_WINDOW = flags.DEFINE_integer("window", 512, "Tokens that the first half sees.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Runs of each side.", lower_bound=1)
_N_VOCAB, _HEAD_DIM = 256, 64


class Whole(Decoder):
    """Runs every layer for every token."""

    def __call__(self, tokens: Array, attend: Attend, out_ids: Array) -> Array:
        """Logits of tokens `out_ids`."""
        x = self.layers(self.embed(tokens), attend, 0, self.spec.n_layers)
        return self.head(x[out_ids])


def main() -> None:
    n, size = _N_TOKENS.value, _N_UBATCH.value
    prompt = np.random.default_rng(1).integers(0, _N_VOCAB, n).tolist()
    # With logits of each step's last token no step leaves anything out.
    ends = [*range(size - 1, n - 1, size), n - 1]
    sides: dict[str, tuple[Runtime, list[int]]] = {
        "early exit": (_runtime(Decoder), [n - 1]),
        "all layers": (_runtime(Whole), ends),
    }

    logits: dict[str, np.ndarray] = {}

    def side(name: str, at: Runtime, out_ids: Sequence[int]) -> rounds.Side:
        def once() -> Array:
            found = at.append(prompt, out_ids=out_ids)
            logits[name] = np.asarray(found)[-1]
            return found

        return rounds.timed(once, again=at.clear)

    runs = {name: side(name, *of) for name, of in sides.items()}
    times = rounds.interleaved(runs, _ROUNDS.value)
    for name in times:
        measure.emit("yoco", side=name, n_tokens=n, ms=times.ms(name))
    worst = float(np.max(np.abs(logits["early exit"] - logits["all layers"])))
    ratio = times.over("early exit", "all layers")
    measure.emit("yoco", n_tokens=n, n_layers=_N_LAYERS.value, ratio=ratio, worst=worst)


def _runtime(of: type[Decoder]) -> Runtime:
    n_heads = _WIDTH.value // _HEAD_DIM
    spec = spec_from_config(
        {
            "model_type": "yoco",
            "vocab_size": _N_VOCAB,
            "hidden_size": _WIDTH.value,
            "intermediate_size": 3 * _WIDTH.value,
            "num_hidden_layers": _N_LAYERS.value,
            "num_attention_heads": n_heads,
            "num_key_value_heads": n_heads,
            "max_position_embeddings": _N_TOKENS.value,
            "sliding_window": _WINDOW.value,
        }
    )
    rng, weights = np.random.default_rng(0), {}
    for name, parts in weight_parts(spec).items():
        shape = weight_shape(spec, parts)
        scale = 1.0 if len(shape) == 1 else shape[1] ** -0.5
        weights[name] = jnp.asarray(scale * rng.standard_normal(shape), jnp.float32)
    n_ctx = -(-_N_TOKENS.value // 256) * 256
    return Runtime(
        of(spec, weights),
        CacheConfig(n_ctx=n_ctx, n_ubatch=_N_UBATCH.value, type_k="f32", type_v="f32"),
    )


if __name__ == "__main__":
    commands.run(main)
