"""What headers say of recurrent layers, and what of it is refused."""

import json
import math
import shutil

import numpy as np
import pytest
from headers import GOLDEN, Shaped, gguf, hf, refused

from kvrt_models import load
from kvrt_models.layers import tensors
from kvrt_models.spec import Experts
from tests.peer import tiny_recurrent

SSM = {
    "ssm__conv_kernel": 4,
    "ssm__inner_size": 128,
    "ssm__state_size": 16,
    "ssm__time_step_rank": 8,
    "ssm__group_count": 2,
}


def recurrent_gguf(arch="jamba", tensors=None, **change):
    """Two layers, the second with attention."""
    kv = None if arch.startswith("mamba") else np.array([0, 2], np.int32)
    return gguf(arch, tensors, **{"attention__head_count_kv": kv, **SSM, **change})


def test_sizes_of_a_config_json():
    found = hf("jamba", without=("mamba_dt_rank", "mamba_d_conv", "mamba_expand"))
    assert (found.ssm.dt_rank, found.ssm.d_conv, found.ssm.d_inner) == (2, 4, 64)
    assert hf("jamba", mamba_dt_rank="auto").ssm.dt_rank == 2
    assert hf("jamba", attn_layer_period=2, attn_layer_offset=0).ssm.layers == (1,)
    assert hf("jamba", attn_layer_offset=4, attn_layer_period=8).groups == ()
    assert hf("jamba", attn_layer_period=1, attn_layer_offset=0).recurrent is None
    bamba = hf("bamba", mamba_d_head="auto", attn_layer_indices=None)
    assert (bamba.ssm.layers, bamba.groups) == ((0, 1, 2), ())
    assert hf("bamba", attn_layer_indices=[2, 0, 2]).groups[0].layers == (0, 2)


def test_bamba_turns_half_a_head_unless_its_rules_say_otherwise():
    def n_rot(**change):
        return hf("bamba", **change).groups[0].rope.n_rot

    assert n_rot(rope_parameters=None, rope_theta=500.0) == 4
    assert n_rot(rope_parameters=dict(rope_type="default", partial_rotary_factor=1.0)) == 8
    assert n_rot(rope_parameters=None, partial_rotary_factor=0.5) == 4
    assert hf("bamba", rope_parameters=None, rope_theta=5.0).groups[0].rope.base == 5.0


def test_a_jamba_whose_expert_layers_are_none_of_its_layers_is_dense():
    dense = hf("jamba", num_experts=4, expert_layer_period=8, expert_layer_offset=7)
    assert dense == hf("jamba")


def test_a_jamba_has_experts_in_layers_of_a_period():
    found = hf("jamba", num_experts=None, num_experts_per_tok=None)
    wanted = Experts(layers=(1,), n_experts=16, n_used=2, n_ff=48, scoring="share")
    assert found.experts == wanted
    name = "blk.1.ffn_up_exps.weight"
    assert tensors.tensor_shape(found, name) == (16, 48, 32)
    called = tensors.tensors_of(found)[name].hf
    assert called[15] == "model.layers.1.feed_forward.experts.15.up_proj.weight"
    assert "blk.0.ffn_up.weight" in tensors.tensors_of(found)
    assert "blk.1.ffn_up.weight" not in tensors.tensors_of(found)


@pytest.mark.parametrize("limits", [None, [0.0, math.inf], [0, {"__float__": "Infinity"}]])
def test_no_limits_of_the_step_size_are_read_in_every_form(limits):
    assert hf("bamba", time_step_limit=limits) == hf("bamba")


def test_layers_without_kv_heads_are_recurrent_in_a_gguf():
    jamba = recurrent_gguf()
    assert (jamba.ssm.kind, jamba.ssm.layers, jamba.groups[0].layers) == ("mamba1", (0,), (1,))
    assert (jamba.ssm.norms, jamba.groups[0].rope, jamba.n_layers) == (True, None, 2)
    granite = recurrent_gguf("granitehybrid", rope__dimension_count=8)
    assert (granite.ssm.n_heads, granite.ssm.n_groups, granite.ssm.n_conv) == (8, 2, 192)
    rope = granite.groups[0].rope
    assert (rope.n_rot, rope.layout) == (8, "norm")
    assert recurrent_gguf("granitehybrid", rope__scaling__finetuned=False).groups[0].rope is None
    plain = recurrent_gguf("mamba2", attention__head_count=0, feed_forward_length=0)
    assert (plain.groups, plain.ssm.layers, plain.n_ff) == ((), (0, 1), 0)
    assert recurrent_gguf(attention__head_count_kv=2).recurrent is None
    kinds = recurrent_gguf(attention__head_count_kv=[1, 2]).groups
    assert [(g.layers, g.n_kv_heads) for g in kinds] == [((0,), 1), ((1,), 2)]
    assert recurrent_gguf(attention__head_count_kv=0).groups == ()


def test_granite_multipliers_of_zero_are_none():
    scales = dict(embedding_scale=0.0, residual_scale=0.0, logit_scale=0.0, attention__scale=0.0)
    assert recurrent_gguf("granitehybrid", **scales) == recurrent_gguf("granitehybrid")
    found = recurrent_gguf("granitehybrid", residual_scale=0.5, attention__scale=0.25)
    assert (found.residual_scale, found.groups[0].scale) == (0.5, 0.25)


@pytest.mark.parametrize(
    ("arch", "change", "words"),
    [
        ("jamba", dict(ssm__inner_size=None), "lacks 'jamba.ssm.inner_size'"),
        ("jamba", dict(ssm__conv_kernel=1), "'jamba.ssm.conv_kernel' is 1"),
        ("jamba", dict(ssm__state_size=1 << 30), "'jamba.ssm.state_size' is 1073741824"),
        ("jamba", dict(ssm__dt_b_c_rms=True), "'jamba.ssm.dt_b_c_rms' is True, which is not"),
        ("mamba", dict(ssm__dt_b_c_rms=True), "'mamba.ssm.dt_b_c_rms' is True, which is not"),
        ("mamba2", dict(ssm__group_count=3), "names 8 heads of Mamba-2 to be shared by 3"),
        ("mamba2", dict(ssm__time_step_rank=7), "names 128 channels of Mamba-2 to be shared by 7"),
        (
            "jamba",
            dict(attention__head_count_kv=[0, 2, 0]),
            "is a list of 3, a list of 2 whole numbers from 0",
        ),
        (
            "jamba",
            dict(attention__head_count_kv=[0, -2]),
            "is a list of 2, a list of 2 whole numbers from 0",
        ),
        ("jamba", dict(attention__head_count_kv=[0, 3]), "4 heads and 3 kv heads"),
        ("jamba", dict(attention__value_length=8), "'jamba.attention.value_length' is 8"),
        ("granitehybrid", dict(rope__scaling__type="yarn"), "rope.scaling.type' is 'yarn'"),
        ("granitehybrid", dict(rope__scaling__factor=4.0), "rope.scaling.factor' is 4.0"),
        ("granitehybrid", dict(rope__dimension_count=18), "n_rot 18 exceeds head_dim 16"),
        ("granitehybrid", dict(residual_scale=-1.0), "residual_scale' is -1.0"),
    ],
)
def test_gguf_metadata_of_recurrent_layers_is_refused_in_one_line(arch, change, words):
    refused(words, lambda: recurrent_gguf(arch, **change))


def test_layers_with_a_router_have_experts_in_a_gguf():
    router = {"blk.1.ffn_gate_inp.weight": Shaped((8, 64))}
    counts = dict(expert_count=8, expert_used_count=2, expert_shared_feed_forward_length=40)
    jamba = recurrent_gguf(tensors=router, **counts)
    assert (jamba.experts.layers, jamba.experts.scoring) == ((1,), "share")
    granite = recurrent_gguf("granitehybrid", tensors=router, **counts)
    assert (granite.experts.scoring, granite.experts.n_ff_shared) == ("softmax", 40)
    assert recurrent_gguf(**counts).experts is None
    refused("lacks 'jamba.expert_count'", lambda: recurrent_gguf(tensors=router))
    more = dict(expert_count=2, expert_used_count=3)
    refused("'jamba.expert_used_count' is 3", lambda: recurrent_gguf(tensors=router, **more))


def test_frequency_divisors_of_a_gguf_are_refused():
    divisors = {"rope_freqs.weight": Shaped((8,))}
    refused(
        "granitehybrid with divisors of RoPE's frequencies",
        lambda: recurrent_gguf("granitehybrid", tensors=divisors),
    )


def test_a_layer_has_the_tensors_of_its_kind_alone():
    names = tensors.tensors_of(hf("jamba"))
    own = [name for name in names if name.startswith(("blk.0.", "blk.1."))]
    assert {"blk.0.ssm_a", "blk.0.ffn_up.weight", "blk.1.attn_q.weight"} <= set(own)
    assert not [n for n in own if n.startswith("blk.0.attn_") and n != "blk.0.attn_norm.weight"]
    assert not [n for n in own if n.startswith("blk.1.ssm_")]
    plain = tensors.tensors_of(recurrent_gguf("mamba"))
    assert not [n for n in plain if "ffn" in n or "attn_q" in n]


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("jamba", dict(mamba_d_state=4), "mamba.x_proj.weight' has shape ("),
        ("jamba", dict(mamba_d_conv=3), "mamba.conv1d.weight' has shape (64, 1, 4), (64, 3)"),
        ("jamba", dict(attn_layer_offset=0), "lacks 16 of 46 tensors"),
        ("jamba", dict(mamba_conv_bias=False), "2 tensors in its layers that no jamba model here"),
        (
            "bamba",
            dict(mamba_n_heads=16, mamba_d_head=4),
            "mamba.in_proj.weight' has shape (168, 32), (176",
        ),
    ],
)
def test_a_folder_that_contradicts_its_weights_is_refused(tmp_path, name, change, words):
    copied = tmp_path / "model"
    shutil.copytree(GOLDEN / name, copied)
    config = json.loads((copied / "config.json").read_text()) | change
    (copied / "config.json").write_text(json.dumps(config))
    refused(words, lambda: load.load(copied))


def test_a_gguf_that_contradicts_its_tensors_is_refused_before_they_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(load.gguf, "read_gguf_tensor", None)
    model = tiny_recurrent.TinyRecurrent(arch="mamba2", n_groups=2)
    path = tiny_recurrent.write_gguf(tmp_path / "tiny.gguf", model)
    data, key = path.read_bytes(), b"mamba2.ssm.state_size"
    old, new = (key + (4).to_bytes(4, "little") + n.to_bytes(4, "little") for n in (16, 1 << 20))
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))
    refused("tensor 'blk.0.ssm_in.weight' has shape", lambda: load.load(path))
