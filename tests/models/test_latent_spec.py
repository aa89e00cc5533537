"""What a config.json says of DeepSeek-V2 and V3: latents, YaRN's growth, routing, and refusals."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from headers import BASES, GOLDEN, Shaped, gguf, hf, like, refused

from kvrt import CacheConfig
from kvrt.program.estimate import of_cells
from kvrt_models.families.shared import registry
from kvrt_models.layers import tensors
from kvrt_models.layers.experts import Mixture, _weigh
from kvrt_models.load import load


def v2(**change):
    return hf("deepseek-v2", **change)


def v3(**change):
    return hf("deepseek-v3", **change)


def test_a_group_keeps_latents():
    (group,) = v3().groups
    assert (group.layers, group.n_kv_heads, group.head_dim, group.latent_rank) == (
        (0, 1),
        1,
        24,
        20,
    )
    assert (group.dim_k, group.dim_v, group.rope.n_rot, group.rope.layout) == (4, 20, 4, "norm")
    assert v2().groups[0].rope.layout == "norm"
    assert v3(rope_interleave=False).groups[0].rope.layout == "neox"
    assert (
        of_cells(v3().groups, None, CacheConfig(n_ctx=16, block_size=16)).parts[0].n_bytes
        == 2 * 16 * 24 * 4
    )


def test_a_temperature_of_queries_is_refused_in_a_gguf():
    key = "attention__temperature_scale"
    refused("temperature_scale' is 0.1, which is not", lambda: deepseek2(**{key: 0.1}))
    assert deepseek2(**{key: 0.0}) == deepseek2()


def test_scores_grow_with_yarn_by_the_square():
    growth = 0.1 * 1.6 * math.log(8) + 1
    assert v3().groups[0].scale == pytest.approx(16**-0.5 * growth**2)
    assert v3().groups[0].rope.magnitude == pytest.approx((0.1 * 0.7 * math.log(8) + 1) / growth)
    rules = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    older = dict(without=["rope_parameters"], rope_scaling=rules | {"mscale_all_dim": 1.6})
    assert v3(**older).groups[0].scale == pytest.approx(16**-0.5 * growth**2)
    assert v3(without=["rope_parameters"], rope_scaling=rules).groups[0].scale == 16**-0.5
    assert v2().groups[0].scale == 16**-0.5


def test_what_config_json_leaves_out_is_what_transformers_takes():
    sizes = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    of = v3(without=sizes).latent
    assert (of.rank, of.q_rank, of.n_nope, of.n_rope, of.n_value) == (512, 1536, 128, 64, 128)
    assert v3(q_lora_rank=None).latent.q_rank == 0
    experts = hf(
        "deepseek-v3",
        without=("norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group"),
        n_routed_experts=16,
    ).experts
    assert (experts.scoring, experts.scale, experts.choice_bias) == ("sigmoid_share", 2.5, True)
    assert (experts.n_groups, experts.n_groups_used) == (8, 4)
    assert v2(without=["topk_method"], n_group=None).experts.n_groups == 1
    assert v3(norm_topk_prob=False).experts.scoring == "sigmoid_each"
    assert v3(first_k_dense_replace=2).experts is None


def test_experts_that_config_json_leaves_out():
    keys = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts")
    many = dict(n_group=8, topk_group=4)
    for made, wanted in (
        (v2(without=keys), (64, 6, 1407, 2)),
        (v3(without=keys, **many), (256, 8, 2048, 1)),
    ):
        of = made.experts
        found = (of.n_experts, of.n_used, of.n_ff, of.n_ff_shared // of.n_ff)
        assert found == wanted
    assert v2(n_shared_experts=None).experts.n_ff_shared == 0
    # As the published code has it, a model without experts.
    assert v2(n_routed_experts=None, num_experts_per_tok=None).experts is None
    refused(
        "'num_experts_per_tok' is 6, a whole number from 1 to 4",
        lambda: v2(without=keys[1:], n_routed_experts=4),
    )


def test_a_guessed_number_of_experts_is_told():
    config = json.loads((GOLDEN / "deepseek-v2" / "config.json").read_text())
    assert registry.folder_notes(config, v2()) == ()
    del config["num_experts_per_tok"]
    assert registry.folder_notes(config, v2(first_k_dense_replace=2)) == ()
    (line,) = registry.folder_notes(config, v2())
    assert line.startswith("config.json has no 'num_experts_per_tok'; 6 are taken")


def routed(of, scores, bias):
    """Experts of one token and their weights, step by step."""
    chance = (
        1 / (1 + np.exp(-scores)) if bias is not None else np.exp(scores) / np.exp(scores).sum()
    )
    rated = chance if bias is None else chance + bias
    groups = np.array_split(np.arange(len(scores)), of.n_groups)
    worth = [np.sort(rated[g])[-(1 if bias is None else 2) :].sum() for g in groups]
    allowed = np.concatenate([groups[i] for i in np.argsort(worth)[-of.n_groups_used :]])
    chosen = sorted(allowed, key=lambda i: -rated[i])[: of.n_used]
    weights = chance[chosen]
    weights = weights / weights.sum() if of.scoring == "sigmoid_share" else weights
    return dict(zip(chosen, weights * of.scale, strict=True))


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3"])
def test_tokens_choose_experts_by_groups(name):
    """Who is chosen, and with what weight, as a loop over tokens has it."""
    model = load(GOLDEN / name)
    mixture = model.decoder.blocks[1].ffn
    assert isinstance(mixture, Mixture)
    x = np.random.default_rng(3).standard_normal((40, 32), np.float32)
    scores = np.asarray(mixture.router(jnp.asarray(x)), np.float64)
    bias = None if mixture.choice_bias is None else np.asarray(mixture.choice_bias[...])
    best, chosen = (np.asarray(y) for y in jax.jit(mixture._chosen)(scores.astype(np.float32)))
    weights = _weigh(jnp.asarray(best), jnp.asarray(scores), model.spec.experts.scoring)
    given = np.asarray(weights) * model.spec.experts.scale
    for i in range(40):
        wanted = routed(model.spec.experts, scores[i], bias)
        assert set(wanted) == set(chosen[i].tolist())
        np.testing.assert_allclose(given[i], [wanted[j] for j in chosen[i]], atol=1e-5)


def test_an_unknown_way_to_choose_is_refused():
    refused("'topk_method' is 'noaux_tc', which is not supp", lambda: v2(topk_method="noaux_tc"))
    refused("lacks 'n_group'", lambda: v2(n_group=None))


YARN = {
    "rope__scaling__type": "yarn",
    "rope__scaling__factor": 4.0,
    "rope__scaling__original_context_length": 64,
}
BIAS = {"blk.1.exp_probs_b.bias": Shaped((8,))}


deepseek2 = functools.partial(like, "deepseek2")


def test_a_gguf_says_the_same():
    found = deepseek2()
    (group,) = found.groups
    assert (group.head_dim, group.latent_rank, group.scale) == (40, 32, 24**-0.5)
    assert (group.rope.n_rot, group.rope.layout) == (8, "norm")
    of = found.latent
    assert (of.n_nope, of.n_value, of.q_rank, of.norm_eps) == (16, 20, 0, 1e-5)
    experts = found.experts
    assert (experts.layers, experts.scoring, experts.n_ff_shared) == ((1,), "share", 48)
    assert deepseek2(expert_weights_norm=True).experts.scoring == "softmax"
    groups = dict(expert_gating_func=2, expert_group_count=4, expert_group_used_count=2)
    experts = deepseek2(BIAS, **groups, expert_weights_scale=2.5).experts
    assert (experts.scoring, experts.choice_bias, experts.scale) == ("sigmoid_each", True, 2.5)
    assert (experts.n_groups, experts.n_groups_used) == (4, 2)
    assert deepseek2(leading_dense_block_count=2).experts is None


def test_scores_of_a_gguf_grow_by_what_the_converter_wrote():
    growth = 0.1 * 0.8 * math.log(4) + 1
    (group,) = deepseek2(**YARN, rope__scaling__yarn_log_multiplier=0.08).groups
    assert group.scale == pytest.approx(24**-0.5 * growth**2)
    assert group.rope.magnitude == 1.0


def test_a_gguf_of_before_april_2025_says_the_same():
    """Keys and values are described by head, and both matrices that make them are one tensor."""
    older = dict(attention__key_length=24, attention__value_length=20, attention__head_count_kv=4)
    older |= dict(attention__key_length_mla=None, attention__value_length_mla=None)
    joined = "blk.0.attn_kv_b.weight"
    found = gguf("deepseek2", {joined: Shaped((144, 32))}, **BASES["deepseek2"] | older)
    assert found == deepseek2()
    for name in ("blk.0.attn_k_b.weight", "blk.0.attn_v_b.weight"):
        assert tensors.tensors_of(found)[name].joined == (joined, (144, 32))
    x = np.arange(144 * 32, dtype=np.float32).reshape(144, 32)
    rows = [tensors.tensors_of(found)[f"blk.0.attn_{i}_b.weight"] for i in "kv"]
    k, v = (row.make([x], row.shape) for row in rows)
    by_head = x.reshape(4, 36, 32)
    np.testing.assert_array_equal(k, by_head[:, :16].swapaxes(1, 2))
    np.testing.assert_array_equal(v, by_head[:, 16:])
