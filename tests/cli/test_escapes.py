"""What comes from a file reaches a terminal as text: no escapes, no markup, no lines of its own."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import tiny_gguf

from kvrt.cli.process import output
from kvrt.cli.report.tables import table

ROOT = Path(__file__).parents[2]
EVIL = "\x1b]0;owned\x07\x1b[31m\x9b2J\r\u202e[red]"
SEEN = r"\x1b]0;owned\x07\x1b[31m\x9b2J\r\u202e[red]"


def check(text: bytes | str, *parts: str) -> None:
    """No control character but newlines, and these parts."""
    text = text.decode() if isinstance(text, bytes) else text
    assert all(c.isprintable() for c in text.replace("\n", "")), ascii(text)
    for part in parts:
        assert part in text


def test_both_streams_escape_what_cannot_be_seen(capfdbinary):
    output.write_text(f"{EVIL}\n\tok\n")
    output.note(f"{EVIL}\n\tok")
    output.warn(EVIL)
    output.complain(f"one\n{EVIL} \udcff")
    out, err = capfdbinary.readouterr()
    assert out.decode() == f"{SEEN}\n\tok\n"
    # A line is a line: what ends one in a message becomes a space.
    seen = SEEN.replace("\\r", " ")
    assert err.decode() == (f"{SEEN}\n\tok\nkvrt: warning: {seen}\nkvrt: one {seen} \\udcff\n")


def test_tables_show_markup_and_escapes_as_they_are():
    shown = table((EVIL, "[bold]n[/bold]"), [("[red]a[/red]", EVIL)])
    check(shown, SEEN, "[bold]n[/bold]", "[red]a[/red]")


def test_a_models_text_is_escaped_on_a_terminal_and_raw_in_a_pipe():
    # A family of emoji and a mark of direction are text; what moves a cursor is not.
    text = "a\tb\n\x1b[2J\x9b\r\x7f \U0001f468\u200d\U0001f469 \u200f"
    code = f"from kvrt.cli.process import output; output.write_generated({text!r})"
    piped = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT)
    assert piped.stdout.decode() == text
    master, slave = os.openpty()
    with os.fdopen(slave, "wb") as terminal:
        subprocess.run([sys.executable, "-c", code], stdout=terminal, check=True, cwd=ROOT)
    parts = []
    # Linux says EIO once all writers have gone.
    with contextlib.suppress(OSError):
        while part := os.read(master, 4096):
            parts.append(part)
    os.close(master)
    shown = b"".join(parts).decode().replace("\r\n", "\n")
    assert shown == "a\tb\n\\x1b[2J\\x9b\\r\\x7f \U0001f468\u200d\U0001f469 \u200f"


@pytest.mark.slow
def test_a_run_writes_text_by_the_door_for_generated_text(go, monkeypatch):
    written = []
    monkeypatch.setattr(output, "write_generated", written.append)
    monkeypatch.setattr(output, "write_text", lambda text: pytest.fail(text))
    assert go("--quiet").code == 0 and "".join(written)


def test_metadata_of_a_model(go, tiny, tmp_path):
    path = tmp_path / "evil.gguf"
    # The same length, so that the file stays well formed but for the name.
    path.write_bytes(tiny.read_bytes().replace(b"llama", b"\x1b[31m"))
    done = go("-m", path)
    assert done.code == 1 and done.err.count("\n") == 1
    check(done.err, r"\x1b[31m")


def test_a_chat_template_that_fails(go, tmp_path):
    folder = tiny_gguf.write_folder(tmp_path / "model", tiny_gguf.TinyModel(n_layers=1))
    (folder / "chat_template.jinja").write_text("{{ raise_exception('" + EVIL[:-1] + "') }}")
    done = go("-m", folder, "--chat")
    assert done.code == 2 and done.err.count("\n") == 1
    check(done.err, r"\x1b[31m")


def test_names_of_files(kvrt, prefilled, tmp_path):
    path = tmp_path / "\x1b[31m[red]a\udcff.kv"
    path.write_bytes(prefilled.read_bytes())
    for words in (["verify"], ["inspect"], ["fork", "--at", 4, "-o", tmp_path / "\x1b[1m.kv"]):
        done = kvrt(words[0], path, *words[1:])
        assert done.code == 0, done.err
        check(done.out)
        check(done.err)
        assert r"\x1b[" in done.out.decode() + done.err
    path.write_bytes(prefilled.read_bytes()[:-1])
    done = kvrt("verify", path)
    assert done.code == 1
    check(done.err, r"\x1b[31m[red]a\udcff.kv: ")
    marked = tmp_path / "sessions"
    marked.mkdir()
    (marked / "[red]b.kv").write_bytes(prefilled.read_bytes())
    for words in (["ls"], ["prune", "--budget", "1GB"]):
        check(kvrt(words[0], marked, *words[1:]).out, "[red]b.kv")


def test_requests_of_a_batch(kvrt, tiny, tmp_path):
    path = tmp_path / "requests.jsonl"
    path.write_text(json.dumps({"id": EVIL, "prompt": "x", EVIL: 1}) + "\n")
    done = kvrt("batch", "-m", tiny, "-i", path, "-o", "-")
    assert done.code == 2 and done.err.count("\n") == 1
    check(done.err, "unknown key")
