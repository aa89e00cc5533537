"""What headers say: RoPE rules as transformers and llama.cpp read them, and clear refusals."""

import json
import math
import shutil

import numpy as np
import pytest
from headers import GOLDEN, TENSORS, Shaped, gguf, hf, metadata, refused
from safetensors.numpy import load_file, save_file

from kvrt.errors import BadModelFile
from kvrt.store import rope
from kvrt_models import load
from kvrt_models.families.shared import registry
from kvrt_models.gguf.departures import departures
from kvrt_models.layers import tensors
from kvrt_models.weights.int8_weights import Watch
from tests.peer import tiny_gguf


def hf_rope(top=None, **rules):
    return hf(rope_parameters=rules, **(top or {})).groups[0].rope


def gguf_rope(**change):
    rules = {f"rope__scaling__{key}": value for key, value in change.items()}
    return gguf(**rules).groups[0].rope


YARN = dict(rope_type="yarn", rope_theta=10000.0, original_max_position_embeddings=16)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LONGROPE = dict(rope_type="longrope", short_factor=[1.0] * 8, long_factor=[2.0] * 8)


def test_yarn_without_a_factor_takes_the_ratio_of_the_lengths():
    found = hf_rope(**YARN)  # the golden llama has 64 positions
    assert (found.factor, found.n_ctx_orig) == (4.0, 16)
    assert found == hf_rope(**YARN, factor=None)
    assert rope.magnitude(found, 64) == 0.1 * math.log(4.0) + 1.0


def test_mscale_pairs_set_the_magnitude_of_yarn():
    both = hf_rope(**YARN, factor=8.0, mscale=0.707, mscale_all_dim=1.5)
    low, high = (0.1 * m * math.log(8.0) + 1.0 for m in (0.707, 1.5))
    assert rope.magnitude(both, 64) == pytest.approx(low / high, rel=1e-12)
    # One alone, or a zero, counts for nothing; attention_factor wins over both.
    for keys in (dict(mscale=0.7), dict(mscale_all_dim=0.7), dict(mscale=0.7, mscale_all_dim=0)):
        plain = hf_rope(**YARN, factor=8.0, **keys)
        assert rope.magnitude(plain, 64) == 0.1 * math.log(8.0) + 1.0
    given = hf_rope(**YARN, mscale=0.7, mscale_all_dim=1.5, attention_factor=1.25)
    assert given.magnitude == 1.25


def test_the_ramp_of_yarn_is_truncated_unless_the_file_says_no():
    assert hf_rope(**YARN, truncate=True) == hf_rope(**YARN)
    assert (hf_rope(**YARN).truncate, hf_rope(**YARN, truncate=False).truncate) == (True, False)


@pytest.mark.parametrize("rules", [YARN, LLAMA3, LONGROPE], ids=lambda r: r["rope_type"])
def test_the_original_length_beside_the_rules_wins(rules):
    rules = rules | dict(original_max_position_embeddings=16)
    assert hf_rope(**rules).n_ctx_orig == 16
    assert hf_rope(dict(original_max_position_embeddings=32), **rules).n_ctx_orig == 32
    rules.pop("original_max_position_embeddings")
    assert hf_rope(**rules).n_ctx_orig == 64


def test_longrope_takes_its_own_factor_or_the_ratio():
    top = dict(original_max_position_embeddings=16)
    assert hf_rope(top, **LONGROPE).factor == 4.0
    assert hf_rope(top, **LONGROPE, factor=3.0).factor == 3.0
    with pytest.raises(BadModelFile, match="'long_factor' is a list of 7, a list of 8 numbers"):
        hf_rope(**LONGROPE | dict(long_factor=[2.0] * 7))


def test_dynamic_stretches_from_the_length_of_the_model():
    rules = dict(rope_type="dynamic", factor=4.0, original_max_position_embeddings=16)
    found = hf_rope(dict(original_max_position_embeddings=32), **rules)
    assert (found.n_ctx_orig, found.factor) == (64, 4.0)


def test_rope_scaling_wins_over_rope_parameters():
    old = dict(rope_scaling=dict(type="linear", factor=2.0), rope_theta=500.0)
    found = hf(rope_parameters=dict(rope_type="default", rope_theta=7.0), **old).groups[0].rope
    assert (found.scaling, found.factor, found.base) == ("linear", 2.0, 500.0)
    assert hf(rope_scaling={}, rope_theta=500.0, rope_parameters={}).groups[0].rope.base == 500.0


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        (dict(rope_type="linear"), "lacks 'factor'"),
        (dict(rope_type="dynamic"), "lacks 'factor'"),
        (LLAMA3 | dict(high_freq_factor=None), "lacks 'high_freq_factor'"),
        (LLAMA3 | dict(low_freq_factor=4.0), "low_freq_factor 4.0 must be below 4.0"),
        (YARN | dict(factor="8"), "'factor' is '8', a finite number above 0 is wanted"),
        (YARN | dict(factor=math.nan), "'factor' is nan"),
        (YARN | dict(factor=10**400), "'factor' is an integer of more than 30 digits"),
        (YARN | dict(beta_fast=1.0, beta_slow=2.0), "beta_fast not below beta_slow"),
        (YARN | dict(rope_theta=1.0), "the base must be above 1"),
        (YARN | dict(truncate=0), "'truncate' is 0, true or false is wanted"),
        (dict(rope_type=3), "'rope_type' is 3, a string is wanted"),
        (dict(rope_type="spiral"), "RoPE scaling 'spiral' of llama is not supported"),
        (dict(rope_type="default", partial_rotary_factor=0.5), "'partial_rotary_factor' is 0.5"),
        (dict(rope_type="default", mrope_section=[2, 3, 3]), "'mrope_section' is a list of 3"),
        (dict(full_attention=dict(rope_type="default")), "differs by kind of layer"),
    ],
)
def test_rope_rules_of_config_json_are_refused_in_one_line(rules, words):
    refused(words, lambda: hf_rope(**rules))


def test_biases_are_those_of_the_family():
    found = hf(attention_bias=True, mlp_bias=True)
    assert (found.qkv_bias, found.out_bias, found.ffn_bias) == (True, True, True)
    names = tensors.tensors_of(found)
    assert {"blk.1.attn_output.bias", "blk.0.ffn_down.bias", "blk.1.ffn_up.bias"} <= set(names)
    assert tensors.tensor_shape(found, "blk.0.ffn_up.bias") == (found.n_ff,)
    qwen2 = hf("qwen2", attention_bias=True)
    assert (qwen2.qkv_bias, qwen2.out_bias, qwen2.ffn_bias) == (True, False, False)


@pytest.mark.parametrize(
    ("arch", "key"), [("mistral", "attention_bias"), ("mistral", "mlp_bias"), ("qwen3", "mlp_bias")]
)
def test_biases_that_a_family_does_not_have_are_refused(arch, key):
    refused(f"'{key}' is True, which is not supported", lambda: hf(arch, **{key: True}))


def test_sizes_left_out_are_those_of_the_family():
    assert hf(without=("head_dim",)).groups[0].head_dim == 8
    assert hf(without=("num_key_value_heads",)).groups[0].n_kv_heads == 4
    assert hf("qwen2", num_key_value_heads=None).groups[0].n_kv_heads == 4
    assert hf(head_dim=24).groups[0].head_dim == 24
    assert hf(rms_norm_eps=0.25).norm_eps == 0.25
    assert hf(without=("rms_norm_eps",)).norm_eps == 1e-6
    assert (hf(tie_word_embeddings=True).tied, hf().tied) == (True, False)
    refused("lacks 'num_key_value_heads'", lambda: hf("qwen3", without=("num_key_value_heads",)))


def test_mistral_has_the_window_that_transformers_gives_it():
    assert hf("mistral", sliding_window=16).groups[0].mask.size == 16
    assert hf("mistral", sliding_window=None).groups[0].mask.kind == "full"
    assert hf("mistral", without=("sliding_window",)).groups[0].mask.size == 4096
    assert hf("llama", sliding_window=16).groups[0].mask.kind == "full"
    mixed = ["full_attention", "sliding_attention"]
    refused("differ by layer", lambda: hf("mistral", sliding_window=16, layer_types=mixed))
    refused("'sliding_window' is 0, a whole", lambda: hf("mistral", sliding_window=0))


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_qwen_windows_are_refused_where_they_have_an_effect(arch):
    on = dict(use_sliding_window=True, sliding_window=16, layer_types=None)
    for change in (
        dict(use_sliding_window=False, sliding_window=16),
        on | dict(sliding_window=None),
        on | dict(max_window_layers=2),
    ):
        assert hf(arch, **change).groups[0].mask.kind == "full"
    refused("sliding window that differ by layer", lambda: hf(arch, **on, max_window_layers=1))
    kinds = ["full_attention", "sliding_attention"]
    refused("differ by layer", lambda: hf(arch, layer_types=kinds))


def test_gguf_scaling_without_a_type_is_linear_as_in_llama_cpp():
    assert (gguf_rope(factor=4.0).scaling, gguf_rope(factor=4.0).factor) == ("linear", 4.0)
    assert gguf(rope__scale_linear=2.0).groups[0].rope.factor == 2.0
    off = gguf_rope(type="none", factor=4.0)
    assert (off.scaling, off.factor) == ("none", 1.0)


def test_gguf_yarn_keys_are_honoured():
    found = gguf_rope(
        type="yarn",
        factor=4.0,
        original_context_length=128,
        yarn_beta_fast=16.0,
        yarn_beta_slow=2.0,
        attn_factor=1.5,
        yarn_ext_factor=1.0,
    )
    assert (found.beta_fast, found.beta_slow, found.n_ctx_orig) == (16.0, 2.0, 128)
    assert rope.magnitude(found, 512) == pytest.approx(1.5 * (0.1 * math.log(4.0) + 1.0))
    assert gguf_rope(type="yarn", factor=4.0).n_ctx_orig == 512
    assert gguf_rope(type="linear", factor=4.0, attn_factor=1.5).magnitude == 1.5


IGNORED = "is not used, as in llama.cpp"


@pytest.mark.parametrize(
    ("arch", "change", "lines"),
    [
        ("llama", {}, []),
        ("llama", dict(rope__scaling__yarn_beta_fast=8.0), []),  # there is no YaRN
        ("llama", dict(rope__scaling__type="yarn", rope__scaling__yarn_beta_fast=32), []),
        (
            "llama",
            dict(rope__scaling__type="yarn", rope__scaling__yarn_beta_fast=8.0),
            ["'llama.rope.scaling.yarn_beta_fast' is 8 and is used; llama.cpp takes 32, so its"],
        ),
        (
            "llama",
            dict(attention__sliding_window=32),
            ["is 32 and is used; llama.cpp attends"],
        ),
        ("qwen2", dict(attention__sliding_window=32), [f"is 32 and {IGNORED}"]),
        ("qwen2", dict(attention__sliding_window=512), []),
        (
            "qwen3",
            dict(rope__scaling__yarn_ext_factor=0.5, rope__scaling__yarn_attn_factor=2.0),
            [f"yarn_ext_factor' is 0.5 and {IGNORED}", f"yarn_attn_factor' is 2.0 and {IGNORED}"],
        ),
        ("llama", dict(rope__scaling__yarn_log_multiplier=0.1), [f"is 0.1 and {IGNORED}"]),
        ("llama", dict(rope__scaling__alpha=1000.0), [f"is 1000.0 and {IGNORED}"]),
        ("llama", dict(rope__scaling__alpha=np.ones(2)), [f"is a list of 2 and {IGNORED}"]),
    ],
)
def test_keys_that_llama_cpp_reads_otherwise_are_told(arch, change, lines):
    gguf(arch, **change)
    told = departures(metadata(arch, **change))
    assert len(told) == len(lines)
    assert all(part in line for part, line in zip(lines, told, strict=True))


def test_experts_of_a_llama_are_a_mixture_in_every_layer():
    """As of Mixtral, which goes by that name."""
    of = gguf(expert_count=8, expert_used_count=2).experts
    assert (of.layers, of.n_experts, of.n_used, of.n_ff) == ((0, 1), 8, 2, 96)
    assert (of.scoring, of.n_ff_shared, of.bias) == ("softmax", 0, False)
    refused("qwen2.expert_count' is 8, which is not", lambda: gguf("qwen2", expert_count=8))


def test_loading_tells_of_such_keys(tmp_path, monkeypatch):
    header = tiny_gguf._add_header
    monkeypatch.setattr(
        tiny_gguf, "_add_header", lambda w, model: (header(w, model), w.add_sliding_window(8))
    )
    path = tiny_gguf.write_gguf(tmp_path / "tiny.gguf", tiny_gguf.TinyModel(n_layers=1))
    lines = []
    load.open_model(path, on_host=True, watch=Watch(tell=lines.append)).weights.wait()
    (line,) = lines
    assert line.startswith("tiny: 'llama.attention.sliding_window' is 8 and is used; llama.cpp")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(type="longrope"), "RoPE scaling 'longrope' of this GGUF is not supported"),
        (dict(factor="4"), "'llama.rope.scaling.factor' is '4', a finite number"),
        (dict(factor=-1.0), "'llama.rope.scaling.factor' is -1.0"),
        (dict(type=7), "'llama.rope.scaling.type' is 7, a string is wanted"),
    ],
)
def test_gguf_scaling_is_refused_in_one_line(change, words):
    refused(words, lambda: gguf_rope(**change))


def test_longrope_tensors_of_a_gguf_are_refused():
    tensors = {"rope_factors_long.weight": Shaped((8,))}
    refused("LongRoPE (tensor 'rope_factors_long.weight')", lambda: gguf(tensors=tensors))


def test_frequency_divisors_must_fit():
    tensors = {"rope_freqs.weight": Shaped((8,))}
    found = registry.with_freq_factors(gguf(tensors=tensors), (2.0,) * 8)
    assert found.groups[0].rope.freq_factors == (2.0,) * 8
    wide = {"rope_freqs.weight": Shaped((1 << 40,))}
    refused("has shape (1099511627776,), (8,) is wanted", lambda: gguf(tensors=wide))
    refused("finite numbers above 0", lambda: registry.with_freq_factors(gguf(), (0.0,) * 8))
    refused("does not fit", lambda: registry.with_freq_factors(gguf(), (2.0,) * 3))


def test_gguf_without_or_with_another_architecture():
    refused("architecture 'rwkv7' of this GGUF is not supported", lambda: gguf("rwkv7"))
    refused("lacks 'general.architecture'", lambda: registry.spec_from_gguf({}, TENSORS))
    refused("'token_embd.weight' is missing", lambda: registry.spec_from_gguf(metadata(), {}))


def test_gguf_biases_windows_and_head_sizes_are_read():
    biased = {f"blk.0.{name}.bias": Shaped((96,)) for name in ("attn_q", "ffn_gate")}
    found = gguf(tensors=biased, attention__key_length=24, attention__sliding_window=32)
    assert (found.qkv_bias, found.out_bias, found.ffn_bias, found.tied) == (
        True,
        False,
        True,
        False,
    )
    assert (found.groups[0].head_dim, found.groups[0].mask.size) == (24, 32)
    assert gguf("qwen2", attention__sliding_window=512).groups[0].mask.kind == "full"
    assert gguf("qwen2", attention__sliding_window=32).groups[0].mask.kind == "full"
    assert gguf("qwen3", rope__dimension_count=8).groups[0].rope.n_rot == 8


def folder(tmp_path, **change):
    """The golden llama with another config.json."""
    copied = tmp_path / "model"
    shutil.copytree(GOLDEN / "llama", copied)
    config = json.loads((copied / "config.json").read_text()) | change
    (copied / "config.json").write_text(json.dumps(config))
    return copied


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(hidden_size="32"), "config.json: the model's header is damaged: 'hidden_size'"),
        (dict(mlp_bias=True), "lacks 6 of 27 tensors, the first 'model.layers.0.mlp.down_pr"),
        (dict(num_hidden_layers=1), "9 tensors in its layers that no llama model here uses"),
        (dict(head_dim=32), "layers.0.self_attn.q_proj.weight' has shape (64, 32), (128, 32)"),
        (dict(vocab_size=255), "the tokenizer has 256 tokens, the embedding 255"),
    ],
)
def test_a_folder_that_contradicts_its_weights_is_refused(tmp_path, change, words):
    refused(words, lambda: load.load(folder(tmp_path, **change)))


def renamed(tmp_path, before, after):
    """The golden llama whose tensors are called otherwise."""
    copied = folder(tmp_path)
    file = copied / "model.safetensors"
    found = load_file(file)
    begins = {n: n.startswith(before) for n in found}
    save_file({after + n.removeprefix(before) if begins[n] else n: found[n] for n in found}, file)
    return copied


@pytest.mark.parametrize(
    ("before", "after"),
    [("model.", ""), ("", "language_model."), ("model.", "model.language_model.")],
)
def test_a_part_of_a_model_is_read_by_its_names(tmp_path, before, after):
    path = renamed(tmp_path, before, after)
    _, source, _ = load._folder(path)
    found, names = source.spec, source.called
    assert names["token_embd.weight"] == [f"{after}{'' if before else 'model.'}embed_tokens.weight"]
    assert found == hf() and {x for parts in names.values() for x in parts} <= set(source.stored)
    more = path / "model.safetensors"
    layer = names["blk.0.attn_norm.weight"][0].replace("input_layernorm", "third_norm")
    save_file(load_file(more) | {layer: np.ones(32, np.float32)}, more)
    refused(f"the first '{layer}'", lambda: load.describe_model(path))


def test_a_folder_of_other_names_is_told_with_them(tmp_path):
    words = (
        "lacks 21 of 21 tensors, the first 'lm_head.weight'; its own are called like 'base.lm_he"
    )
    refused(words, lambda: load.describe_model(renamed(tmp_path, "", "base.")))


def test_a_gguf_that_contradicts_its_tensors_is_refused_before_they_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(load.gguf, "read_gguf_tensor", None)
    path = tiny_gguf.write_gguf(tmp_path / "tiny.gguf", tiny_gguf.TinyModel())
    data = path.read_bytes()

    def changed(old, new):
        assert data.count(old) == 1
        path.write_bytes(data.replace(old, new))
        return lambda: load.load(path)

    def u32(key, value):
        return key + (4).to_bytes(4, "little") + value.to_bytes(4, "little")

    key, ff = b"llama.attention.key_length", b"llama.feed_forward_length"
    refused("'llama.attention.value_length' is 32", changed(u32(key, 32), u32(key, 64)))
    refused("has shape (96, 64), (1073741824, 64) wanted", changed(u32(ff, 96), u32(ff, 1 << 30)))
    gone = changed(b"blk.1.attn_k.weight", b"blk.1.attn_z.weight")
    refused("lacks 1 of 21 tensors, the first 'blk.1.attn_k.weight'", gone)
