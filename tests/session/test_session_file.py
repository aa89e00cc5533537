"""The life of a session file in Python, by the text of docs/sessions.md."""

import re

import pytest
from histories import MODELS, open_runtime, tokens

from kvrt import SessionFile, UsageError, session
from tests.importgraph import ROOT

SHOWN = re.search(
    r"```python\n(from kvrt import SessionFile\n.*?)```",
    (ROOT / "docs/sessions.md").read_text(),
    re.S,
)


def run(ids, **options):
    """What the page shows, on a fresh runtime; the runtime and what was restored."""
    runtime = open_runtime(MODELS["full"](), n_ctx=512, **options)
    names = {"runtime": runtime, "ids": ids}
    exec(SHOWN[1], names)
    return runtime, names["found"]


def held(name="book.kv"):
    return session.open_session(name).held[1].tolist()


def test_the_page_shows_what_a_run_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ids, more = tokens(40), tokens(12, seed=1)
    _, first = run(ids)
    assert (first.n_restored, first.spans, held()) == (0, [(0, 40)], ids)
    runtime, found = run(ids[:30] + more)
    assert (found.n_restored, list(found.spans)) == (30, [(30, 42)])
    alone = open_runtime(MODELS["full"](), n_ctx=512)
    alone.append(ids[:30] + more)
    assert held() == runtime.token_history()[1].tolist() == alone.token_history()[1].tolist()
    assert held("book.kv~") == ids  # few tokens went


def test_a_session_of_another_text_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ids, other = tokens(200), tokens(90, seed=2)
    run(ids)
    with pytest.warns(UserWarning, match="200 of its tokens would be lost, so it stays as it is"):
        run(other)
    assert held() == ids and held("book-2.kv") == other


def test_a_sequence_is_named_where_there_are_several(tmp_path):
    runtime = open_runtime(MODELS["full"]())
    runtime.append(tokens(5))
    runtime.seq_cp(0, 1)
    session.save(tmp_path / "two.kv", runtime.snapshot())
    with pytest.raises(UsageError, match="choose one with seq_id"):
        SessionFile(tmp_path / "two.kv")
    assert SessionFile(tmp_path / "two.kv", seq_id=1).opened.seq_id == 1
