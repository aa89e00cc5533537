"""What a config.json says of Gemma 3n's text model, what its layers share, and what is refused."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from headers import GOLDEN, hf, numbered_kinds

from kvrt_models.families.shared import registry
from kvrt_models.layers import tensors
from kvrt_models.layers.feed_forward import _above
from kvrt_models.spec import AltUp, LayerInputs

NAME = "gemma3n"


def test_sizes_of_a_config_json():
    found = hf(NAME)
    windowed, full = found.groups
    assert (windowed.layers, windowed.kv_of) == ((0, 2), ((3, 2), (4, 2)))
    assert (full.layers, full.kv_of, found.exit_layer, found.n_layers) == ((1,), ((5, 1),), 3, 6)
    assert (windowed.mask.size, windowed.rope.base, full.rope.base) == (8, 1e2, 1e3)
    assert {g.scale for g in found.groups} == {1.0}
    assert (found.altup, found.n_stream) == (AltUp(n_streams=3, active=0, scaled=True), 96)
    assert found.layer_inputs == LayerInputs(width=6, n_vocab=240)
    assert (found.laurel_rank, found.n_ff, found.logit_cap) == (5, 24, 30.0)


def as_published():
    """35 layers of small sizes, with all that transformers takes where a file says nothing."""
    names = json.loads((GOLDEN / NAME / "config.json").read_text())
    kept = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
    kept += ("num_key_value_heads", "max_position_embeddings")
    values = {k: names[k] for k in kept} | {"intermediate_size": 24, "num_hidden_layers": 35}
    return registry.spec_from_config(values)


def test_what_a_file_does_not_say_is_as_in_transformers():
    found = as_published()
    windowed, full = found.groups
    assert full.layers == (4, 9, 14, 19) and full.kv_of == ((24, 19), (29, 19), (34, 19))
    assert (windowed.mask.size, windowed.kv_of[0], windowed.head_dim) == (512, (20, 18), 256)
    assert (windowed.rope.base, full.rope.base) == (1e4, 1e6)
    assert found.altup == AltUp(n_streams=4, active=0, scaled=True)
    assert (found.laurel_rank, found.layer_inputs.width, found.logit_cap) == (64, 256, 30.0)
    assert found.ffn_cutoffs[9] == pytest.approx(1.6448536) and found.ffn_cutoffs[10] is None


def test_layers_of_one_kind_have_any_index():
    """Windowed and full ones: with many gates of zero, without, and those that read others."""
    wanted = [2 * i + is_full for i in (0, 0, 1, 1, 2, 2, 2) for is_full in (0, 0, 0, 0, 1)]
    assert numbered_kinds(as_published()) == wanted


def test_widths_may_differ_by_layer():
    assert hf(NAME, intermediate_size=[24] * 6) == hf(NAME)
    found = hf(NAME, intermediate_size=[24] * 5 + [48])
    assert (found.n_ff, found.n_ff_of(4), found.n_ff_of(5)) == (48, 24, 48)


def test_a_share_of_gates_is_zero():
    gates = jnp.asarray(np.random.default_rng(0).standard_normal((4, 4000)), jnp.float32)
    found = _above(gates, hf(NAME, activation_sparsity_pattern=0.8).ffn_cutoffs[0])
    np.testing.assert_allclose(np.mean(np.asarray(found) == 0.0, axis=1), 0.8, atol=0.02)


def test_a_reader_makes_queries_alone():
    found = hf(NAME)
    assert tensors.weight_parts(found)["blk.5.attn_qkv.weight"] == ("blk.5.attn_q.weight",)
