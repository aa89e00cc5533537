"""The life of a session file in Python, by the text of docs/sessions.md."""

import re

import pytest
from histories import MODELS, open_runtime, tokens

from kvrt import SessionFile, UsageError, session
from tests.importgraph import ROOT

PAGE = (ROOT / "docs/sessions.md").read_text()
SHOWN = re.findall(r"```python\n(from kvrt import SessionFile\n.*?)```", PAGE, re.DOTALL)


def run(ids):
    """What the page shows on a fresh runtime: what was restored, and which tokens are saved."""
    names = {"runtime": open_runtime(MODELS["full"](), n_ctx=512), "ids": ids}
    exec(SHOWN[0], names)
    assert names["runtime"].token_history()[1].tolist() == ids
    found = names["found"]
    return found.n_restored, list(found.spans), session.open_session("book.kv").held[1].tolist()


def test_the_page_shows_what_a_run_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ids, other = tokens(200), tokens(90, seed=2)
    assert run(ids) == (0, [(0, 200)], ids)
    edited = ids[:190] + tokens(12, seed=1)
    assert run(edited) == (190, [(190, 202)], edited)
    assert session.open_session("book.kv~").held[1].tolist() == ids  # few tokens went
    with pytest.warns(UserWarning, match="202 of its tokens would be lost, so it stays as it is"):
        assert run(other)[2] == edited
    assert session.open_session("book-2.kv").held[1].tolist() == other


def test_a_sequence_is_named_where_there_are_several(tmp_path):
    runtime = open_runtime(MODELS["full"]())
    runtime.append(tokens(5))
    runtime.seq_cp(0, 1)
    session.save(tmp_path / "two.kv", runtime.snapshot())
    with pytest.raises(UsageError, match="choose one with seq_id"):
        SessionFile(tmp_path / "two.kv")
    assert SessionFile(tmp_path / "two.kv", seq_id=1).opened.seq_id == 1


def test_a_folder_that_is_missing_is_met_before_anything_is_read(tmp_path):
    path = tmp_path / "no" / "book.kv"
    with pytest.raises(UsageError, match="there is no folder"):
        SessionFile(path)
    assert SessionFile(path, writes=False).opened is None
