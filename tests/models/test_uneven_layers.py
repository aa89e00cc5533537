"""Layers of a GGUF that differ in heads and widths, as its lists say."""

import gguf as writers
import numpy as np
import pytest
from headers import TENSORS, gguf, metadata

from kvrt import CacheConfig, Runtime
from kvrt_models import load
from kvrt_models.families.shared.registry import spec_from_gguf
from kvrt_models.identity import description
from kvrt_models.layers.tensors import tensor_shape, tensors_of
from tests.peer import tiny_gguf

UNEVEN = {
    "attention.head_count": np.array([4, 2, 2], "u4"),
    "attention.head_count_kv": np.array([2, 1, 2], "u4"),
    "feed_forward_length": np.array([96, 48, 64], "u4"),
    "attention.key_length": 16,
    "block_count": 3,
}


def test_lists_of_one_value_are_that_value():
    same = {key: np.full(2, n, "u4") for key, n in (("head_count", 4), ("head_count_kv", 2))}
    keys = {f"attention.{key}": x for key, x in same.items()}
    assert gguf(feed_forward_length=np.full(2, 96, "u4"), **keys) == gguf()


def test_layers_are_grouped_by_their_kv_heads():
    found = gguf(**UNEVEN)
    assert [(g.layers, g.n_kv_heads) for g in found.groups] == [((0, 2), 2), ((1,), 1)]
    assert (found.n_heads, found.n_ff) == (4, 96)
    shapes = {name: tensor_shape(found, f"blk.{name}.weight") for name in ("1.attn_q", "2.ffn_up")}
    assert shapes == {"1.attn_q": (32, 64), "2.ffn_up": (64, 64)}
    # Sessions of models whose layers are alike keep their identity.
    assert not {"layer_heads", "layer_ff"} & description(gguf()).keys()
    assert {"layer_heads", "layer_ff"} < description(found).keys()


def write(path, keys, tensors):
    """A file of tensors, with the header of `metadata`."""
    writer = writers.GGUFWriter(path, "llama")
    for key, value in metadata(**keys).items():
        if isinstance(value, np.ndarray):
            writer.add_array(key, value.tolist())
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif key != "general.architecture":
            writer.add_uint32(key, value)
    tiny_gguf.add_tokenizer(writer)
    for name, x in tensors.items():
        writer.add_tensor(name, x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.slow
def test_they_give_what_layers_filled_with_zeros_give(tmp_path):
    rng = np.random.default_rng(0)
    uneven = spec_from_gguf(metadata(**UNEVEN), TENSORS)
    even_keys = UNEVEN | {key: int(x.max()) for key, x in UNEVEN.items() if np.ndim(x)}
    even = spec_from_gguf(metadata(**even_keys), TENSORS)
    narrow, wide = {}, {}
    for name in tensors_of(uneven):
        shape = tensor_shape(uneven, name)
        x = rng.normal(1.0 if len(shape) == 1 else 0.0, 0.2, shape).astype(np.float32)
        narrow[name] = x
        pads = [(0, n - m) for n, m in zip(tensor_shape(even, name), shape, strict=True)]
        # The third layer has two query heads, each of a kv head of its own, in the wide one two.
        if name.startswith("blk.2.attn_q") or name.startswith("blk.2.attn_output"):
            axis = 0 if "attn_q" in name else 1
            x = np.concatenate([_with_zeros(half, axis) for half in np.split(x, 2, axis)], axis)
            pads = [(0, 0)] * 2
        wide[name] = np.pad(x, pads)
    logits = []
    for keys, tensors in ((UNEVEN, narrow), (even_keys, wide)):
        path = write(tmp_path / f"{len(logits)}.gguf", keys, tensors)
        runtime = Runtime(load.load(path).decoder, CacheConfig(n_ctx=64, n_ubatch=8))
        tokens = list(range(5, 25))
        logits.append(np.stack([runtime.prefill(tokens), runtime.decode({0: 7})[0]]))
    np.testing.assert_allclose(logits[0], logits[1], atol=2e-5)


def _with_zeros(x, axis):
    return np.concatenate([x, np.zeros_like(x)], axis)
