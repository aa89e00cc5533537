"""What a config.json says of gpt-oss: sinks, experts, windows, YaRN, and clear refusals."""

import json
import shutil

import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants
from headers import GOLDEN, gguf, hf, like, refused
from safetensors.numpy import load_file, save_file

from kvrt_models import load
from kvrt_models.layers import tensors
from kvrt_models.spec import Clamped
from tests.peer import tiny_gguf

NEAR, FAR = "sliding_attention", "full_attention"


def gpt_oss(**change):
    return hf("gpt-oss", **change)


def kinds(found):
    """Layers by the size of their window, 0 for full ones."""
    return {group.mask.size: group.layers for group in found.groups}


def test_what_gpt_oss_adds_to_a_decoder():
    found = gpt_oss()
    assert kinds(found) == {8: (0,), 0: (1,)} and found.attn_sinks
    assert (found.qkv_bias, found.out_bias, found.ffn_bias, found.tied) == (
        True,
        True,
        False,
        False,
    )
    experts = found.experts
    assert (experts.layers, experts.n_experts, experts.n_used, experts.n_ff) == ((0, 1), 5, 2, 16)
    assert (experts.scoring, experts.bias, experts.n_ff_shared) == ("softmax", True, 0)
    assert found.activation == Clamped(alpha=1.702, limit=0.75)
    rope = found.groups[0].rope
    assert (rope.scaling, rope.factor, rope.truncate, rope.n_ctx_orig) == ("yarn", 8.0, False, 64)
    assert kinds(gpt_oss(layer_types=[FAR, FAR], sliding_window=None)) == {0: (0, 1)}


def test_what_config_json_leaves_out_is_what_transformers_takes():
    left = ("swiglu_alpha", "swiglu_limit", "sliding_window", "layer_types", "attention_bias")
    found = hf("gpt-oss", without=(*left, "head_dim", "rope_parameters"))
    assert found.activation == Clamped(alpha=1.702, limit=7.0)
    assert kinds(found) == {128: (0,), 0: (1,)}
    assert (found.qkv_bias, found.groups[0].head_dim) == (True, 64)
    rope = found.groups[0].rope
    assert (rope.base, rope.factor, rope.truncate, rope.n_ctx_orig) == (15e4, 32.0, False, 4096)
    plain = gpt_oss(rope_parameters=dict(rope_type="default"))
    assert (plain.groups[0].rope.scaling, plain.groups[0].rope.base) == ("none", 15e4)
    assert not gpt_oss(attention_bias=False).out_bias


def test_a_gguf_says_what_config_json_does():
    found = like("gpt-oss", rope__freq_base=15e4)
    assert kinds(found) == {32: (0, 2), 0: (1,)} and found.attn_sinks
    assert (found.qkv_bias, found.out_bias, found.activation) == (
        True,
        True,
        Clamped(alpha=1.702, limit=7.0),
    )
    experts = found.experts
    assert (experts.layers, experts.n_experts, experts.n_used, experts.n_ff) == (
        (0, 1, 2),
        4,
        2,
        48,
    )
    assert {(g.rope.base, g.rope.truncate, g.rope.layout) for g in found.groups} == {
        (15e4, True, "neox")
    }
    for name, row in tensors.tensors_of(found).items():
        assert row.gguf == name.replace(".ffn_norm.", ".post_attention_norm.")
    name = "blk.1.ffn_norm.weight"
    assert tensors.tensors_of(gguf())[name].gguf == name


def test_experts_of_a_gguf_may_be_mxfp4(tmp_path, monkeypatch):
    kind, model = GGMLQuantizationType.MXFP4, tiny_gguf.TinyModel(arch="gpt-oss")
    add = GGUFWriter.add_tensor

    def packed(self, name, weight):
        raw = quants.quantize(weight, kind) if "_exps.weight" in name else None
        add(self, name, weight) if raw is None else add(self, name, raw, raw_dtype=kind)

    monkeypatch.setattr(GGUFWriter, "add_tensor", packed)
    block = load.load(tiny_gguf.write_gguf(tmp_path / "tiny.gguf", model)).decoder.blocks[1]
    weight = tiny_gguf.weights(model)["model.layers.1.mlp.experts.up.weight"]
    rounded = quants.dequantize(quants.quantize(weight, kind), kind)
    np.testing.assert_array_equal(block.ffn.up.weight[...], rounded)
    assert np.abs(rounded - weight).max() > 1e-3
    norm = tiny_gguf.weights(model)["model.layers.1.post_attention_layernorm.weight"]
    np.testing.assert_array_equal(block.ffn_norm[...], norm)


def changed(tmp_path, change):
    """The golden folder with other tensors."""
    copied = tmp_path / "model"
    shutil.copytree(GOLDEN / "gpt-oss", copied)
    file = copied / "model.safetensors"
    save_file(change(load_file(file)), file)
    return copied


def test_experts_of_another_shape_are_refused(tmp_path):
    name = "model.layers.1.mlp.experts.gate_up_proj"

    def odd(found):
        return found | {name: np.ascontiguousarray(found[name][..., :-1])}

    folder = changed(tmp_path, odd)
    refused(f"'{name}' has shape (5, 32, 31)", lambda: load.load(folder))


def test_experts_in_a_form_of_their_own_are_refused(tmp_path):
    def packed(found):
        names = [n for n in found if n.endswith(".experts.down_proj")]
        return {f"{n}_blocks" if n in names else n: x for n, x in found.items()}

    folder = changed(tmp_path, packed)
    refused(
        "lacks 2 of 37 tensors, the first 'model.layers.0.mlp.experts.down_proj'",
        lambda: load.load(folder),
    )


def test_bfloat16_rounds_matrices_but_no_router_bias_or_sink(tmp_path):
    config = json.loads((GOLDEN / "gpt-oss" / "config.json").read_text())
    model = load.load(GOLDEN / "gpt-oss", dtype="bf16")
    block = model.decoder.blocks[0]
    halves = (block.qkv.weight, block.ffn.gate.weight, block.ffn.down.weight)
    assert all(x[...].dtype == ml_dtypes.bfloat16 for x in halves)
    wide = (block.sinks, block.ffn.router.weight, block.ffn.gate.bias, block.ffn.router.bias)
    assert all(x[...].dtype == np.float32 for x in wide)
    assert block.sinks[...].shape == (config["num_attention_heads"],)
