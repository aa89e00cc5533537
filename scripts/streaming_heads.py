"""Finds the kv heads of a model that attend least to what is far, for `DuoAttention`.

    python -m scripts.streaming_heads --text docs/concepts.md --out heads.json

Far is what is neither a sink nor among the --n_near newest tokens of a query. The half of all kv
heads with the least attention to it streams. The file is JSON, by layer: streaming, others (the
control) and far, each head's share.
"""

import dataclasses
import json
import pathlib
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from absl import flags

from kvrt import CacheConfig, Runtime
from kvrt.attention.scored.spec import slots_of
from kvrt.files import kinds
from kvrt.policies.scored import Observed, ScoredPolicy, Seen
from kvrt_models.load import load
from scripts._lib import commands
from scripts.experiments import texts

_MODEL = flags.DEFINE_string("model", "smollm2-135m", "Known name, file or folder.")
_TEXT = flags.DEFINE_string("text", "docs/concepts.md", "A file to look at.")
_SIZE = flags.DEFINE_integer("size", 512, "Tokens of a piece.", lower_bound=64)
_N_PIECES = flags.DEFINE_integer("pieces", 3, "Pieces of text.", lower_bound=1)
_N_NEAR = flags.DEFINE_integer("n_near", 124, "Newest tokens that are near.", lower_bound=1)
_OUT = flags.DEFINE_string("out", None, "File to write.", required=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FarMass(ScoredPolicy):
    """Sums up what queries give to tokens that are far; its budget is never reached."""

    n_near: int

    def observe(self, seen: Observed):
        """Probabilities of what is far."""
        pos = seen.pos[:, None, None]
        own = jnp.max(jnp.where(seen.visible, pos, 0), axis=3, keepdims=True)
        far = (pos >= self.n_sink) & (pos < own - self.n_near)
        return jnp.where(seen.visible & far, seen.probabilities, 0.0)

    def score(self, seen: Seen):
        """Nothing: nobody asks."""
        return seen.sums


def far_shares(runtime: Runtime, text: Sequence[int]) -> dict[int, np.ndarray]:
    """By layer, the share of each kv head's attention that is far."""
    runtime.clear()
    runtime.append(text)
    layout, states = runtime.programs.spec.layout, runtime.snapshot().states
    assert states is not None and layout.recurrent is not None, "a policy by score"
    arrays = dict(zip(layout.recurrent.layers, states.tables, strict=True))
    out = {}
    for group in layout.scored:
        for layer, spec in zip(group.group.layers, group.slots, strict=True):
            marks = slots_of(spec, arrays[layer]).marks
            out[layer] = np.asarray(marks.sums).sum(axis=1)
    return out


def main() -> None:
    model = load(_MODEL.value)
    tokens = model.tokenizer.encode(pathlib.Path(_TEXT.value).read_text())
    pieces = texts.in_pieces(tokens, _SIZE.value)[: _N_PIECES.value]
    policy = FarMass(budget=_SIZE.value, n_near=_N_NEAR.value)
    runtime = Runtime(model.decoder, CacheConfig(n_ctx=_SIZE.value + 64), policy=policy)
    found = [far_shares(runtime, piece) for piece in pieces]
    layers = sorted(found[0])
    far = {i: np.mean([x[i] for x in found], axis=0) for i in layers}
    median = float(np.median(np.concatenate(list(far.values()))))
    by_layer = [far.get(i, np.zeros(0)) for i in range(max(layers) + 1)]
    split = {
        "streaming": [np.flatnonzero(x < median).tolist() for x in by_layer],
        "others": [np.flatnonzero(x >= median).tolist() for x in by_layer],
        "far": [np.round(x / _SIZE.value, 4).tolist() for x in by_layer],
    }
    kinds.write_whole(_OUT.value, json.dumps(split).encode(), kinds.HEADS)
    print(f"{_OUT.value}: {sum(map(len, split['streaming']))} of {sum(map(len, by_layer))} stream")


if __name__ == "__main__":
    commands.run(main)
