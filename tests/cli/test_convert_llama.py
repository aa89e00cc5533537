"""`kvrt convert` to llama.cpp's files and back: unrotated keys, and states of recurrent layers."""

import json

import pytest
from test_mistakes import fails

from kvrt import session
from tests.peer import tiny_recurrent

pytestmark = pytest.mark.slow
MODELS = {
    "mamba": dict(arch="mamba", rank=4, tied=True),
    "bamba": dict(arch="granitehybrid", attention=(1,), n_rot=8, n_groups=2),
}


def told(done) -> dict:
    assert done.code == 0, done.err
    return json.loads(done.out)


@pytest.fixture(scope="module", params=MODELS)
def recurrent(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("recurrent") / f"{request.param}.gguf"
    return tiny_recurrent.write_gguf(path, tiny_recurrent.TinyRecurrent(**MODELS[request.param]))


@pytest.mark.parametrize("to", ["llama.cpp", "llama.cpp-slot"])
def test_states_go_to_a_file_of_llama_cpp_and_back(go, kvrt, recurrent, book, tmp_path, to):
    paths = [tmp_path / name for name in ("a.kv", "b.bin", "c.kv")]
    read = ["-m", recurrent, "-c", 64]
    assert kvrt("prefill", *read, "-f", book, "-o", paths[0]).code == 0
    done = kvrt("convert", paths[0], "--to", to, "-o", paths[1])
    assert done.code == 0, done.err
    done = kvrt("convert", paths[1], "-m", recurrent, "--to", "f16", "-o", paths[2])
    assert done.code == 0, done.err
    words = ["--json", "-p", "and the sand", "--append", "-n", 8, *read]
    a, c = (told(go(*words, "--session", x, prompt=False)) for x in (paths[0], paths[2]))
    assert a["tokens"] == c["tokens"] and a["n_restored"] == c["n_restored"] > 5
    fails(kvrt("convert", paths[0], "--to", "mlx", "-o", tmp_path / "d"), 2, "recurrent layers")


def test_unrotated_keys_go_to_a_file_of_llama_cpp(go, kvrt, tiny, book, tmp_path):
    paths = [tmp_path / name for name in ("a.kv", "b.bin", "c.kv")]
    read = ["-m", tiny, "-c", 64, "--cache_type_k", "f32", "--cache_type_v", "f32"]
    assert kvrt("prefill", *read, "--rope", "read", "-f", book, "-o", paths[0]).code == 0
    assert kvrt("convert", paths[0], "--to", "llama.cpp", "-o", paths[1]).code == 0
    done = kvrt("convert", paths[1], "-m", tiny, "--to", "f32", "-o", paths[2])
    assert done.code == 0, done.err
    assert session.read_manifest(paths[2]).fingerprint["rope"] == "write"
    words = ["--json", "-n", 8, "-f", book, *read[2:]]
    a, c = (told(go(*words, "--session", x, prompt=False)) for x in (paths[0], paths[2]))
    assert a["tokens"] == c["tokens"] and c["n_restored"] >= c["n_prompt"] - 1


def test_recurrent_layers_are_cut_back_by_as_many_tokens_as_states_are_kept(
    go, recurrent, tmp_path
):
    path, ids = tmp_path / "a.kv", tmp_path / "ids.json"
    words = ["-m", recurrent, "--json", "-n", 4, "--tokens", ids, "--session", path]
    first = [i % 100 for i in range(40)]
    n_restored = []
    for n_states in (0, 4):
        ids.write_text(json.dumps(first))
        path.unlink(missing_ok=True)
        kept = ["--n_rs_seq", n_states]
        assert go(*words, *kept, prompt=False).code == 0
        ids.write_text(json.dumps([*first[:-2], 101, 102]))
        more = told(go(*words, *kept, "--session_ro", prompt=False))
        n_restored.append(more["n_restored"])
        plain = told(go(*words[:-2], *kept, prompt=False))
        assert more["tokens"] == plain["tokens"]
    assert n_restored == [0, 38]
