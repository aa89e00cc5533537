"""A file that is not there is a mistake in the call: one line and exit code 2, whatever it is."""

import pytest
from test_mistakes import fails

INPUTS = {
    "model": ["run", "-m", "NONE.gguf", "-p", "x"],
    "model of fit": ["fit", "-m", "NONE.gguf"],
    "prompt": ["run", "-f", "NONE"],
    "ids": ["run", "--tokens", "NONE"],
    "prompt of prefill": ["prefill", "-f", "NONE", "-o", "a.kv"],
    "session of ask": ["ask", "NONE", "why?"],
    "questions": ["ask", "SESSION", "-F", "NONE"],
    "session of inspect": ["inspect", "NONE"],
    "session of verify": ["verify", "NONE"],
    "session of explain": ["explain", "NONE", "-m", "MODEL", "-p", "x"],
    "session of fork": ["fork", "NONE", "--at", "1", "-o", "b.kv"],
    "session of trim": ["trim", "NONE"],
    "session of convert": ["convert", "NONE", "--to", "f16", "-o", "b.kv"],
    "foreign session": ["convert", "NONE", "-m", "MODEL", "--to", "f16", "-o", "b.kv"],
    "folder of ls": ["ls", "NONE"],
    "folder of prune": ["prune", "NONE", "--budget", "1GB"],
    "requests": ["batch", "-i", "NONE", "-o", "out.jsonl"],
    "folder of a session": ["run", "-m", "MODEL", "-p", "x", "--session", "NONE/a.kv"],
    "folder of a prefill": ["prefill", "-m", "MODEL", "-p", "x", "-o", "NONE/a.kv"],
    "folder of a fork": ["fork", "SESSION", "--at", "1", "-o", "NONE/a.kv"],
    "folder of a conversion": ["convert", "SESSION", "--to", "f16", "-o", "NONE/a.kv"],
    "folder of a page": ["inspect", "SESSION", "--html", "NONE/a.html"],
    "folder of results": ["batch", "-m", "MODEL", "-i", "REQUESTS", "-o", "NONE/out.jsonl"],
    "folder of counters": ["batch", "-i", "REQUESTS", "-o", "out", "--metrics", "NONE/m.prom"],
}


def files(folder):
    """All but what stands for standard input."""
    return sorted(p for p in folder.rglob("*") if p.name != "stdin")


@pytest.mark.parametrize("words", INPUTS.values(), ids=INPUTS)
def test_what_is_not_there(kvrt, tiny, prefilled, tmp_path, monkeypatch, words):
    requests = tmp_path / "requests.jsonl"
    requests.write_text('{"id": 1, "prompt": "x"}\n')
    names = {"MODEL": tiny, "SESSION": prefilled, "REQUESTS": requests}
    monkeypatch.chdir(tmp_path)
    before = files(tmp_path)
    done = kvrt(*(names.get(word, word.replace("NONE", "nowhere")) for word in words))
    fails(done, 2, "nowhere")
    assert files(tmp_path) == before


def test_a_session_that_may_not_be_seen(kvrt, prefilled, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.stat", refuse)
    done = kvrt("verify", prefilled)
    fails(done, 2, "permission denied")


UNKNOWN = {
    "smollm2": "did you mean smollm2-135m?",
    "org/model": "kvrt fetches no repositories: download its config.json",
    "./model.gguf": "there is no such file or folder",
    "gpt-9000": "is neither a file nor a folder nor a known name; known names",
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_models_say_what_a_name_may_be(kvrt, name):
    fails(kvrt("fit", "-m", name), 2, name, UNKNOWN[name], "smollm2-135m (", "gemma3-270m (")


def test_a_question_before_its_session(kvrt, prefilled):
    fails(kvrt("ask", "why?", prefilled), 2, "the session comes first: kvrt ask", "'why?'")
