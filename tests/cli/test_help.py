"""What `kvrt --help` and `kvrt help` print, its width, and a start that costs nothing."""

import importlib.metadata
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import kvrt
from kvrt.cli.commands import COMMANDS
from kvrt.cli.flags.parse import help_text, parse_flags, usage
from kvrt.cli.flags.topics import TOPICS
from kvrt.cli.main import main

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("word", ["--help", "-h", "-help"])
def test_help_wins_over_mistakes_that_follow(word, capfdbinary):
    assert main(["run", "-n", "1", word, "--wat"]) == 0
    assert main([word]) == 0
    out, err = capfdbinary.readouterr()
    assert b"usage: kvrt run" in out and b"usage: kvrt COMMAND" in out and err == b""


def test_version(capfdbinary):
    assert main(["--version"]) == 0
    assert capfdbinary.readouterr().out.decode() == f"kvrt {kvrt.__version__}\n"
    assert kvrt.__version__ == kvrt.version() == importlib.metadata.version("kvrt")


@pytest.mark.parametrize("width", [60, 80, 100])
@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c.name)
def test_help_names_every_flag_and_keeps_its_width(command, width):
    text = help_text(width, command, everything=True)
    assert text.startswith(f"usage: kvrt {command.name} ") and "more flags" not in text
    for flag in command.flags():
        name = flag.value if flag.place else flag.name
        assert f"{name} " in text and flag.help.split()[0] in text
    assert all(len(line) <= width for line in text.splitlines())


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c.name)
def test_help_leaves_out_what_few_need_and_says_so(command, capfdbinary):
    few = [flag for flag in command.flags() if flag.advanced]
    text = help_text(80, command)
    heads = {line[: line.find("  ", 8)].strip() for line in text.splitlines()}
    there = {flag.name for flag in command.flags() if usage(flag).strip() in heads}
    assert there == {flag.name for flag in command.flags() if not flag.advanced}
    assert len(text.splitlines()) <= 120
    more = f"{len(few)} more flags: kvrt {command.name} --help_all"
    assert (more in text) == bool(few)
    assert not any(flag.needed or flag.place for flag in few)
    assert main([command.name, "--help_all"]) == main([command.name, "--help-all"]) == 0
    whole = capfdbinary.readouterr().out.decode()
    assert all(f"{flag.name} " in whole for flag in command.flags() if not flag.place)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c.name)
def test_help_describes_no_flag_that_its_command_lacks(command):
    by_name = {c.name: c for c in COMMANDS}
    text = " ".join(help_text(100, command, everything=True).split())
    for word, name in re.findall(r"(\S+) --(?:\[no\])?([a-z]\w+)", text):
        flags = by_name.get(word.lstrip("("), command).flags()
        names = {n for flag in flags for n in flag.names} | {"help_all"}
        assert {name, name.removeprefix("no")} & names, f"{command.name}: --{name}"


def test_run_help_shows_policies_and_drafts():
    text = help_text(80)
    assert "--policy NAME" in text and "--draft WAY" in text


def test_help_imports_nothing_heavy():
    code = (
        "import sys\n"
        "from kvrt.cli.main import main\n"
        "from kvrt.cli.commands import COMMANDS\n"
        "assert main(['--help']) == 0\n"
        "assert not [c.name for c in COMMANDS if main([c.name, '--help'])]\n"
        "heavy = {'jax', 'jaxlib', 'numpy', 'flax', 'rich', 'kvrt_models'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "--n_predict" in done.stdout and done.stderr == ""


@pytest.mark.parametrize("words", [["run", "-p", "x"], ["verify", "x.kv"], ["fit"]])
def test_a_wrong_model_name_is_refused_before_jax_is_imported(words):
    code = (
        "import sys\n"
        "from kvrt.cli.main import main\n"
        f"assert main([*{words}, '-m', 'gpt-9000']) == 2\n"
        "assert not {'jax', 'numpy'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("kvrt: model 'gpt-9000': ") and done.stderr.count("\n") == 1


def test_no_word_is_the_help(capfdbinary):
    assert main([]) == 0
    alone = capfdbinary.readouterr()
    assert main(["--help"]) == main(["help"]) == 0
    assert capfdbinary.readouterr().out == 2 * alone.out and alone.err == b""
    assert b"usage: kvrt COMMAND" in alone.out and b"sampling" in alone.out


def test_python_m_kvrt():
    words = [sys.executable, "-m", "kvrt"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "") and "usage: kvrt COMMAND" in done.stdout
    done = subprocess.run([*words, "fly"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and done.stderr.startswith("kvrt: unknown command 'fly'")


def test_a_topic_is_made_of_the_options(capfdbinary):
    assert main(["help", "fields"]) == 0
    out = capfdbinary.readouterr().out.decode()
    assert "  --temp                  lr  Sampling.temp\n" in out
    assert "  --defrag_thold          --  CacheConfig.defrag_threshold\n" in out
    assert all(len(line) <= 72 for line in out.splitlines())


@pytest.mark.parametrize("topic", TOPICS)
def test_topics_fit_a_terminal_and_name_flags_that_are_there(topic, capfdbinary):
    assert main(["help", topic]) == main(["help", *topic.split("_")]) == 0
    out = capfdbinary.readouterr().out.decode()
    assert out == 2 * TOPICS[topic]
    assert all(len(line) <= 72 for line in out.splitlines())
    names = {f.name for c in COMMANDS for f in c.flags()}
    for word in out.replace(",", " ").split():
        if word.startswith("--"):
            assert word.lstrip("-").partition("=")[0].removeprefix("no") in names, word


def test_help_on_a_command_and_on_nothing(capfdbinary):
    assert main(["help", "run"]) == main(["run", "--help"]) == 0
    out = capfdbinary.readouterr().out.decode()
    assert out[: len(out) // 2] == out[len(out) // 2 :]
    assert main(["help", "sesions"]) == 2
    out, err = capfdbinary.readouterr()
    assert out == b"" and err.count(b"\n") == 1
    assert b"did you mean sessions?" in err and b"the topics are: models, sessions" in err


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c.name)
def test_examples_are_calls_that_are_understood(command):
    for example in command.examples:
        program, name, *words = shlex.split(example)
        assert (program, name) == ("kvrt", command.name)
        assert parse_flags(words, command) is not None, example
