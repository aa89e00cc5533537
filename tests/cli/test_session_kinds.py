"""Sessions of caches that shift, extend, use rows again, or are stopped while they are read."""

import json

import pytest
from conftest import tiny_gguf

from kvrt import session

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    """A model of which every other layer sees 16 positions."""
    path = tmp_path_factory.mktemp("windowed") / "tiny.gguf"
    return tiny_gguf.write_gguf(path, tiny_gguf.TinyModel(arch="gemma2", n_layers=2))


@pytest.fixture
def ids(tmp_path):
    """A file of so many ids, which may end with others."""

    def write(n, *more):
        path = tmp_path / f"{n}-{len(more)}.json"
        path.write_text(json.dumps([*(i % 250 for i in range(n)), *more]))
        return path

    return write


def told(done) -> dict:
    assert done.code == 0, done.err
    return json.loads(done.out)


def test_self_extend_comes_with_the_session(go, ids, tmp_path):
    path = tmp_path / "a.kv"
    # Rounds come between steps, so the steps have to be the same.
    words = ["-c", 128, "-n", 6, "--json", "--quiet", "--ignore_eos", "--n_ubatch", 20]
    extend = [*words, "-gan", 2, "-gaw", 8]
    go("--tokens", ids(60), "--session", path, *extend, prompt=False)
    longer = ["--tokens", ids(60, 7, 8, 9, 10)]
    plain = told(go(*longer, *extend, prompt=False))
    found = told(go(*longer, *words, "--session", path, "--session_ro", prompt=False))
    assert found["tokens"] == plain["tokens"] and found["n_restored"] == 60
    other = go(*longer, *words, "-gan", 4, "--session", path, prompt=False)
    assert other.code == 2 and "self_extend.ga_n is 2 in the session and 4 here" in other.err


def test_a_prompt_that_shifted_is_trusted_up_to_the_hole(go, ids, tmp_path):
    path = tmp_path / "a.kv"
    words = ["-n", 2, "--json", "--keep", 5, "--session", path]
    first = told(go("--tokens", ids(150), *words, prompt=False))
    assert first["n_dropped"] > 0
    second = go("--tokens", ids(40), *words, prompt=False)
    assert told(second)["n_restored"] <= 5, second.err
    plain = told(go("--tokens", ids(40), *words[:-2], prompt=False))
    assert told(second)["tokens"] == plain["tokens"]


@pytest.mark.parametrize("full", [False, True])
def test_windows_go_on_and_say_where_they_cannot(go, ids, windowed, tmp_path, full):
    path = tmp_path / "a.kv"
    words = ["-m", windowed, "-c", 512, "--n_ubatch", 8, "-n", 6, "--json"]
    words += ["--swa_full"] if full else []
    go("--tokens", ids(400), "--session", path, *words, "--quiet", prompt=False)
    longer = ["--tokens", ids(400, 7, 8, 9)]
    plain = told(go(*longer, *words, prompt=False))
    found = told(go(*longer, *words, "--session", path, "--session_ro", prompt=False))
    assert found["n_restored"] == 400 and found["tokens"] == plain["tokens"]
    other = ["--tokens", ids(30, 1, 1, 1)]
    back = go(*other, *words, "--session", path, "--overwrite", prompt=False)
    assert told(back)["tokens"] == told(go(*other, *words, prompt=False))["tokens"]
    if full:
        assert told(back)["n_restored"] == 30
    else:
        assert told(back)["n_restored"] in (0, 30)


def test_windows_resume_at_a_checkpoint_of_the_session(go, kvrt, ids, windowed, tmp_path):
    path = tmp_path / "a.kv"
    words = ["-m", windowed, "-c", 512, "--n_ubatch", 8, "-n", 6, "--json"]
    kept = ["--n_checkpoints", 32, "--checkpoint_interval", 20]
    go("--tokens", ids(400), "--session", path, *words, *kept, "--quiet", prompt=False)
    assert [c.pos for c in session.read_manifest(path).checkpoints] == list(range(20, 401, 20))
    other = ["--tokens", ids(133, 1, 1, 1)]
    plain = told(go(*other, *words, *kept, prompt=False))
    cut = path.with_name("cut.kv")
    said = kvrt("fork", path, "--at", 399, "-o", cut).err
    assert "cut.kv: without the context checkpoint at 400, behind its end" in said
    # Without flags it goes by the session.
    for more in (kept, []):
        back = go(*other, *words, *more, "--session", path, "--session_ro", prompt=False)
        assert told(back)["tokens"] == plain["tokens"] and told(back)["n_restored"] == 120
        assert "13 after the last position that windowed or recurrent layers resume at" in back.err
        lost = told(back)["lost_checkpoints"]
        assert {x["pos"] for x in lost} == {*range(140, 401, 20)}
        assert {x["reason"] for x in lost} == {"cut"}


def test_settings_that_hold_no_chunks(go, ids, windowed, tmp_path):
    words = ["-m", windowed, "-c", 512, "--n_ubatch", 8, "--session", tmp_path / "a.kv"]
    done = go("--tokens", ids(4), *words, "--reuse_chunks", prompt=False)
    assert done.code == 2 and "--reuse_chunks fills gaps" in done.err


def test_a_session_in_a_folder_of_its_own(go, kvrt, prefilled, book, tmp_path):
    folder = tmp_path / "book"
    session.save(folder, session.read(prefilled), "folder")
    found = told(go("-f", book, "--json", "--quiet", "--session", folder, prompt=False))
    assert found["n_recomputed"] == 1
    facts = json.loads(kvrt("inspect", folder, "--json", "--cells").out)
    assert (
        facts["cells"] == json.loads(kvrt("inspect", prefilled, "--json", "--cells").out)["cells"]
    )
    assert kvrt("verify", folder).code == 0
    assert kvrt("trim", folder, "--keep", 4, "--quiet").code == 0
    assert session.read_manifest(folder).n_tokens == {0: 4}


@pytest.mark.parametrize("kind", ["llama.cpp", "llama.cpp-slot", "mlx"])
def test_a_file_of_another_program_becomes_a_session(
    kvrt, go, tiny, prefilled, book, tmp_path, kind
):
    other, new = tmp_path / "other.bin", tmp_path / "new.kv"
    assert kvrt("convert", prefilled, "--to", kind, "-o", other, "--quiet").code == 0
    back = ["convert", other, "--to", "f32", "-o", new]
    done = kvrt(*back, "-m", tiny)
    assert done.code == 0, done.err
    found = told(
        go("-f", book, "-p", "of the", "--json", "--quiet", "--session", new, prompt=False)
    )
    plain = told(
        go("-f", book, "-p", "of the", "--json", "--quiet", "--session", prefilled, prompt=False)
    )
    assert found["tokens"] == plain["tokens"] and found["n_restored"] == plain["n_restored"] > 20
    new.unlink()
    done = kvrt(*back)
    assert done.code == 1 and "session" in done.err and not new.exists()
    other.write_bytes(other.read_bytes()[:-5])
    done = kvrt(*back, "-m", tiny)
    assert done.code == 1 and done.err.count("\n") == 1 and not new.exists()
