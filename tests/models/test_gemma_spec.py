"""What headers say of Gemma 3: windows, two rotations, scales, and clear refusals."""

import math

import numpy as np
import pytest
from headers import Shaped, gguf, hf, refused

from kvrt_models.layers import tensors

NEAR, FAR = "sliding_attention", "full_attention"
FLAGS = np.array([True, False, False, True])
SIZES = dict(block_count=13, attention__key_length=16, attention__sliding_window=32)


def gemma(**change):
    return gguf("gemma3", **(SIZES | change))


def hf_gemma(**change):
    return hf("gemma3-linear", **change)


def kinds(found):
    """Layers by the size of their window, 0 for full ones."""
    return {group.mask.size: group.layers for group in found.groups}


def test_every_sixth_layer_is_full_and_the_others_have_a_rotation_of_their_own():
    found = gemma(rope__freq_base=1e6)
    assert kinds(found) == {32: (0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 12), 0: (5, 11)}
    near, far = found.groups
    assert (near.mask.kind, near.rope.base, near.rope.layout) == ("window", 1e4, "neox")
    assert (far.mask.kind, far.rope.base, far.rope.scaling) == ("full", 1e6, "none")
    assert near.scale is None and near.head_dim == far.head_dim == 16
    assert found.n_layers == 13 and found.group_of(5) is far


def test_a_stretch_is_for_full_layers_alone():
    near, far = gemma(rope__scaling__type="linear", rope__scaling__factor=8.0).groups
    assert (near.rope.scaling, near.rope.factor) == ("none", 1.0)
    assert (far.rope.scaling, far.rope.factor, far.rope.base) == ("linear", 8.0, 1e4)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (dict(attention__sliding_window=None), {0: tuple(range(4))}),
        (dict(attention__sliding_window=0), {0: tuple(range(4))}),
        (dict(attention__sliding_window_pattern=0), {32: tuple(range(4))}),
        (dict(attention__sliding_window_pattern=1), {0: tuple(range(4))}),
        (dict(attention__sliding_window_pattern=2), {32: (0, 2), 0: (1, 3)}),
        (dict(attention__sliding_window_pattern=FLAGS), {32: (0, 3), 0: (1, 2)}),
    ],
)
def test_windows_of_a_gguf_follow_its_pattern(change, found):
    assert kinds(gemma(block_count=4, **change)) == found


def test_the_base_of_windowed_layers_may_be_named():
    near, far = gemma(rope__freq_base=1e6, rope__freq_base_swa=2e4).groups
    assert (near.rope.base, far.rope.base) == (2e4, 1e6)


def test_scores_of_the_27b_are_scaled_by_width_over_heads():
    sizes = dict(embedding_length=5376, attention__head_count=32, attention__key_length=128)
    assert gemma(block_count=62, **sizes).groups[0].scale == pytest.approx(1 / math.sqrt(168))
    assert gemma(block_count=48, **sizes).groups[0].scale is None


def test_what_gemma_adds_to_a_decoder():
    found = gemma(final_logit_softcapping=30.0)
    assert (found.activation, found.embed_scale, found.logit_cap) == ("gelu_tanh", 8.0, 30.0)
    assert found.post_norms and found.qk_norm
    assert gemma().logit_cap is None
    plain = gguf("qwen3")
    assert (plain.activation, plain.embed_scale, plain.post_norms) == ("silu", 1.0, False)


def test_names_and_shapes_of_the_added_norms():
    found = gemma()
    names = tensors.tensors_of(found)
    added = {f"blk.12.{n}.weight" for n in ("post_attention_norm", "post_ffw_norm", "attn_q_norm")}
    assert added <= set(names)
    assert tensors.tensor_shape(found, "blk.3.post_ffw_norm.weight") == (64,)
    hf_names = {
        "ffn_norm": "pre_feedforward_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
    for name, called in hf_names.items():
        wanted = f"model.layers.0.{called}.weight"
        assert tensors.tensors_of(found)[f"blk.0.{name}.weight"].hf == [wanted]
    llama = gguf()
    plain = "model.layers.0.post_attention_layernorm.weight"
    assert tensors.tensors_of(llama)["blk.0.ffn_norm.weight"].hf == [plain]
    assert not any("post_" in name for name in tensors.tensors_of(llama))
    norms = {name.split(".")[-2] for name in names if tensors.is_norm(name)}
    assert norms == {*hf_names, "attn_norm", "attn_q_norm", "attn_k_norm", "output_norm"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(rope__scaling__type="yarn", rope__scaling__factor=4.0), "gemma3 with RoPE scaling"),
        (dict(attn_logit_softcapping=50.0), "'gemma3.attn_logit_softcapping' is 50.0"),
        (dict(final_logit_softcapping=-1.0), "final_logit_softcapping' is -1.0, a finite number"),
        (dict(attention__sliding_window=-1), "'gemma3.attention.sliding_window' is -1"),
        (dict(attention__sliding_window_pattern=-6), "sliding_window_pattern' is -6"),
        (dict(attention__sliding_window_pattern=[1, 0]), "is a list of 2, a list of"),
        (dict(rope__freq_base_swa="1e4"), "'gemma3.rope.freq_base_swa' is '1e4'"),
        (dict(attention__value_length=8), "'gemma3.attention.value_length' is 8"),
        (dict(block_count=62, embedding_length=0), "'gemma3.embedding_length' is 0"),
    ],
)
def test_gguf_metadata_is_refused_in_one_line(change, words):
    refused(words, lambda: gemma(**change))


def test_frequency_divisors_are_refused():
    freqs = {"rope_freqs.weight": Shaped((8,))}
    refused("a gemma3 with the tensor 'rope_freqs.weight'", lambda: gemma(tensors=freqs))


def test_config_json_of_both_forms():
    new = hf_gemma()
    assert kinds(new) == {8: (1, 2), 0: (0, 3)}
    near, far = new.groups
    assert (near.rope.base, near.rope.scaling, near.scale) == (1e4, "none", 1 / math.sqrt(10))
    assert (far.rope.base, far.rope.scaling, far.rope.factor) == (1e5, "linear", 8.0)
    assert (new.logit_cap, new.embed_scale, new.tied, new.out_bias) == (2.0, 4.0, False, True)
    old = hf("gemma3", rope_scaling=dict(rope_type="linear", factor=4.0))
    assert kinds(old) == {8: (0, 1, 2, 3, 4, 6), 0: (5,)}
    near, far = old.groups
    assert (near.rope.base, near.rope.scaling) == (1e4, "none")
    assert (far.rope.base, far.rope.scaling, far.rope.factor) == (1e6, "linear", 4.0)


def test_what_config_json_leaves_out_is_what_transformers_takes():
    left = ("head_dim", "sliding_window", "query_pre_attn_scalar", "tie_word_embeddings")
    left += ("rope_theta", "rope_local_base_freq")
    found = hf("gemma3", without=left)
    near, far = found.groups
    assert (near.head_dim, near.mask.size, near.scale) == (256, 4096, 1 / 16)
    assert (near.rope.base, far.rope.base, found.tied) == (1e4, 1e6, True)
    assert kinds(hf("gemma3", sliding_window_pattern=2)) == {8: (0, 2, 4, 6), 0: (1, 3, 5)}
    assert kinds(hf_gemma(layer_types=[FAR] * 4, sliding_window=None)) == {0: (0, 1, 2, 3)}
    assert kinds(hf_gemma(layer_types=[NEAR] * 4)) == {8: (0, 1, 2, 3)}


def bases(near=None, far=None, **other):
    return dict(rope_parameters={NEAR: near or {}, FAR: far or {}, **other})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(model_type="gemma3"), "model type 'gemma3' of config.json is not supported"),
        (dict(hidden_activation="gelu"), "'hidden_activation' is 'gelu', which is not supported"),
        (dict(use_bidirectional_attention=True), "'use_bidirectional_attention' is True"),
        (dict(attn_logit_softcapping=50.0), "'attn_logit_softcapping' is 50.0"),
        (dict(final_logit_softcapping="x"), "'final_logit_softcapping' is 'x', a finite number"),
        (dict(query_pre_attn_scalar=0), "'query_pre_attn_scalar' is 0, a finite number above 0"),
        (dict(sliding_window=None), "lacks 'sliding_window'"),
        (dict(sliding_window=0), "'sliding_window' is 0, a whole number from 1"),
        (dict(layer_types=[NEAR]), "'layer_types' is a list of 1, a list of 4 names is wanted"),
        (dict(layer_types=NEAR), "'layer_types' is 'sliding_attention', a list of 4"),
        (
            dict(layer_types=[NEAR] * 3 + ["chunked_attention"]),
            "'layer_types' with 'chunked_attention' is not",
        ),
        (dict(layer_types=[[]] * 4), "'layer_types' with a list of 0 is not"),
        (dict(layer_types=None, sliding_window_pattern=0), "'sliding_window_pattern' is 0"),
        (dict(mlp_bias=True), "'mlp_bias' is True, which is not supported"),
        (dict(rope_parameters=dict(rope_theta=1e4)), "'rope_parameters' with 'rope_theta'"),
        (bases(chunked_attention={}), "'rope_parameters' with 'chunked_attention'"),
        (bases(far=dict(rope_type="yarn", factor=2.0)), "RoPE scaling 'yarn' of gemma3_text"),
        (bases(far=dict(rope_type="linear")), "lacks 'factor'"),
        (bases(near=dict(rope_theta=-1.0)), "'rope_theta' is -1.0"),
        (bases(near=dict(partial_rotary_factor=0.5)), "'partial_rotary_factor' is 0.5"),
        (dict(rope_parameters={NEAR: 3}), "'sliding_attention' is 3, an object is wanted"),
    ],
)
def test_config_json_is_refused_in_one_line(change, words):
    refused(words, lambda: hf_gemma(**change))
