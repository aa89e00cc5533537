"""What a config.json says of Qwen3-Next, how its tensors are laid out, and what is refused."""

import json

import numpy as np
from headers import GOLDEN, hf

from kvrt import RecurrentSpec
from kvrt_models.hf.safetensors import open_hf_folder, read_folder_tensor
from kvrt_models.load import load
from kvrt_models.spec import Experts

NAME, MIXED = "qwen3-next", "qwen3-next-experts"


def test_sizes_of_a_config_json():
    found = hf(NAME)
    assert (found.ssm.kind, found.ssm.layers, found.groups[0].layers) == ("delta", (0, 2), (1,))
    assert (found.ssm.n_conv, found.attn_gate, found.groups[0].rope.n_rot) == (56, True, 4)
    assert found.recurrent == RecurrentSpec(layers=(0, 2), shapes=((3, 56), (4, 8, 6)))
    assert hf(NAME, layer_types=None).groups == ()
    assert hf(NAME, layer_types=None, full_attention_interval=2).ssm.layers == (0, 2)
    assert hf(NAME, layer_types=["full_attention"] * 3).recurrent is None
    plain = hf(NAME, rope_parameters=None, rope_theta=500.0).groups[0].rope
    assert (plain.n_rot, plain.base) == (4, 500.0)


def test_experts_are_where_a_period_and_a_list_put_them():
    wanted = dict(n_experts=4, n_used=2, n_ff=12, n_ff_shared=10, shared_gate=True)
    found = hf(MIXED)
    assert found.experts == Experts(layers=(0, 2, 3), scoring="softmax", **wanted)
    assert hf(MIXED, norm_topk_prob=False).experts.scoring == "share"
    assert hf(MIXED, decoder_sparse_step=2, mlp_only_layers=None).experts.layers == (1, 3)
    assert hf(MIXED, mlp_only_layers=[0, 1, 2, 3]).experts is None


def test_projections_are_in_the_order_of_the_convolution():
    mixer = load(GOLDEN / NAME).decoder.blocks[0].mixer
    folder = open_hf_folder(GOLDEN / NAME)
    stored = read_folder_tensor(folder, "model.layers.0.linear_attn.in_proj_qkvz.weight")
    # By key head: a query and a key of 8, values and gates of two heads of 6.
    by_key = stored.reshape(2, 8 + 8 + 12 + 12, -1)
    found = np.asarray(mixer.projection.weight[...])
    np.testing.assert_array_equal(found[8:16], by_key[1, :8])
    np.testing.assert_array_equal(found[16 + 16 + 12 : 16 + 16 + 24], by_key[1, 16:28])
    stored = read_folder_tensor(folder, "model.layers.0.linear_attn.in_proj_ba.weight")
    found = np.asarray(mixer.gates.weight[...])
    np.testing.assert_array_equal(found[[2, 3, 4, 5]], stored[[4, 5, 2, 3]])


def test_the_files_say_what_they_are():
    config = json.loads((GOLDEN / NAME / "config.json").read_text())
    assert config["model_type"] == hf(NAME).arch == "qwen3_next"
