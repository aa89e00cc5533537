"""A model by its header alone: the bytes of its weights before any is read."""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from kvrt.errors import BadModelFile, UnsupportedModel
from kvrt_models import load
from kvrt_models.gguf import file as gguf
from kvrt_models.hf import safetensors

sys.path.append(str(Path(__file__).parents[1] / "peer"))
import tiny_gguf
from tiny_recurrent import TinyRecurrent
from tiny_recurrent import write_gguf as write_recurrent

FOLDERS = sorted(p.parent for p in Path(__file__).parents[1].glob("golden/hf/*/config.json"))
QUICK = ("llama", "gemma3", "gpt-oss", "llama4", "jamba-experts", "bamba")
EACH = [
    pytest.param(f, id=f.name, marks=[] if f.name in QUICK else [pytest.mark.slow]) for f in FOLDERS
]


def taken(model: load.Model) -> int:
    """Bytes of the arrays that a runtime holds."""
    leaves = jax.tree.leaves(nnx.split(model.decoder)[1])
    return sum(x.nbytes for x in leaves)


@pytest.fixture
def nothing_read(monkeypatch):
    """Reading a weight fails, but for the one that belongs to the description."""

    def refused(file, name):
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(gguf, "read_gguf_tensor", refused)
    monkeypatch.setattr(safetensors, "read_folder_tensor", refused)


@pytest.mark.parametrize("folder", EACH)
def test_weights_of_folders(folder):
    for dtype in ("f32", "bf16"):
        assert load.describe_model(folder, dtype=dtype).n_bytes == taken(
            load.load(folder, dtype=dtype)
        )


def test_a_folder_is_described_without_its_weights(nothing_read):
    found = load.describe_model(FOLDERS[0])
    alone = load.describe_model(FOLDERS[0] / "config.json")
    assert (alone.name, alone.spec, alone.weights) == (found.name, found.spec, found.weights)


FILES = {
    "llama": (tiny_gguf.write_gguf, tiny_gguf.TinyModel(n_layers=2)),
    "mamba": (write_recurrent, TinyRecurrent(arch="mamba")),
    "jamba": (write_recurrent, TinyRecurrent(arch="jamba", attention=(1,), experts=(2,))),
    "granite": (write_recurrent, TinyRecurrent(arch="granitehybrid", attention=(1,), tied=True)),
}


@pytest.mark.parametrize(("write", "model"), FILES.values(), ids=FILES)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_weights_of_gguf_files(write, model, dtype, tmp_path):
    path = write(tmp_path / "tiny.gguf", model)
    found = load.describe_model(path, dtype=dtype)
    assert found.n_bytes == taken(load.load(path, dtype=dtype))
    # Without experts, whose files have them otherwise, nothing is lost or counted twice.
    tensors = gguf.open_gguf(path).tensors.values()
    assert found.n_params == sum(int(np.prod(t.shape)) for t in tensors)


def test_a_gguf_is_described_without_its_weights(tmp_path, nothing_read):
    path = tiny_gguf.write_gguf(tmp_path / "tiny.gguf", tiny_gguf.TinyModel(n_layers=1))
    found = load.describe_model(path)
    assert (found.name, found.spec.n_layers) == ("tiny", 1)


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("[]", BadModelFile, "config.json: holds no JSON object"),
        ("{", BadModelFile, "config.json: not JSON"),
        ('{"model_type": "zebra"}', UnsupportedModel, "'zebra'"),
        ('{"model_type": "llama"}', BadModelFile, "config.json: "),
    ],
)
def test_a_config_that_describes_nothing(text, error, words, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(error, match=words):
        load.describe_model(path)
