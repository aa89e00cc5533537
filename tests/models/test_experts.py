"""Mixtures of experts against a double loop: every pair of token and expert is computed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from headers import hf

from kvrt_models.layers.experts import TILE, Mixture, pairs_of, plan_tiles
from kvrt_models.spec import Clamped, Experts

N_EMBD, N_FF, N_EXPERTS = 8, 6, 5
CLAMPED = Clamped(alpha=1.5, limit=0.7)


def spec_of(scoring, *, n_used=2, n_ff_shared=0, bias=False):
    experts = Experts(
        layers=(0,),
        n_experts=N_EXPERTS,
        n_used=n_used,
        n_ff=N_FF,
        scoring=scoring,
        bias=bias,
        n_ff_shared=n_ff_shared,
    )
    activation = CLAMPED if bias else "silu"
    return dataclasses.replace(hf(), n_embd=N_EMBD, experts=experts, activation=activation)


def weights_of(of, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"gate_inp": (N_EXPERTS, N_EMBD), "down_exps": (N_EXPERTS, N_EMBD, N_FF)}
    shapes |= {f"{name}_exps": (N_EXPERTS, N_FF, N_EMBD) for name in ("gate", "up")}
    made = {f"ffn_{name}.weight": rng.normal(0, 0.7, shape) for name, shape in shapes.items()}
    if of.experts.bias:
        made |= {f"ffn_{n}.bias": rng.normal(0, 0.7, s[:-1]) for n, s in shapes.items()}
    if shared := of.experts.n_ff_shared:
        made["ffn_gate_up_shexp.weight"] = rng.normal(0, 0.7, (2 * shared, N_EMBD))
        made["ffn_down_shexp.weight"] = rng.normal(0, 0.7, (N_EMBD, shared))
    return {name: value.astype(np.float32) for name, value in made.items()}


def glued(of, gate, up):
    if of.activation is not CLAMPED:
        return gate / (1 + np.exp(-gate)) * up
    gate, up = np.minimum(gate, CLAMPED.limit), np.clip(up, -CLAMPED.limit, CLAMPED.limit)
    return gate / (1 + np.exp(-CLAMPED.alpha * gate)) * (up + 1)


def expected(of, weights, x):
    """One token after another, one expert after another, in float64."""

    def product(name, of_one, row):
        bias = weights.get(f"ffn_{name}.bias")
        y = weights[f"ffn_{name}.weight"][of_one].astype(np.float64) @ row
        return y if bias is None else y + bias[of_one]

    out = np.zeros(x.shape)
    for token, row in enumerate(x.astype(np.float64)):
        scores = product("gate_inp", slice(None), row)
        chosen = np.argsort(-scores)[: of.experts.n_used]
        total = np.exp(scores[chosen]).sum()
        for expert in chosen:
            if of.experts.scoring == "sigmoid":
                before, after = 1 / (1 + np.exp(-scores[expert])), 1.0
            else:
                before, after = 1.0, np.exp(scores[expert]) / total
            gate, up = (product(f"{n}_exps", expert, before * row) for n in ("gate", "up"))
            out[token] += after * product("down_exps", expert, glued(of, gate, up))
        if of.experts.n_ff_shared:
            gate, up = np.split(weights["ffn_gate_up_shexp.weight"] @ row, 2)
            out[token] += weights["ffn_down_shexp.weight"] @ glued(of, gate, up)
    return out


def mixture(of, weights):
    return Mixture(of, of.experts, jax.device_put(weights), "")


SPECS = {
    "softmax": spec_of("softmax"),
    "sigmoid": spec_of("sigmoid", n_used=1, n_ff_shared=4),
    "clamped": spec_of("softmax", bias=True, n_used=3),
}


@pytest.mark.parametrize("n_tokens", [1, 3, TILE + 8])
@pytest.mark.parametrize("name", SPECS)
def test_a_mixture_is_its_double_loop(name, n_tokens):
    of, x = SPECS[name], np.random.default_rng(1).normal(0, 1, (n_tokens, N_EMBD))
    weights = weights_of(of)
    found = jax.jit(mixture(of, weights))(x.astype(np.float32))
    wanted = expected(of, weights, x.astype(np.float32))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_no_token_is_left_out_where_all_want_one_expert():
    of = SPECS["clamped"]
    weights = weights_of(of)
    weights["ffn_gate_inp.bias"] = np.asarray([0, 9, 0, 9, 9], np.float32)
    for name in ("gate_exps", "up_exps", "down_exps"):  # nobody comes by the others' weights
        weights[f"ffn_{name}.weight"][[0, 2]] = np.nan
    x = np.random.default_rng(2).normal(0, 1, (TILE + 1, N_EMBD)).astype(np.float32)
    found = jax.jit(mixture(of, weights))(x)
    np.testing.assert_allclose(found, expected(of, weights, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_tiles_have_every_pair_once_with_one_expert_each(size):
    chosen = np.asarray([[4, 1], [1, 0], [1, 4], [4, 1], [1, 4]], np.int32)
    plan = jax.jit(plan_tiles, static_argnums=(1, 2))(chosen, 6, size)
    find, seen = jax.jit(pairs_of, static_argnums=2), []
    for tile in range(np.asarray(plan.ends)[-1]):
        expert, pairs = map(np.asarray, find(plan, np.int32(tile), size))
        mine = [p for p in pairs.tolist() if p < chosen.size]
        assert mine and {chosen.reshape(-1)[p] for p in mine} == {int(expert)}
        seen += mine
    assert sorted(seen) == list(range(chosen.size))
    assert np.asarray(plan.ends)[-1] == sum(-(-n // size) for n in (1, 5, 4))


@pytest.mark.slow
def test_half_precision_experts_round_the_weights_and_no_more():
    of = SPECS["softmax"]
    weights = weights_of(of)
    halves = {k: jnp.asarray(v, jnp.bfloat16) for k, v in weights.items()}
    halves["ffn_gate_inp.weight"] = jnp.asarray(weights["ffn_gate_inp.weight"])
    x = np.random.default_rng(3).normal(0, 1, (1, N_EMBD)).astype(np.float32)
    found = jax.jit(Mixture(of, of.experts, halves, ""))(jnp.asarray(x))
    rounded = {k: np.asarray(v, np.float32) for k, v in halves.items()}
    np.testing.assert_allclose(found, expected(of, rounded, x), rtol=2e-2, atol=2e-2)
