"""What a config.json says of Llama 4: chunks, layers without RoPE, experts, and clear refusals."""

import dataclasses
import json
import shutil

import jax
import numpy as np
from flax import nnx
from headers import GOLDEN, hf, refused
from safetensors.numpy import load_file, save_file

from kvrt.config import QueryTemperature
from kvrt_models import load

CHUNKED, FAR = "chunked_attention", "full_attention"


def llama4(**change):
    return hf("llama4", **change)


def kinds(found):
    """Layers by the size of their chunks, 0 for full ones, and whether they have RoPE."""
    return {(group.mask.size, group.rope is not None): group.layers for group in found.groups}


def test_layers_with_rope_are_chunked_and_the_others_full_and_warm():
    found = llama4()
    assert kinds(found) == {(12, True): (0, 1, 2), (0, False): (3,)}
    near, far = found.groups
    assert (near.mask.kind, near.rope.layout, near.temperature) == ("chunked", "norm", None)
    assert far.temperature == QueryTemperature(floor_scale=8.0, attn_scale=0.5)
    assert found.unit_qk_norm and not found.qk_norm
    experts = found.experts
    assert (experts.layers, experts.n_experts, experts.n_used) == ((1, 3), 4, 2)
    assert (experts.n_ff, experts.n_ff_shared, found.n_ff) == (12, 12, 20)
    assert (experts.scoring, experts.bias) == ("sigmoid", False)


def test_layers_are_as_the_lists_say():
    found = hf("llama4-listed")
    assert kinds(found) == {(12, True): (2,), (0, True): (1,), (12, False): (0,), (0, False): (3,)}
    assert (found.experts.layers, found.unit_qk_norm, found.tied) == ((0,), False, True)
    assert (found.qkv_bias, found.out_bias, found.ffn_bias) == (True, True, False)
    assert found.group_of(1).rope.scaling == "llama3"
    assert llama4(moe_layers=[]).experts is None


def test_what_config_json_leaves_out_is_what_transformers_takes():
    left = ("attention_chunk_size", "no_rope_layers", "layer_types", "moe_layers", "rms_norm_eps")
    left += ("attn_scale", "floor_scale", "attn_temperature_tuning", "head_dim", "use_qk_norm")
    left += ("interleave_moe_layer_step", "intermediate_size_mlp", "rope_parameters")
    found = hf("llama4", without=left)
    assert kinds(found) == {(8192, True): (0, 1, 2), (0, False): (3,)}
    assert found.groups[1].temperature == QueryTemperature(floor_scale=8192.0, attn_scale=0.1)
    assert (found.groups[0].rope.base, found.groups[0].head_dim) == (5e5, 128)
    assert (found.norm_eps, found.n_ff, found.unit_qk_norm) == (1e-5, 16384, True)
    assert found.experts.layers == (0, 1, 2, 3)
    lists = dict(no_rope_layers=None, layer_types=None)
    every = llama4(no_rope_layer_interval=2, **lists)
    assert kinds(every) == {(12, True): (0, 2), (0, False): (1, 3)}
    assert kinds(llama4(**lists | dict(no_rope_layers=[]))) == kinds(llama4())


def test_temperature_is_off_where_the_file_says_so():
    for off in (False, 0):
        assert llama4(attn_temperature_tuning=off).groups[1].temperature is None
    for on in (True, 4, None):
        assert llama4(attn_temperature_tuning=on).groups[1].temperature is not None


def wrapped(tmp_path, rename=lambda name: name, **outer):
    """The golden model as the text part of one that reads images as well."""
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN / "llama4", folder)
    text = json.loads((folder / "config.json").read_text())
    config = dict(model_type="llama4", text_config=text, vision_config={}) | outer
    (folder / "config.json").write_text(json.dumps(config))
    file = folder / "model.safetensors"
    found = {rename(f"language_model.{n}"): x for n, x in load_file(file).items()}
    vision = {"vision_model.class_embedding": np.zeros(4, np.float32)}
    save_file(found | vision, file)
    return folder


def test_the_text_part_of_a_model_that_reads_images(tmp_path):
    whole, text = load.load(wrapped(tmp_path)), load.load(GOLDEN / "llama4")
    assert dataclasses.replace(whole.spec, arch="llama4_text") == text.spec
    found, wanted = (jax.tree.leaves(nnx.state(m.decoder, nnx.Param)) for m in (whole, text))
    assert len(found) == len(wanted) > 30
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_text_part_that_is_another_or_quantised_is_refused(tmp_path):
    def named(**outer):
        return lambda: hf("llama4", without=("hidden_size",), model_type="llama4", **outer)

    refused("'model_type' is 'llama', which", named(text_config=dict(model_type="llama")))
    refused("'text_config' is 3, an object is wanted", named(text_config=3))
    refused("lacks 'num_hidden_layers'", named())
    inside = dict(quantization_config=dict(quant_method="fp8"))
    refused("quantized by 'fp8'", named(text_config=inside))

    def rename(name):
        return name.replace("layers.2.input_layernorm", "layers.2.other_norm")

    folder = wrapped(tmp_path, rename)
    refused(
        "lacks 1 of 45 tensors, the first 'language_model.model.layers.2.input_layernorm",
        lambda: load.load(folder),
    )
    file = folder / "model.safetensors"
    more = load_file(file)
    more["language_model.model.layers.2.input_layernorm.weight"] = np.ones(16, np.float32)
    save_file(more, file)
    refused("1 tensors in its layers that no llama4 model here uses", lambda: load.load(folder))
