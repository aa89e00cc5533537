"""What headers say of Gemma 2: every other layer windowed, soft caps, and clear refusals."""

import math

import pytest
from headers import Shaped, gguf, hf, refused

from kvrt_models.layers import tensors

NEAR, FAR = "sliding_attention", "full_attention"


def gemma(**change):
    return gguf("gemma2", **(dict(block_count=5, attention__key_length=16) | change))


def hf_gemma(**change):
    return hf("gemma2", **change)


def kinds(found):
    """Layers by the size of their window, 0 for full ones."""
    return {group.mask.size: group.layers for group in found.groups}


def test_every_other_layer_of_a_gguf_is_full():
    found = gemma(attention__sliding_window=32, rope__freq_base=2e4)
    assert kinds(found) == {32: (0, 2, 4), 0: (1, 3)}
    near, far = found.groups
    assert near.rope == far.rope and near.rope.base == 2e4 and near.rope.layout == "neox"
    assert (near.scale, far.scale, near.head_dim) == (None, None, 16)
    assert found.post_norms and not found.qk_norm
    assert (found.activation, found.embed_scale) == ("gelu_tanh", 8.0)


def test_what_a_gguf_leaves_out_is_what_llama_cpp_takes():
    found = gemma()
    assert kinds(found) == {4096: (0, 2, 4), 0: (1, 3)}
    assert ({g.soft_cap for g in found.groups}, found.logit_cap) == ({50.0}, 30.0)
    named = gemma(attn_logit_softcapping=5.0, final_logit_softcapping=6.0)
    assert ({g.soft_cap for g in named.groups}, named.logit_cap) == ({5.0}, 6.0)
    assert kinds(gemma(attention__sliding_window_pattern=3)) == {4096: (0, 1, 3, 4), 0: (2,)}
    near, far = gemma(rope__freq_base_swa=3e4).groups
    assert (near.rope.base, far.rope.base) == (3e4, 1e4)


def test_scores_of_the_27b_are_scaled_by_width_over_heads():
    sizes = dict(embedding_length=4608, attention__head_count=32, attention__key_length=128)
    assert gemma(block_count=46, **sizes).groups[0].scale == pytest.approx(1 / math.sqrt(144))
    assert gemma(block_count=42, **sizes).groups[0].scale is None
    assert gemma(block_count=62, **sizes).groups[0].scale is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(attn_logit_softcapping=0.0), "attn_logit_softcapping' is 0.0, a finite number above"),
        (dict(final_logit_softcapping=0.0), "final_logit_softcapping' is 0.0, a finite number"),
        (dict(attention__sliding_window=0), "'gemma2.attention.sliding_window' is 0"),
        (dict(attention__sliding_window_pattern=[1, 0]), "is a list of 2, a list of"),
        (dict(rope__freq_base_swa="1e4"), "'gemma2.rope.freq_base_swa' is '1e4'"),
        (dict(tensors={"rope_freqs.weight": Shaped((8,))}), "a gemma2 with the tensor"),
    ],
)
def test_gguf_metadata_is_refused_in_one_line(change, words):
    refused(words, lambda: gemma(**change))


def test_config_json_has_caps_windows_and_a_scale():
    found = hf_gemma()
    assert kinds(found) == {8: (0, 2), 0: (1,)}
    assert {(g.soft_cap, g.scale) for g in found.groups} == {(4.0, 1 / math.sqrt(10))}
    assert (found.logit_cap, found.tied, found.qk_norm) == (3.0, True, False)
    assert kinds(hf_gemma(layer_types=[FAR, NEAR, NEAR])) == {8: (1, 2), 0: (0,)}
    assert kinds(hf_gemma(layer_types=[FAR] * 3, sliding_window=None)) == {0: (0, 1, 2)}
    stretched = hf_gemma(rope_scaling=dict(rope_type="linear", factor=4.0))
    assert {(g.rope.scaling, g.rope.factor) for g in stretched.groups} == {("linear", 4.0)}


def test_a_cap_that_is_null_is_off_and_one_left_out_is_usual():
    off = hf_gemma(attn_logit_softcapping=None, final_logit_softcapping=None)
    assert ({g.soft_cap for g in off.groups}, off.logit_cap) == ({None}, None)
    left = ("attn_logit_softcapping", "final_logit_softcapping", "head_dim", "sliding_window")
    usual = hf("gemma2", without=(*left, "tie_word_embeddings", "query_pre_attn_scalar"))
    assert ({g.soft_cap for g in usual.groups}, usual.logit_cap) == ({50.0}, 30.0)
    assert (usual.groups[0].head_dim, usual.groups[0].scale, usual.tied) == (256, 1 / 16, True)
    assert kinds(usual) == {4096: (0, 2), 0: (1,)}


def test_norms_are_called_as_in_gemma_3():
    names = tensors.tensors_of(hf_gemma())
    assert {f"blk.2.{n}.weight" for n in ("post_attention_norm", "post_ffw_norm")} <= set(names)
    assert not any("q_norm" in name for name in names)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(hidden_activation="gelu"), "'hidden_activation' is 'gelu', which is not supported"),
        (dict(use_bidirectional_attention=True), "'use_bidirectional_attention' is True"),
        (dict(attn_logit_softcapping=0.0), "'attn_logit_softcapping' is 0.0, a finite number"),
        (dict(final_logit_softcapping="x"), "'final_logit_softcapping' is 'x', a finite number"),
        (dict(sliding_window=None), "lacks 'sliding_window'"),
        (dict(sliding_window=0), "'sliding_window' is 0, a whole number from 1"),
        (dict(layer_types=[NEAR]), "'layer_types' is a list of 1, a list of 3 names is wanted"),
        (
            dict(layer_types=["chunked_attention"] * 3),
            "'layer_types' with 'chunked_attention' is not",
        ),
        (dict(mlp_bias=True), "'mlp_bias' is True, which is not supported"),
        (dict(rope_parameters={NEAR: {}}), "RoPE that differs by kind of layer"),
    ],
)
def test_config_json_is_refused_in_one_line(change, words):
    refused(words, lambda: hf_gemma(**change))
