"""What headers say of Gemma 2 and 3: windows, soft caps, two rotations and scales."""

import math

import numpy as np
import pytest
from headers import gguf, hf, like

from kvrt_models.layers import tensors

NEAR, FAR = "sliding_attention", "full_attention"
FLAGS = np.array([True, False, False, True])


def kinds(found):
    """Layers by the size of their window, 0 for full ones."""
    return {group.mask.size: group.layers for group in found.groups}


def test_every_sixth_layer_is_full_and_the_others_have_a_rotation_of_their_own():
    found = like("gemma3", rope__freq_base=1e6)
    assert kinds(found) == {32: (0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 12), 0: (5, 11)}
    near, far = found.groups
    assert (near.mask.kind, near.rope.base, near.rope.layout) == ("window", 1e4, "neox")
    assert (far.mask.kind, far.rope.base, far.rope.scaling) == ("full", 1e6, "none")
    assert near.scale is None and near.head_dim == far.head_dim == 16
    assert found.n_layers == 13 and found.group_of(5) is far


def test_a_stretch_is_for_full_layers_alone():
    near, far = like("gemma3", rope__scaling__type="linear", rope__scaling__factor=8.0).groups
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
    assert kinds(like("gemma3", block_count=4, **change)) == found


def test_the_base_of_windowed_layers_may_be_named():
    near, far = like("gemma3", rope__freq_base=1e6, rope__freq_base_swa=2e4).groups
    assert (near.rope.base, far.rope.base) == (2e4, 1e6)


@pytest.mark.parametrize(
    ("arch", "n_embd", "n_layers", "others"),
    [("gemma2", 4608, 46, (42, 62)), ("gemma3", 5376, 62, (48,))],
)
def test_scores_of_the_27b_are_scaled_by_width_over_heads(arch, n_embd, n_layers, others):
    sizes = dict(embedding_length=n_embd, attention__head_count=32, attention__key_length=128)
    scale = like(arch, block_count=n_layers, **sizes).groups[0].scale
    assert scale == pytest.approx(1 / math.sqrt(n_embd / 32))
    for n in others:
        assert like(arch, block_count=n, **sizes).groups[0].scale is None


def test_what_gemma_adds_to_a_decoder():
    found = like("gemma3", final_logit_softcapping=30.0)
    assert (found.activation, found.embed_scale, found.logit_cap) == ("gelu_tanh", 8.0, 30.0)
    assert found.post_norms and found.qk_norm
    assert like("gemma3").logit_cap is None
    plain = gguf("qwen3")
    assert (plain.activation, plain.embed_scale, plain.post_norms) == ("silu", 1.0, False)


def test_norms_are_known_by_their_names():
    found = tensors.tensors_of(like("gemma3"))
    norms = {name.split(".")[-2] for name in found if tensors.is_norm(name)}
    of_layers = {"attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm"}
    assert norms == {*of_layers, "attn_q_norm", "attn_k_norm", "output_norm"}


def test_config_json_of_both_forms():
    new = hf("gemma3-linear")
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
    assert kinds(hf("gemma3-linear", layer_types=[FAR] * 4, sliding_window=None)) == {
        0: (0, 1, 2, 3)
    }
    assert kinds(hf("gemma3-linear", layer_types=[NEAR] * 4)) == {8: (0, 1, 2, 3)}


def test_every_other_layer_of_a_gguf_is_full():
    found = like("gemma2", attention__sliding_window=32, rope__freq_base=2e4)
    assert kinds(found) == {32: (0, 2, 4), 0: (1, 3)}
    near, far = found.groups
    assert near.rope == far.rope and near.rope.base == 2e4 and near.rope.layout == "neox"
    assert (near.scale, far.scale, near.head_dim) == (None, None, 16)
    assert found.post_norms and not found.qk_norm
    assert (found.activation, found.embed_scale) == ("gelu_tanh", 8.0)


def test_what_a_gguf_of_gemma_2_leaves_out():
    found = like("gemma2")
    assert kinds(found) == {4096: (0, 2, 4), 0: (1, 3)}
    assert ({g.soft_cap for g in found.groups}, found.logit_cap) == ({50.0}, 30.0)
    named = like("gemma2", attn_logit_softcapping=5.0, final_logit_softcapping=6.0)
    assert ({g.soft_cap for g in named.groups}, named.logit_cap) == ({5.0}, 6.0)
    assert kinds(like("gemma2", attention__sliding_window_pattern=3)) == {
        4096: (0, 1, 3, 4),
        0: (2,),
    }
    near, far = like("gemma2", rope__freq_base_swa=3e4).groups
    assert (near.rope.base, far.rope.base) == (3e4, 1e4)


def test_config_json_has_caps_windows_and_a_scale():
    found = hf("gemma2")
    assert kinds(found) == {8: (0, 2), 0: (1,)}
    assert {(g.soft_cap, g.scale) for g in found.groups} == {(4.0, 1 / math.sqrt(10))}
    assert (found.logit_cap, found.tied, found.qk_norm) == (3.0, True, False)
    assert kinds(hf("gemma2", layer_types=[FAR, NEAR, NEAR])) == {8: (1, 2), 0: (0,)}
    assert kinds(hf("gemma2", layer_types=[FAR] * 3, sliding_window=None)) == {0: (0, 1, 2)}
    stretched = hf("gemma2", rope_scaling=dict(rope_type="linear", factor=4.0))
    assert {(g.rope.scaling, g.rope.factor) for g in stretched.groups} == {("linear", 4.0)}


def test_a_cap_that_is_null_is_off_and_one_left_out_is_usual():
    off = hf("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert ({g.soft_cap for g in off.groups}, off.logit_cap) == ({None}, None)
    left = ("attn_logit_softcapping", "final_logit_softcapping", "head_dim", "sliding_window")
    usual = hf("gemma2", without=(*left, "tie_word_embeddings", "query_pre_attn_scalar"))
    assert ({g.soft_cap for g in usual.groups}, usual.logit_cap) == ({50.0}, 30.0)
    assert (usual.groups[0].head_dim, usual.groups[0].scale, usual.tied) == (256, 1 / 16, True)
    assert kinds(usual) == {4096: (0, 2), 0: (1,)}
