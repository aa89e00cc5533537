"""Files of other programs from rope="read": keys rotated as rope="write" would have stored them."""

import dataclasses
import io

import numpy as np
import pytest

from kvrt import CacheConfig, MaskSpec, Runtime, SelfExtend
from kvrt.errors import SessionMismatch
from kvrt.session.change import edit
from kvrt.session.interop import llama, mlx
from kvrt.session.interop.rotated_keys import with_rotated_keys
from tests.numpy_device.device import compiled
from tests.session.llama_bytes import written
from tests.toys import HybridLm, ToyLm

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("numpy_device")]

IDS = np.random.default_rng(3).integers(0, 32, 300).tolist()
# A rotated number is rounded to the type once more than in a cache that rotates before it writes.
ULPS = {"f32": 2e-6, "f16": 1.5e-3, "bf16": 1.2e-2, "q8_0": 5e-2}
YARN = {"scaling": "yarn", "factor": 4.0, "n_ctx_orig": 64, "layout": "norm"}


def toy(**rope):
    model = ToyLm(head_dim=32, masks=(MaskSpec(), MaskSpec(kind="window", size=24)))
    model.groups = tuple(
        dataclasses.replace(g, rope=dataclasses.replace(g.rope, **rope)) for g in model.groups
    )
    return model


def snapshot(model, rope, dtype="f32", n=300, **options):
    config = CacheConfig(
        n_ctx=512, block_size=32, n_ubatch=64, rope=rope, type_k=dtype, type_v=dtype, **options
    )
    at = Runtime(model, config)
    at.append(IDS[:n])
    return at.snapshot()


def keys(found, group):
    """Keys of a group by position, in float32."""
    wide = edit.convert(found, "f32", "f32")
    part = wide.groups[group]
    k = np.concatenate([np.asarray(b.k) for b in part.blocks], axis=1)
    return k[:, np.argsort(part.pos)]


@pytest.mark.parametrize(
    ("dtype", "rope"),
    [("f32", {}), ("f32", YARN), ("f16", YARN), ("bf16", {}), ("q8_0", YARN)],
    ids=lambda x: x if isinstance(x, str) else x.get("scaling", "plain"),
)
def test_keys_are_those_of_a_cache_that_rotates_them_when_written(dtype, rope):
    read, write = (snapshot(toy(**rope), x, dtype) for x in ("read", "write"))
    found = with_rotated_keys(read, toy(**rope).groups, "a file")
    assert found.fingerprint == write.fingerprint
    for g in (0, 1):
        a, b = keys(found, g), keys(write, g)
        worst = float(np.abs(a - b).max() / np.abs(b).max())
        assert worst <= ULPS[dtype], worst
        assert not np.allclose(keys(read, g), b, atol=0.1)
    assert with_rotated_keys(write, toy(**rope).groups, "a file") is write


def test_a_file_of_llama_cpp_is_that_of_the_other_frame(tmp_path):
    model, path = toy(layout="norm"), tmp_path / "x.bin"
    read, write = (snapshot(model, x, n=60) for x in ("read", "write"))
    path.write_bytes(written(read, model.groups, whole=False))
    assert len(path.read_bytes()) == len(written(write, model.groups, whole=False))
    found = llama.read(path, write.fingerprint, model.groups, arch="llama", n_vocab=64)
    assert np.abs(keys(found, 0) - keys(write, 0)).max() <= 1e-5
    at = Runtime(model, CacheConfig(n_ctx=512, block_size=32, n_ubatch=64))
    at.restore(found)
    logits = at.append([1, 2, 3])
    at.clear()
    at.restore(write)
    assert np.abs(np.asarray(logits) - np.asarray(at.append([1, 2, 3]))).max() < 1e-3
    with pytest.raises(SessionMismatch, match="use rope='write'"):
        llama.read(path, read.fingerprint, model.groups, arch="llama", n_vocab=64)


def test_a_prompt_cache_of_mlx_is_too(tmp_path):
    model, path = ToyLm(), tmp_path / "x.safetensors"
    read, write = (snapshot(model, x, n=50) for x in ("read", "write"))
    file = io.BytesIO()
    mlx.write(file, read, model.groups, arch="llama")
    path.write_bytes(file.getvalue())
    found = mlx.read(path, write.fingerprint, model.groups, arch="llama", n_vocab=64)
    assert np.abs(keys(found, 0) - keys(write, 0)).max() <= 1e-5


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@compiled()
def test_types_that_a_runtime_keeps_as_bits_are_written_and_read(tmp_path, dtype):
    model, path = toy(layout="norm"), tmp_path / "x.bin"
    held = snapshot(model, "write", dtype, n=20)
    path.write_bytes(written(held, model.groups, whole=False))
    found = llama.read(path, held.fingerprint, model.groups, arch="llama", n_vocab=64)
    config = CacheConfig(n_ctx=512, block_size=32, n_ubatch=64, type_k=dtype, type_v=dtype)
    logits = []
    for x in (held, found):
        at = Runtime(model, config)
        at.restore(x)
        logits.append(np.asarray(at.append([1, 2, 3])))
    assert np.array_equal(*logits)


def test_frames_that_no_other_program_has():
    extend = SelfExtend(ga_n=2, ga_w=8, kind="paper")
    for rope in ("read", "write"):
        held = snapshot(ToyLm(), rope, n=50, self_extend=extend)
        with pytest.raises(SessionMismatch, match="reads it at two"):
            with_rotated_keys(held, ToyLm().groups, "a file")
    hybrid = snapshot(HybridLm(), "read", n=50)
    assert with_rotated_keys(hybrid, HybridLm().groups, "a file").states is not None
