"""Sessions of recurrent and unrotated caches go to a live llama.cpp, and states come from it."""

import io

import numpy as np
import pytest

from kvrt import CacheConfig, Runtime
from kvrt.session.interop import llama
from kvrt_models.load import load
from tests.peer import server, slots, tiny_gguf, tiny_recurrent
from tests.peer.slots import assert_same_text, followed

pytestmark = [pytest.mark.model, pytest.mark.slow]
OPTIMISED = False

N_PROMPT, N_PREDICT = 40, 12
TOLERANCE = 2e-2  # keys and values in f16, which each side rounds at another point
GRANITE = dict(arch="granitehybrid", attention=(1,))
RECURRENT = {
    "mamba": dict(arch="mamba", rank=4, tied=True),
    "mamba2": dict(arch="mamba2", n_groups=2),
    "jamba": dict(arch="jamba", attention=(1,)),
    "bamba": dict(**GRANITE, n_rot=8, n_groups=2),
}
ATTENTION = {
    "llama": dict(arch="llama", tied=True),
    "yarn": dict(arch="llama", scaling="yarn", factor=4.0),
    "gemma2": dict(arch="gemma2", tied=True, n_layers=4),
}
# Of one the keys are unrotated here.
WINDOWED = {
    "write": ATTENTION["gemma2"],
    "read": dict(arch="gpt-oss", n_layers=4),
}
PROMPT = np.random.default_rng(1).integers(0, 128, N_PROMPT).tolist()


def runtime_of(model, rope="write"):
    config = CacheConfig(n_ctx=256, n_ubatch=8, type_k="f16", type_v="f16", rope=rope)
    return Runtime(model.decoder, config)


def check(runtime, logits, expected, limit):
    """Of the next token, and of those after each of its tokens but the last."""
    assert_same_text([logits, *followed(runtime, expected)], expected, limit)


def saved(runtime, model, path, **options):
    """A file of one sequence; its bytes."""
    file = io.BytesIO()
    options = {"whole": False, **options}
    spec = model.spec
    llama.write(file, runtime.snapshot(), spec.groups, arch=spec.arch, **options)
    path.write_bytes(file.getvalue())
    return len(file.getvalue())


def continued(path, folder, n_vocab, n_bytes):
    """What llama.cpp makes of all but the prompt's last token from a slot file."""
    with server.llama_cpp(path, n_vocab=n_vocab, slots=folder, flash=True) as live:
        answer = live.slot("restore", "slot.bin")
        assert answer["n_restored"] == N_PROMPT - 1 and answer["n_read"] == n_bytes
        expected = live.complete(PROMPT, N_PREDICT, cache_prompt=True, id_slot=0)
    assert expected.n_reused == N_PROMPT - 1
    return expected


@pytest.fixture(scope="module", params=RECURRENT)
def recurrent(request, tmp_path_factory):
    model = tiny_recurrent.TinyRecurrent(**RECURRENT[request.param])
    path = tmp_path_factory.mktemp("live") / f"{request.param}.gguf"
    return tiny_recurrent.write_gguf(path, model), load(path)


def test_llama_cpp_goes_on_with_states(recurrent, tmp_path):
    """Of Bamba, which alone rotates keys, they are unrotated here."""
    path, model = recurrent
    runtime = runtime_of(model, "read" if any(g.rope for g in model.spec.groups) else "write")
    runtime.prefill(PROMPT[:-1])
    n_bytes = saved(runtime, model, tmp_path / "slot.bin")
    expected = continued(path, tmp_path, runtime.n_vocab, n_bytes)
    check(runtime, runtime.prefill(PROMPT[-1:]), expected, TOLERANCE)


def test_states_of_llama_cpp_go_on(recurrent, tmp_path):
    path, model = recurrent
    runtime = runtime_of(model)
    with server.llama_cpp(path, n_vocab=runtime.n_vocab, slots=tmp_path, flash=True) as live:
        live.complete(PROMPT[:-1], 1)
        live.slot("save", "slot.bin")
        expected = live.complete(PROMPT, N_PREDICT, cache_prompt=True, id_slot=0)
    assert b"SCKP" in (tmp_path / "slot.bin").read_bytes()
    found = slots.restored(runtime, model, tmp_path / "slot.bin")
    assert runtime.token_history(0)[1].tolist() == PROMPT[:-1]
    check(runtime, runtime.prefill(PROMPT[-1:]), expected, TOLERANCE)
    # What is written of it is the file again, but for what a server adds.
    again = io.BytesIO()
    llama.write(again, found, model.spec.groups, arch=model.spec.arch, whole=False)
    theirs = (tmp_path / "slot.bin").read_bytes()
    n_states = sum(np.prod(s) for s in model.spec.recurrent.shapes) * 4
    assert again.getvalue()[-int(n_states) :] in theirs


OTHER = [*PROMPT[:29], 5, 6, 7, 8]


def with_checkpoints(model, rope="write"):
    config = CacheConfig(
        **{"n_ctx": 256, "n_ubatch": 8, "type_k": "f16", "type_v": "f16", "rope": rope},
        **{"n_checkpoints": 8, "checkpoint_interval": 8, "block_size": 4},
    )
    return Runtime(model.decoder, config)


def test_llama_cpp_resumes_at_a_checkpoint_of_ours(recurrent, tmp_path):
    """A prompt that differs behind token 29 resumes at the checkpoint of 24, as it does here."""
    path, model = recurrent
    runtime = with_checkpoints(model)
    runtime.prefill(PROMPT[:-1])
    assert 24 in runtime.checkpoints()
    saved(runtime, model, tmp_path / "slot.bin")
    with server.llama_cpp(path, n_vocab=runtime.n_vocab, slots=tmp_path, flash=True) as live:
        live.slot("restore", "slot.bin")
        expected = live.complete(OTHER, N_PREDICT, cache_prompt=True, id_slot=0)
    assert expected.n_reused == 24
    runtime.seq_rm(0, 29)
    check(runtime, runtime.prefill(OTHER[29:]), expected, TOLERANCE)


def test_a_checkpoint_of_llama_cpp_is_resumed_here(recurrent, tmp_path):
    path, model = recurrent
    runtime = with_checkpoints(model)
    with server.llama_cpp(path, n_vocab=runtime.n_vocab, slots=tmp_path, flash=True) as live:
        live.complete(PROMPT[:-1], 1)
        live.slot("save", "slot.bin")
        other = [*PROMPT[:37], 5, 6, 7, 8]
        expected = live.complete(other, N_PREDICT, cache_prompt=True, id_slot=0)
    slots.restored(runtime, model, tmp_path / "slot.bin")
    assert runtime.checkpoints() == (expected.n_reused,) == (35,)
    runtime.seq_rm(0, 37)
    check(runtime, runtime.prefill(other[37:]), expected, TOLERANCE)


LONG = np.random.default_rng(2).integers(0, 128, 60).tolist()


@pytest.fixture(scope="module", params=WINDOWED)
def windowed(request, tmp_path_factory):
    made = tiny_gguf.TinyModel(**WINDOWED[request.param])
    path = tmp_path_factory.mktemp("live") / f"{made.arch}.gguf"
    return tiny_gguf.write_gguf(path, made), load(path), request.param


def test_llama_cpp_resumes_at_a_window_of_ours(windowed, tmp_path):
    """Windows of 16: a prompt that differs behind token 37 resumes at the checkpoint of 32."""
    path, model, rope = windowed
    runtime = with_checkpoints(model, rope)
    runtime.prefill(LONG[:-1])
    assert 32 in runtime.checkpoints()
    saved(runtime, model, tmp_path / "slot.bin")
    other = [*LONG[:37], 5, 6, 7, 8]
    with server.llama_cpp(path, n_vocab=runtime.n_vocab, slots=tmp_path, flash=True) as live:
        live.slot("restore", "slot.bin")
        expected = live.complete(other, N_PREDICT, cache_prompt=True, id_slot=0)
    assert expected.n_reused == 32
    runtime.seq_rm(0, 37)
    check(runtime, runtime.prefill(other[37:]), expected, TOLERANCE)


def test_a_window_of_llama_cpp_is_resumed_here(windowed, tmp_path):
    """It keeps one before the last 4 tokens, and evaluates the newest of these again."""
    path, model, _ = windowed
    runtime = with_checkpoints(model)
    with server.llama_cpp(path, n_vocab=runtime.n_vocab, slots=tmp_path, flash=True) as live:
        live.complete(LONG[:-1], 1)
        live.slot("save", "slot.bin")
    other = [*LONG[:56], 5, 6, 7, 8]
    with server.llama_cpp(path, n_vocab=runtime.n_vocab, slots=tmp_path, flash=True) as live:
        live.slot("restore", "slot.bin")
        expected = live.complete(other, N_PREDICT, cache_prompt=True, id_slot=0)
    slots.restored(runtime, model, tmp_path / "slot.bin")
    assert runtime.checkpoints() == (expected.n_reused + 1,) == (55,)
    runtime.seq_rm(0, 56)
    check(runtime, runtime.prefill(other[56:]), expected, TOLERANCE)


@pytest.mark.parametrize("name", ATTENTION)
def test_llama_cpp_goes_on_with_keys_that_were_unrotated(name, tmp_path):
    made = tiny_gguf.TinyModel(**ATTENTION[name])
    path = tiny_gguf.write_gguf(tmp_path / "model.gguf", made)
    model = load(path)
    runtime = runtime_of(model, "read")
    runtime.prefill(PROMPT[:-1])
    n_bytes = saved(runtime, model, tmp_path / "slot.bin")
    expected = continued(path, tmp_path, runtime.n_vocab, n_bytes)
    check(runtime, runtime.prefill(PROMPT[-1:]), expected, TOLERANCE)
