"""A session of several sequences: one is chosen with --seq, and the others are never lost."""

import json

import numpy as np
import pytest
from conftest import BOOK
from test_mistakes import fails

from kvrt import session

pytestmark = pytest.mark.slow


def told(done) -> dict:
    assert done.code == 0, done.err
    return json.loads(done.out)


@pytest.fixture
def two(kvrt, tiny, book, tmp_path):
    """A session whose sequence 3 is the text, and whose sequence 5 is another one."""
    path, other = tmp_path / "two.kv", tmp_path / "other.txt"
    other.write_text("a mist on the water")
    for seq, text in ((3, book), (5, other)):
        words = ["-m", tiny, "-c", 128, "-f", text, "-o", path, "--seq", seq]
        assert kvrt("prefill", *words, "--quiet").code == 0
    return path


def rows(path, seq):
    """Tokens, keys and values of a sequence, by position."""
    found = session.read(path)
    part, held = found.groups[0], np.concatenate(found.history.pieces[seq], axis=1)
    mine = np.flatnonzero(part.seqs[:, seq // 32] >> (seq % 32) & 1)
    mine = mine[np.argsort(part.pos[mine])]
    k = np.concatenate([np.asarray(b.k) for b in part.blocks], axis=1)
    return held[:2].tolist(), k[:, mine].tobytes()


def test_several_sequences_are_listed_and_one_has_to_be_named(go, kvrt, tiny, two):
    data = two.read_bytes()
    n = session.read_manifest(two).n_tokens
    listed = f"holds sequences 3 ({n[3]} tokens), 5 ({n[5]} tokens)"
    for more in ([], ["--session_ro"], ["--append"]):
        fails(go("--session", two, *more), 2, listed, "choose one with --seq")
    fails(go("--session", two, "--session_ro", "--seq", 4), 2, listed, "and no 4")
    fails(go("--session", two, "--seq", 4, prompt=False), 2, "nothing to say what to resume")
    fails(kvrt("ask", two, "why", "-m", tiny), 2, listed)
    fails(kvrt("ask", two, "why", "-m", tiny, "--seq", 1), 2, listed, "and no 1")
    fails(kvrt("explain", two, "-p", "the", "-m", tiny), 2, listed)
    fails(go("--session", two.parent, "--seq", 3), 2, "a folder of sessions, of a sequence each")
    words = ["--seq", 3, "--mesh", "tensor=1", "--coordinator", "h:1", "--n_processes", 1]
    fails(go("--session", two, *words), 2, "leave out --coordinator")
    assert two.read_bytes() == data


def test_a_sequence_goes_on_and_the_other_stays(go, kvrt, tiny, book, two):
    other = rows(two, 5)
    words = ["--session", two, "--session_all", "--json", "-n", 6]
    first = told(go("-f", book, "--seq", 3, *words, prompt=False))
    assert first["n_restored"] >= first["n_prompt"] - 1 and rows(two, 5) == other
    # It resumes where it was left, as a text that was alone in its file.
    second = told(go("--seq", 3, *words, prompt=False))
    alone = told(go("-f", book, "-c", 128, "--json", "-n", 12, prompt=False))
    assert first["tokens"] + second["tokens"] == alone["tokens"]
    assert rows(two, 5) == other and session.read_manifest(two).draws.keys() == {3}
    third = told(go("-p", "a mist on the water", "--seq", 5, *words, prompt=False))
    assert third["tokens"] == told(go("-p", "a mist on the water", *words[3:]))["tokens"]
    assert session.read_manifest(two).draws.keys() == {3, 5}
    asked = ["-m", tiny, "--temp", 0, "-n", 4, "--json"]
    assert told(kvrt("ask", two, "why", "--seq", 5, *asked))["n_restored"] > 0
    assert kvrt("verify", two, "-m", tiny).code == 0
    plan = told(kvrt("explain", two, "-p", BOOK, "-m", tiny, "--seq", 3, "--json"))
    assert plan["n_reused"] > 5


def test_another_sequence_begins_beside_them(go, two):
    before = {s: rows(two, s) for s in (3, 5)}
    done = go("--session", two, "--seq", 0, "-n", 1)
    assert done.code == 0 and "sequence 0 begins, 3 computed" in done.err
    assert session.read_manifest(two).n_tokens.keys() == {0, 3, 5}
    assert {s: rows(two, s) for s in (3, 5)} == before


def test_a_sequence_that_would_lose_its_text_is_refused_and_kept(go, two, tmp_path):
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps([i % 250 for i in range(100)]))
    words = ["--session", two, "-n", 1, "-c", 128]
    assert go("--tokens", ids, "--seq", 7, *words, prompt=False).code == 0
    before = {s: rows(two, s) for s in (3, 5, 7)}
    fails(go("--seq", 7, *words), 2, "holds 100 tokens", "--overwrite")
    assert {s: rows(two, s) for s in (3, 5, 7)} == before
    assert go("--seq", 7, *words, "--overwrite").code == 0
    kept = tmp_path / "two.kv~"
    assert {s: rows(kept, s) for s in (3, 5, 7)} == before
    assert [rows(two, s) for s in (3, 5)] == [before[3], before[5]]
