"""Kimi-Linear: what a config.json says, how its tensors lie, and the tiny model in every cache."""

import functools

import numpy as np
import pytest
from headers import GOLDEN, hf, refused
from safetensors.numpy import load_file, save_file

from kvrt import CacheConfig, RecurrentSpec, Runtime, session
from kvrt.errors import CannotRewind
from kvrt.options.engine import EngineConfig
from kvrt.serving.engine import Engine
from kvrt.serving.request import Request
from kvrt_models.hf.safetensors import open_hf_folder, read_folder_tensor
from kvrt_models.layers import tensors
from kvrt_models.load import load

NAME = "kimi-linear"
TOLERANCE = 1e-4
KINDS = ("layer_types", "mlp_layer_types")


@functools.cache
def decoder():
    return load(GOLDEN / NAME).decoder


@functools.cache
def golden():
    with np.load(GOLDEN / NAME / "expected.npz") as data:
        return data["tokens"].tolist(), data["logits"]


def runtime(**change):
    sizes = {"n_ctx": 64, "block_size": 8, "n_ubatch": 8, "n_seq_max": 2}  # steps of one size
    return Runtime(decoder(), CacheConfig(**{**sizes, **change}))


def is_golden(found, expected):
    worst = float(np.abs(np.asarray(found) - expected).max())
    print(f"largest difference {worst:.1e}")
    return worst < TOLERANCE


def test_sizes_of_a_config_json():
    found = hf(NAME)
    (group,) = found.groups
    assert (found.ssm.kind, found.ssm.layers, group.layers) == ("kda", (0, 2), (1,))
    assert (group.rope, group.latent_rank, group.head_dim, group.scale) == (None, 16, 22, 0.25)
    assert found.recurrent == RecurrentSpec(layers=(0, 2), shapes=((3, 96), (4, 8, 8)))
    assert (found.experts.layers, found.experts.n_groups, found.experts.scale) == ((1, 2), 2, 2.5)
    assert (found.experts.scoring, found.experts.choice_bias) == ("sigmoid_share", True)
    assert hf(NAME, moe_renormalize=False).experts.scoring == "sigmoid_each"
    assert hf(NAME, mlp_layer_types=["dense"] * 3).experts is None
    assert hf(NAME, layer_types=["full_attention"] * 3).recurrent is None


def test_a_file_as_published_counts_layers_from_one():
    rules = {"full_attn_layers": [2], "kda_layers": [1, 3], "head_dim": 4, "num_heads": 6}
    rules["short_conv_kernel_size"] = 3
    found = hf(NAME, without=KINDS, linear_attn_config=rules, first_k_dense_replace=2)
    assert (found.ssm.layers, found.groups[0].layers, found.experts.layers) == ((0, 2), (1,), (2,))
    assert (found.ssm.n_heads, found.ssm.d_state, found.ssm.d_conv) == (6, 4, 3)
    usual = hf(NAME, without=KINDS, num_hidden_layers=9)
    assert (usual.groups[0].layers, usual.experts.layers) == ((4, 8), tuple(range(1, 9)))


@pytest.mark.parametrize(
    "lists",
    [
        {"full_attn_layers": [2], "kda_layers": [1]},
        {"full_attn_layers": [0], "kda_layers": [1, 2]},
        {"full_attn_layers": [2]},
        {"full_attn_layers": ["2"], "kda_layers": [1, 3]},
    ],
)
def test_lists_that_are_not_of_all_layers_are_refused(lists):
    words = "do not name each of 3 layers once, from 1 on"
    refused(words, lambda: hf(NAME, without=KINDS, linear_attn_config=lists))


def test_queries_keys_and_values_lie_one_below_the_other():
    mixer, folder = decoder().blocks[0].mixer, open_hf_folder(GOLDEN / NAME)
    for found, name in (
        (mixer.projection.weight, "{}_proj.weight"),
        (mixer.conv.weight, "{}_conv1d.weight"),
    ):
        for i, x in enumerate("qkv"):
            stored = read_folder_tensor(folder, f"model.layers.0.self_attn.{name.format(x)}")
            part = np.asarray(found[...])[32 * i : 32 * (i + 1)]
            np.testing.assert_array_equal(part, stored.reshape(part.shape))


def test_names_as_published_and_as_transformers_writes_them(tmp_path):
    """A network without experts is `mlp` in the published files."""
    called = tensors.tensors_of(hf(NAME))["blk.0.ffn_up.weight"].hf
    assert called == ["model.layers.0.mlp.up_proj.weight"]
    for path in (GOLDEN / NAME).glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    stored = load_file(GOLDEN / NAME / "model.safetensors")
    named = {k.replace("0.block_sparse_moe", "0.mlp"): x for k, x in stored.items()}
    assert named.keys() != stored.keys()
    save_file(named, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found, wanted = (x.blocks[0].ffn.gate_up.weight[...] for x in (_load(tmp_path), decoder()))
    np.testing.assert_array_equal(found, wanted)


def _load(folder):
    return load(folder).decoder


@pytest.mark.slow
def test_a_checkpoint_and_a_session_go_on_as_the_first_time(tmp_path):
    (tokens, expected), at = golden(), runtime(n_checkpoints=4, checkpoint_interval=16)
    at.append(tokens[:40])
    assert {16, 32} <= set(at.resume_positions().checkpoints)
    at.seq_rm(0, 32)
    session.save(tmp_path / "x.kv", at.snapshot())
    at.clear()
    at.restore(session.read(tmp_path / "x.kv"))
    assert is_golden(at.append(tokens[32:], out_ids=range(16)), expected[32:])
    at.seq_rm(0, 16)
    assert is_golden(at.append(tokens[16:24], out_ids=range(8)), expected[16:24])
    # Latents without positions could move (tests/runtime/test_latent_layers.py), states cannot.
    with pytest.raises(CannotRewind, match="one state of recurrent layers"):
        at.seq_add(0, 0, None, 9)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["paged", "cell"])
def test_an_engine_and_its_hits_are_those_of_transformers(mode):
    tokens, expected = golden()
    sizes = {"n_ctx": 256, "block_size": 8, "n_ubatch": 8, "n_seq_max": 2, "n_checkpoints": 4}
    engine = Engine(decoder(), CacheConfig(**sizes), EngineConfig(mode=mode))
    for name, n in (("a", 40), ("b", 48)):
        engine.add_request(Request(id=name, tokens=tuple(tokens[:n]), n_predict=1))
        outs = []
        while engine.has_work:
            outs += engine.step()
        assert [out.error for out in outs] == [None] * len(outs)
        assert is_golden(engine.logits(name), expected[n - 1])
    assert outs[-1].n_cached >= 32
