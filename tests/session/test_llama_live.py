"""Sessions go to a live llama.cpp and come from it: the newest version there is, tiny models."""

import numpy as np
import pytest

from kvrt import CacheConfig, Runtime
from kvrt.session.interop import llama
from kvrt_models.load import load
from tests.peer import server, slots, tiny_gguf
from tests.peer.slots import assert_near, assert_same_text, followed

pytestmark = pytest.mark.model
OPTIMISED = False

N_PROMPT, N_PREDICT = 40, 16
# As in tests/test_golden.py, and rows in f16, which each side rounds at another point.
TOLERANCE = 2e-2
# Own tokens are codes there and not yet here, so that logits differ by their rounding.
OF_CODES = 0.3
TINY = {
    "llama": dict(arch="llama"),
    "qwen3": dict(arch="qwen3"),
    "gemma2": dict(arch="gemma2", tied=True, n_layers=4),
    "gpt-oss": dict(arch="gpt-oss", n_layers=4),
}
# As GGUF and as a folder of Hugging Face's, where keys of llama have another order.
MODELS = {"llama": ("gguf", "hf"), "qwen3": ("gguf",), "gemma2": ("gguf",), "gpt-oss": ("gguf",)}


@pytest.fixture(scope="module", params=[(n, k) for n in MODELS for k in MODELS[n]], ids="-".join)
def tiny(request, tmp_path_factory):
    """A model as a file, the same as it is loaded, and a prompt."""
    name, kind = request.param
    folder = tmp_path_factory.mktemp("live")
    model = tiny_gguf.TinyModel(**TINY[name])
    path = tiny_gguf.write_gguf(folder / "model.gguf", model)
    prompt = np.random.default_rng(1).integers(0, 128, N_PROMPT).tolist()
    if kind == "hf":
        return path, load(tiny_gguf.write_folder(folder / "hf", model)), prompt
    return path, load(path), prompt


def runtime_of(model):
    config = CacheConfig(n_ctx=256, n_ubatch=8, type_k="f16", type_v="f16")
    return Runtime(model.decoder, config)


def test_llama_cpp_goes_on_with_a_session(tiny, tmp_path):
    path, model, prompt = tiny
    runtime = runtime_of(model)
    runtime.prefill(prompt[:-1])
    snapshot = runtime.snapshot()
    with (tmp_path / "slot.bin").open("wb") as file:
        llama.write(file, snapshot, model.spec.groups, arch=model.spec.arch, whole=False)
    with server.llama_cpp(path, n_vocab=runtime.n_vocab, slots=tmp_path, flash=True) as live:
        answer = live.slot("restore", "slot.bin")
        assert answer["n_restored"] == N_PROMPT - 1
        assert answer["n_read"] == (tmp_path / "slot.bin").stat().st_size
        expected = live.complete(prompt, N_PREDICT, cache_prompt=True, id_slot=0)
    assert expected.n_reused == N_PROMPT - 1
    logits = runtime.prefill(prompt[-1:])
    assert_same_text([logits, *followed(runtime, expected)], expected, TOLERANCE)


def test_a_session_of_llama_cpp_goes_on(tiny, tmp_path):
    """Without flash attention values are stored the other way round, whatever the family."""
    path, model, prompt = tiny
    flash = model.spec.arch in ("gemma2", "gpt-oss")
    with server.llama_cpp(path, n_vocab=300, slots=tmp_path, flash=flash) as live:
        live.complete(prompt[:-1], 1)
        live.slot("save", "slot.bin")
        expected = live.complete(prompt, N_PREDICT, cache_prompt=True, id_slot=0)
    runtime = runtime_of(model)
    slots.restored(runtime, model, tmp_path / "slot.bin")
    assert runtime.token_history(0)[1].tolist() == prompt[:-1]
    logits = runtime.prefill(prompt[-1:])
    assert_same_text([logits, *followed(runtime, expected)], expected, TOLERANCE)


@pytest.fixture(scope="module", params=[32, 64])
def quantised(request, tmp_path_factory):
    """A model whose heads llama.cpp does not rotate, and one whose heads it does; and a prompt."""
    folder = tmp_path_factory.mktemp("quantised")
    model = tiny_gguf.TinyModel(arch="qwen3", head_dim=request.param)
    path = tiny_gguf.write_gguf(folder / "model.gguf", model)
    prompt = np.random.default_rng(2).integers(0, 128, N_PROMPT).tolist()
    return path, load(path), prompt, request.param == 64


def runtime_of_q8_0(model, turned):
    config = CacheConfig(n_ctx=256, n_ubatch=8, type_k="q8_0", type_v="q8_0", hadamard=turned)
    return Runtime(model.decoder, config)


def test_llama_cpp_goes_on_with_rows_of_q8_0(quantised, tmp_path):
    path, model, prompt, turned = quantised
    runtime = runtime_of_q8_0(model, turned)
    runtime.prefill(prompt[:-1])
    snapshot = runtime.snapshot()
    with (tmp_path / "slot.bin").open("wb") as file:
        llama.write(file, snapshot, model.spec.groups, arch=model.spec.arch, whole=False)
    with server.llama_cpp(
        path, n_vocab=runtime.n_vocab, slots=tmp_path, flash=True, quantised=True
    ) as live:
        answer = live.slot("restore", "slot.bin")
        assert answer["n_restored"] == N_PROMPT - 1
        assert answer["n_read"] == (tmp_path / "slot.bin").stat().st_size
        live.slot("save", "again.bin")
        expected = live.complete(prompt, N_PREDICT, cache_prompt=True, id_slot=0)
    assert expected.n_reused == N_PROMPT - 1
    # Behind the tokens, which a server packs, every byte is the same.
    content = (tmp_path / "slot.bin").read_bytes()
    assert content[12 + 4 * (N_PROMPT - 1) :] in (tmp_path / "again.bin").read_bytes()
    logits = runtime.prefill(prompt[-1:])
    assert_near([logits, *followed(runtime, expected)], expected, OF_CODES)


def test_rows_of_q8_0_of_llama_cpp_go_on(quantised, tmp_path):
    path, model, prompt, turned = quantised
    with server.llama_cpp(path, n_vocab=300, slots=tmp_path, flash=True, quantised=True) as live:
        live.complete(prompt[:-1], 1)
        live.slot("save", "slot.bin")
        expected = live.complete(prompt, N_PREDICT, cache_prompt=True, id_slot=0)
    runtime = runtime_of_q8_0(model, turned)
    found = slots.restored(runtime, model, tmp_path / "slot.bin")
    assert found.fingerprint["type_k"] == "q8_0"
    assert found.fingerprint.get("hadamard", False) == turned
    logits = runtime.prefill(prompt[-1:])
    assert_near([logits, *followed(runtime, expected)], expected, OF_CODES)
