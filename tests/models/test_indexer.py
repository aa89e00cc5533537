"""DeepSeek-V3.2: the tokens that its indexer chooses are those of transformers, up to ties."""

import numpy as np
import pytest

from kvrt.errors import UnsupportedModel
from kvrt.store import rope
from kvrt_models.identity import description
from kvrt_models.load import load
from kvrt_models.spec import Indexer
from tests.models.headers import GOLDEN, hf

V32 = "deepseek-v32"


class Sorting:
    """An `Attend` of one prompt in NumPy, which sorts scores and notes them."""

    def __init__(self, groups, n):
        self.groups, self.scores, self.sets = groups, {}, {}
        self.pos = np.arange(n)

    def rotated(self, x, group, first):
        """x [T, H, D], rotated behind its first channels."""
        freqs = np.asarray(rope.frequencies(group.rope, 512), np.float64)
        angle = np.multiply.outer(self.pos, freqs)[:, None]
        c, s = (f(angle) * rope.magnitude(group.rope, 512) for f in (np.cos, np.sin))
        head, tail = x[..., :first], x[..., first:]
        if group.rope.layout == "norm":
            a, b = tail[..., ::2], tail[..., 1::2]
            tail = np.stack([a * c - b * s, a * s + b * c], -1).reshape(tail.shape)
        else:
            a, b = np.split(tail, 2, axis=-1)
            tail = np.concatenate([a * c - b * s, a * s + b * c], -1)
        return np.concatenate([head, tail], -1)

    def index(self, layer, q, k, weights):
        group = self.groups[1]
        q, k = (self.rotated(np.asarray(x, np.float64), group, group.latent_rank) for x in (q, k))
        products = np.maximum(np.einsum("thd,cd->thc", q, k[:, 0]), 0.0)
        scores = np.einsum("th,thc->tc", np.asarray(weights, np.float64), products)
        n_cells, later = self.groups[0].indexed.n_cells, self.pos > self.pos[:, None]
        self.scores[layer] = scores = np.where(later, -np.inf, scores)
        order = np.argsort(-scores, axis=1, kind="stable")[:, :n_cells]
        chosen = np.zeros(scores.shape, bool)
        np.put_along_axis(chosen, order, True, axis=1)
        self.sets[layer] = chosen & ~later

    def __call__(self, layer, q, k, v, *, sinks=None):
        group = self.groups[0]
        rank, k = group.latent_rank, np.asarray(k, np.float64)
        q, k = (self.rotated(np.asarray(x, np.float64), group, rank) for x in (q, k))
        s = np.einsum("thd,cd->thc", q, k[:, 0]) * group.score_scale
        s = np.where(self.sets[layer][:, None], s, -np.inf)
        p = np.exp(s - s.max(-1, keepdims=True))
        out = np.einsum("thc,cr->thr", p / p.sum(-1, keepdims=True), k[:, 0, :rank])
        return out.astype(np.float32)


@pytest.mark.slow
def test_chosen_tokens_are_those_of_transformers():
    decoder = load(GOLDEN / V32).decoder
    with np.load(GOLDEN / V32 / "expected.npz") as data:
        tokens, logits, chosen = data["tokens"], data["logits"], data["chosen"]
    n = len(tokens)
    sorting = Sorting(decoder.groups, n)
    found = decoder(tokens.astype(np.int32), sorting, np.arange(n))
    assert float(np.abs(np.asarray(found) - logits).max()) < 1e-4
    assert sorted(sorting.sets) == [0, 1, 2] and chosen.sum(axis=2).max() == 7
    for layer, sets in sorting.sets.items():
        scores = sorting.scores[layer]
        for t, c in np.argwhere(sets ^ chosen[layer]):
            # Another one than transformers took: as good as the least that it took.
            least = scores[t][chosen[layer][t]].min()
            assert abs(scores[t, c] - least) < 1e-5, (layer, t, c)


def test_layers_are_the_models_and_behind_them_those_of_index_keys():
    spec = hf(V32)
    latents, keys = spec.groups
    assert spec.latent and spec.latent.indexer == Indexer(n_heads=8, head_dim=10, n_cells=7)
    assert latents.indexed and latents.indexed.keys_of == ((0, 3), (1, 4), (2, 5))
    assert (latents.rope.layout, keys.rope.layout) == ("norm", "neox")
    assert (keys.head_dim, keys.latent_rank, keys.scale) == (10, 6, 1.0)
    assert (spec.n_layers, spec.exit_layer, spec.index_layers) == (3, 3, (3, 4, 5))
    assert spec.experts and spec.experts.layers == (1, 2)
    listed = hf(V32, mlp_layer_types=["sparse", "dense", "sparse"])
    assert listed.experts and listed.experts.layers == (0, 2)


def test_what_v3_says_of_itself_is_as_before():
    """A digest of it is in files of sessions."""
    assert "indexer" not in description(hf("deepseek-v3"))["latent"]
    assert description(hf(V32))["latent"]["indexer"]["n_cells"] == 7


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"index_head_dim": 4}, "index keys of 4 channels, 4 of them rotated"),
        ({"q_lora_rank": None}, "q_lora_rank 0 is not supported"),
        (
            {"layer_types": ["full_attention"] * 3},
            "'layer_types' with 'full_attention' is not",
        ),
        ({"mlp_layer_types": ["sparse", "dense", "both"]}, "'mlp_layer_types' with 'both' is not"),
    ],
)
def test_what_is_not_supported_is_refused(change, says):
    with pytest.raises(UnsupportedModel, match=says) as caught:
        hf(V32, **change)
    assert "\n" not in str(caught.value)
