"""Mixtures of experts: each token takes a few of many networks, and none is ever left out.

Pairs of token and expert are sorted by expert and computed in tiles of a few tokens, one expert a
tile. The number of tiles is a runtime value: experts that no token chose cost nothing, and every
pair is computed however unevenly tokens choose.
"""

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from kvrt.arrays import Array, Float, Int, state
from kvrt_models.layers.feed_forward import Gated, act_and_mul
from kvrt_models.layers.int8 import Int8Matrix, int8_product
from kvrt_models.layers.linear import Linear, Matrix, linear, rms_norm
from kvrt_models.layers.table import Layer
from kvrt_models.spec import DecoderSpec, Experts, Scoring

# Tokens of a tile: enough for a product of matrices, few beside what a prompt gives an expert.
TILE = 32
# Norms of layers that have experts beside a dense network: of what that gives, of what the experts
# take and of what they give.
_BESIDE_NORMS = {
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}


@state
class TilePlan:
    """Pairs of token and expert, sorted by expert: K of a token, N experts.

    Attributes:
      pairs: the pairs in the order of their experts; pair p is choice p % K of token p // K.
      counts: pairs of each expert.
      ends: tiles up to and with each expert.
    """

    pairs: Int[Array, " P"]
    counts: Int[Array, " N"]
    ends: Int[Array, " N"]


def plan_tiles(chosen: Int[Array, "T K"], n_experts: int, tile_size: int) -> TilePlan:
    """Tiles of at most `tile_size` tokens with one expert each."""
    experts = chosen.reshape(-1)
    counts = jnp.bincount(experts, length=n_experts).astype(jnp.int32)
    ends = jnp.cumsum((counts + (tile_size - 1)) // tile_size)
    return TilePlan(pairs=jnp.argsort(experts), counts=counts, ends=ends)


def pairs_of(plan: TilePlan, tile: Int[Array, ""], tile_size: int) -> tuple[Array, Array]:
    """The expert of a tile and its pairs, padded with the number of all pairs."""
    expert = jnp.searchsorted(plan.ends, tile, side="right").astype(jnp.int32)
    count = plan.counts[expert]
    of_expert = (count + (tile_size - 1)) // tile_size
    start = (tile - (plan.ends[expert] - of_expert)) * tile_size
    nth = start + jnp.arange(tile_size, dtype=jnp.int32)
    first = jnp.cumsum(plan.counts)[expert] - count
    n_pairs = plan.pairs.shape[0]
    pairs = plan.pairs.at[first + nth].get(mode="fill", fill_value=n_pairs)
    return expert, jnp.where(nth < count, pairs, n_pairs)


class Mixture(nnx.Module, pytree=False):
    """A router, its experts, and where the model has one a network that every token takes too."""

    def __init__(self, of: DecoderSpec, experts: Experts, weights: Mapping[str, Matrix], at: str):
        """Takes `{at}ffn_gate_inp`, `{at}ffn_*_exps`, `{at}ffn_*_shexp`."""
        self.experts, self.act_and_mul = experts, act_and_mul(of)
        self.router = Linear.named(weights, f"{at}ffn_gate_inp")
        self.gate = Linear.named(weights, f"{at}ffn_gate_exps")
        self.up = Linear.named(weights, f"{at}ffn_up_exps")
        self.down = Linear.named(weights, f"{at}ffn_down_exps")
        self.shared = Gated(of, weights, at, "_shexp") if experts.n_ff_shared else None
        gate = f"{at}ffn_gate_inp_shexp"
        self.shared_gate = Linear.named(weights, gate) if experts.shared_gate else None
        bias = weights.get(f"{at}exp_probs_b.bias")
        self.choice_bias = None if bias is None else nnx.Param(bias)
        gains = weights.get(f"{at}ffn_down_exps_scale.weight")
        self.gains = None if gains is None else nnx.Param(gains)

    @staticmethod
    def add_tensors(layer: Layer, of: Experts, n_embd: int) -> None:
        """Adds the tensors of a layer with experts, which its files have together or one by one."""
        n, mlp = of.n_experts, layer.family.mlp
        layer.add("ffn_gate_inp", f"{mlp}.gate", n, n_embd, bias=of.bias)
        joint = layer.family.gate_up is not None
        names = {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}
        for x in ("gate", "up", "down"):
            sizes = (n_embd, of.n_ff) if x == "down" else (of.n_ff, n_embd)
            layer.add(
                f"ffn_{x}_exps",
                f"{mlp}.experts.{names[x]}" if joint else f"{mlp}.experts.{{}}.{x}_proj",
                n,
                *sizes,
                ends=(".weight", "" if joint else ".weight"),
                bias=of.bias,
                n_each=0 if joint else n,
                make=functools.partial(_of_folder, layer.family.gate_up, x),
            )
            sizes = (n_embd, of.n_ff_shared) if x == "down" else (of.n_ff_shared, n_embd)
            if of.n_ff_shared:
                layer.add(f"ffn_{x}_shexp", f"{mlp}.shared_expert.{x}_proj", *sizes)
        if of.shared_gate:
            layer.add("ffn_gate_inp_shexp", f"{mlp}.shared_expert_gate", 1, n_embd)
        if of.choice_bias:
            ends = (".bias", "")
            layer.add("exp_probs_b", f"{mlp}.gate.e_score_correction_bias", n, ends=ends)
        if of.beside:
            for name, called in _BESIDE_NORMS.items():
                layer.add(name, called, n_embd)
            layer.add("ffn_gate_inp_scale", "router.scale", n_embd, ends=(".weight", ""))
            called = "router.per_expert_scale"
            layer.add("ffn_down_exps_scale", called, n, ends=(".weight", ""))

    def __call__(
        self, x: Float[Array, "T E"], rated_by: Float[Array, "T E"] | None = None
    ) -> Float[Array, "T E"]:
        """The output of the chosen experts and of the shared network for each token.

        Args:
          x: what the networks take.
          rated_by: what the router takes; None is x.
        """
        n_used, n_tokens = self.experts.n_used, x.shape[0]
        scores = self.router(x if rated_by is None else rated_by)
        best, chosen = self._chosen(scores)
        tile_size = min(TILE, n_tokens)
        plan = plan_tiles(chosen, self.experts.n_experts, tile_size)
        scores_input = self.experts.scoring == "sigmoid"
        weights = _weigh(best, scores, self.experts.scoring)
        weights = weights if self.gains is None else weights * self.gains[...][chosen]
        weights = weights.reshape(-1)
        weights = weights if self.experts.scale == 1.0 else weights * self.experts.scale
        layers = [_arrays(x) for x in (self.gate, self.up, self.down)]

        def step(tile: Array, out: Array) -> Array:
            expert, pairs = pairs_of(plan, tile, tile_size)
            # A padded pair belongs to no token: its input is zeros and its output is dropped.
            tokens = pairs // n_used
            inputs = x.at[tokens].get(mode="fill", fill_value=0.0)
            weight = weights.at[pairs].get(mode="fill", fill_value=0.0)[:, None]
            inputs = inputs * weight if scores_input else inputs
            gate, up = (_product(inputs, layer, expert) for layer in layers[:2])
            given = _product(self.act_and_mul(gate, up), layers[2], expert)
            return out.at[tokens].add(given if scores_input else given * weight, mode="drop")

        out = jnp.zeros_like(x) if self.shared is None else self.shared(x)
        out = out if self.shared_gate is None else out * jax.nn.sigmoid(self.shared_gate(x))
        return lax.fori_loop(0, plan.ends[-1], step, out)

    def _chosen(self, scores: Float[Array, "T N"]) -> tuple[Array, Array]:
        """Scores and ids of each token's experts, the best of those in its best groups."""
        of = self.experts
        if self.choice_bias is None and of.n_groups == 1:
            return lax.top_k(scores, of.n_used)
        by_sigmoid = of.scoring.startswith("sigmoid")
        rated = jax.nn.sigmoid(scores) if by_sigmoid else scores
        rated = rated if self.choice_bias is None else rated + self.choice_bias[...][None]
        groups = rated.reshape(scores.shape[0], of.n_groups, -1)
        best = jnp.sum(lax.top_k(groups, 2 if by_sigmoid else 1)[0], axis=2)
        _, used = lax.top_k(best, of.n_groups_used)
        open_to = jnp.any(jax.nn.one_hot(used, of.n_groups, dtype=bool), axis=1)
        rated = jnp.where(open_to[:, :, None], groups, -jnp.inf).reshape(scores.shape)
        _, chosen = lax.top_k(rated, of.n_used)
        return jnp.take_along_axis(scores, chosen, axis=1), chosen


class Beside(nnx.Module, pytree=False):
    """A network that every token takes and, beside it, experts chosen by the stream before norms.

    Source: transformers `Gemma4TextDecoderLayer`, `Gemma4TextRouter`.
    """

    def __init__(self, of: DecoderSpec, experts: Experts, weights: Mapping[str, Matrix], at: str):
        """Takes what `Gated` and `Mixture` take, and four norms."""
        self.norm_eps = of.norm_eps
        self.dense, self.mixture = Gated(of, weights, at), Mixture(of, experts, weights, at)
        norms = (f"{at}{name}.weight" for name in (*_BESIDE_NORMS, "ffn_gate_inp_scale"))
        self.dense_out, self.into, self.out, self.rating = (nnx.Param(weights[x]) for x in norms)

    def __call__(self, x: Float[Array, "T E"], stream: Float[Array, "T E"]) -> Float[Array, "T E"]:
        """The sum of both; the dense network takes x, which is the stream normed."""
        rated_by = rms_norm(stream, self.rating[...], self.norm_eps) * stream.shape[1] ** -0.5
        given = self.mixture(rms_norm(stream, self.into[...], self.norm_eps), rated_by)
        dense = rms_norm(self.dense(x), self.dense_out[...], self.norm_eps)
        return dense + rms_norm(given, self.out[...], self.norm_eps)


def _weigh(best: Array, scores: Array, scoring: Scoring) -> Array:
    """Weights of the chosen experts, from their scores and those of all."""
    if scoring.startswith("sigmoid"):
        weights = jax.nn.sigmoid(best)
        shares = scoring == "sigmoid_share"
        return weights / (jnp.sum(weights, axis=1, keepdims=True) + 1e-20) if shares else weights
    among = best if scoring == "softmax" else scores
    return jnp.exp(best - jax.nn.logsumexp(among, axis=1, keepdims=True))


def _arrays(of: Linear) -> tuple[Matrix, Array | None]:
    return of.matrix, None if of.bias is None else of.bias[...]


def _product(x: Array, of: tuple[Matrix, Array | None], expert: Array) -> Array:
    weights, bias = of
    if isinstance(weights, Int8Matrix):
        y = int8_product(x, weights, expert)
    else:
        y = linear(x, lax.dynamic_index_in_dim(weights, expert, keepdims=False))
    return y if bias is None else y + lax.dynamic_index_in_dim(bias, expert)


def _of_folder(
    form: str | None, x: str, parts: Sequence[np.ndarray], shape: tuple[int, ...]
) -> np.ndarray:
    """Gate, up or down of all experts, outputs before inputs; see `Family.gate_up`."""
    found = parts[0]
    if form is None:
        alike = all(part.shape == found.shape for part in parts)
        return np.stack(parts) if alike else found
    axis = 1 if form == "rows" else -1
    if x != "down" and found.ndim > 1 and found.shape[axis] % 2 == 0:
        half, is_up = found.shape[axis] // 2, x == "up"
        taken = slice(is_up, None, 2) if form == "interleaved" else slice(is_up * half, None)
        taken = taken if form == "interleaved" or is_up else slice(half)
        found = found[:, taken] if axis == 1 else found[..., taken]
    elif x != "down":
        return found
    return found.swapaxes(1, 2) if form != "rows" and len(shape) == 3 == found.ndim else found
