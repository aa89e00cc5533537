"""Whole generations through the kernels, interpreted; and who is refused a kernel."""

import dataclasses
import functools
import re

import jax
import pytest
from engines import ask, make, run

from kvrt import CacheConfig, Runtime
from kvrt.attention import registry, xla
from kvrt.attention.choice import decide, verdicts
from kvrt.attention.registry import require
from tests.interpreted import GPU, TPU
from tests.toys import ToyLm

OPTIMISED = False  # toys: what is compiled runs a few times
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
HERE = jax.default_backend()


@functools.cache
def generated(attention):
    config = CacheConfig(n_ctx=40, block_size=64, n_ubatch=8, attention=attention)
    runtime = Runtime(ToyLm(n_layers=1), config)
    runtime.append(PROMPT)
    return list(runtime.generate(28))


@pytest.mark.slow
def test_requests_in_company_get_the_same_tokens():
    asked = [ask(i, range(2 + i, 9 + 3 * i), n_predict=5) for i in range(2)]
    sizes = dict(n_ctx=64, n_ubatch=8)
    found, wanted = (run(make(attention=name, **sizes), asked)[0] for name in (GPU, "chunked"))
    assert found == wanted


@pytest.fixture
def kernels(monkeypatch, tmp_path):
    """Makes this a platform with these kernels, whose verdicts lie in a folder; starts anew."""

    def make(*names):
        monkeypatch.setattr(registry, "_PLATFORMS", dict.fromkeys(names, (HERE,)))
        monkeypatch.setattr(verdicts, "folder_of_verdicts", lambda: tmp_path / "verdicts")
        monkeypatch.setattr(decide, "_verdicts", verdicts.Verdicts())

    return make


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [GPU, TPU])
def test_a_kernel_that_is_right_is_taken_and_found_again(kernels, kernel):
    said = []
    for _ in range(2):
        kernels(kernel)
        runtime = Runtime(ToyLm(n_layers=1), CacheConfig(n_ctx=40, block_size=64, n_ubatch=8))
        said.append(str(runtime.stats().attention))
    assert said == [f"{kernel}: self-test passed", f"{kernel}: self-test passed (cached)"]
    runtime.append(PROMPT)
    assert list(runtime.generate(28)) == generated("chunked")


@pytest.mark.slow
def test_a_kernel_that_is_wrong_is_not_taken(kernels, monkeypatch):
    def attend(qkv, kv, view, how):
        group = dataclasses.replace(how.group, scale=0.3)
        return xla.attend(qkv, kv, view, dataclasses.replace(how, group=group))

    monkeypatch.setitem(registry.IMPLEMENTATIONS, "wrong scale", lambda: attend)
    kernels("wrong scale")
    found = str(make(n_ctx=64, n_ubatch=8).stats().attention)
    why = "wrong scale failed its self-test at head size 16, f32, decode"
    assert re.fullmatch(rf"chunked: {why}.*: largest difference \S+, limit 0\.0001", found)


def test_a_kernel_of_another_device_is_refused():
    name, where = ("pallas_tpu", "tpu") if HERE == "gpu" else ("pallas_gpu", "cuda or rocm")
    with pytest.raises(NotImplementedError, match=f"'{name}' runs on {where}, not on {HERE}"):
        Runtime(ToyLm(n_layers=1), CacheConfig(n_ctx=16, attention=name))
    with pytest.raises(NotImplementedError, match="'pallas_tpu' runs on tpu, not on gpu"):
        require("pallas_tpu", "gpu")
    for name, platform in [("pallas_gpu", "gpu"), ("pallas_gpu", "rocm"), ("chunked", "tpu")]:
        require(name, platform)
    with pytest.raises(NotImplementedError, match="'flash' does not exist"):
        require("flash", "cpu")
