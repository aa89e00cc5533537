"""The flags of `kvrt run`: spellings, ranges, contradictions, and a help that costs nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvrt.cli.flags import help_text, parse
from kvrt.cli.main import main
from kvrt.cli.options import table
from kvrt.errors import UsageError

ROOT = Path(__file__).parents[2]
SAMPLE = {
    "model": "x.gguf",
    "dtype": "bf16",
    "prompt": "a b",
    "file": "a.txt",
    "tokens": "ids.json",
    "n_predict": "-2",
    "n_ctx": "7",
    "keep": "-1",
    "grp_attn_n": "2",
    "grp_attn_w": "64",
    "self_extend": "paper",
    "stop": "\n\n",
    "temp": "0.5",
    "top_k": "3",
    "top_p": "0.25",
    "min_p": "0.5",
    "repeat_penalty": "1.5",
    "repeat_last_n": "9",
    "seed": "4294967295",
    "cache_type_k": "f16",
    "cache_type_v": "bf16",
    "rope": "read",
    "n_ubatch": "32",
    "defrag_thold": "0.5",
    "logprobs": "2",
}
VALUED = [flag for flag in table() if flag.type is not bool]
SWITCHES = [flag for flag in table() if flag.type is bool]


def options(*words: str):
    """Options of these words, with a prompt if they bring none, and JSON for --logprobs."""
    named = {word.lstrip("-").partition("=")[0] for word in words}
    prompt = [] if named & {"p", "prompt", "f", "file", "tokens"} else ["-p", "x"]
    found = parse([*words, *prompt, "--json"])
    assert found is not None
    return found


def expected(flag):
    text = SAMPLE[flag.name]
    return (
        (text,) if flag.name == "stop" else flag.type(text) if flag.type in (int, float) else text
    )


@pytest.mark.parametrize("flag", VALUED, ids=lambda f: f.name)
def test_every_spelling_of_a_value(flag):
    names = {f"--{flag.name}", f"-{flag.name}", f"--{flag.name.replace('_', '-')}"}
    names |= {f"-{flag.info.short}"} if flag.info.short else set()
    value = SAMPLE[flag.name]
    for name in names:
        assert getattr(options(name, value), flag.name) == expected(flag), name
        assert getattr(options(f"{name}={value}"), flag.name) == expected(flag), name


@pytest.mark.parametrize("flag", SWITCHES, ids=lambda f: f.name)
def test_every_spelling_of_a_switch(flag):
    dashed = flag.name.replace("_", "-")
    on = [f"--{flag.name}", f"-{flag.name}", f"--{dashed}", f"--{flag.name}=true"]
    off = [f"--no{flag.name}", f"--no-{dashed}", f"--no_{flag.name}", f"--{flag.name}=false"]
    for word in on:
        assert getattr(parse(["-p", "x", word]), flag.name) is True, word
    for word in off:
        assert getattr(parse(["-p", "x", word]), flag.name) is False, word


def test_short_names_are_those_of_llama_cpp():
    short = {flag.info.short: flag.name for flag in table() if flag.info.short}
    one = {"m": "model", "p": "prompt", "f": "file", "n": "n_predict", "c": "n_ctx"}
    assert short == one | {"gan": "grp_attn_n", "gaw": "grp_attn_w"}


def test_every_flag_of_the_issue_is_there():
    wanted = """model prompt file n_predict n_ctx keep context_shift temp top_k top_p min_p
        repeat_penalty repeat_last_n seed logprobs chat ignore_eos stop dtype cache_type_k
        cache_type_v n_ubatch json quiet tokens cells defrag_thold""".split()
    assert set(wanted) <= {flag.name for flag in table()}


@pytest.mark.parametrize("value", ["-1", "-2", "0"])
def test_a_negative_value_is_no_flag(value):
    assert options("-n", value).n_predict == int(value)


@pytest.mark.parametrize("text", ["--help", "-n", "--", "-", "a=b", "", "--json=1"])
def test_a_prompt_may_look_like_a_flag(text):
    assert options("-p", text).prompt == text
    assert options(f"--prompt={text}").prompt == text


def test_stop_may_come_several_times_and_other_flags_take_the_last():
    assert options("--stop", "a", "--stop=b", "-n", "1", "-n", "2").stop == ("a", "b")
    assert options("-n", "1", "-n", "2").n_predict == 2


OUTSIDE = {
    "n_predict": ["-3", "1.5", "x", "", "2147483648"],
    "n_ctx": ["-1", "1e3"],
    "keep": ["-2"],
    "temp": ["-0.1", "nan", "inf", "hot"],
    "top_k": ["-1"],
    "top_p": ["-0.1", "1.1", "nan"],
    "min_p": ["2"],
    "repeat_penalty": ["0", "-1"],
    "repeat_last_n": ["-1"],
    "seed": ["-1", "4294967296"],
    "logprobs": ["-1"],
    "dtype": ["f64", "F32"],
    "cache_type_k": ["q8_0"],
    "cache_type_v": [""],
    "rope": ["never"],
    "n_ubatch": ["0"],
    "defrag_thold": ["-0.1", "1.01", "nan"],
    "json": ["maybe"],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n in OUTSIDE for v in OUTSIDE[n]])
def test_values_outside_their_range(name, value, capsys):
    assert main(["run", "-p", "x", f"--{name}={value}"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1 and f"--{name}" in err and "is wanted" in err
    assert "see kvrt run --help" in err


MISTAKES = {
    "no prompt": ([], "the prompt is wanted once"),
    "two prompts": (["-p", "x", "-f", "y"], "found -p and -f"),
    "three prompts": (["-p", "x", "-f", "y", "--tokens", "z"], "found -p and -f and --tokens"),
    "chat with ids": (["--tokens", "z", "--chat"], "--chat needs text"),
    "empty stop": (["-p", "x", "--stop", ""], "--stop= is empty"),
    "logprobs as text": (["-p", "x", "--logprobs", "2"], "add --json"),
    "no value": (["-p"], "flag -p needs a value"),
    "a bare word": (["-p", "x", "words"], "unexpected argument 'words'"),
    "a bare dash": (["-p", "x", "-"], "unexpected argument '-'"),
    "unknown": (["-p", "x", "--zzz=3"], "unknown flag --zzz;"),
    "nearly": (["-p", "x", "--n-predikt", "3"], "did you mean --n_predict?"),
    "nearly, one dash": (["-p", "x", "-ignore-eso"], "did you mean --ignore_eos?"),
    "no flag to negate": (["-p", "x", "--nozzz"], "unknown flag --nozzz"),
    "a value to no switch": (["-p", "x", "--nojson=1"], "unknown flag --nojson"),
}


@pytest.mark.parametrize(("words", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(words, message, capsys):
    assert main(["run", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err
    assert err.startswith("kvrt: ") and err.count("\n") == 1 and err.endswith("\n")


@pytest.mark.parametrize("words", [[], ["walk"], ["--verbose"]])
def test_no_such_command(words, capsys):
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "the commands are: run" in err


def test_mistakes_have_their_own_type():
    with pytest.raises(UsageError, match="unknown flag"):
        parse(["--wat"])


@pytest.mark.parametrize("word", ["--help", "-h", "-help"])
def test_help_wins_over_mistakes_that_follow(word, capfdbinary):
    assert main(["run", "-n", "1", word, "--wat"]) == 0
    assert main([word]) == 0
    out, err = capfdbinary.readouterr()
    assert b"usage: kvrt run" in out and b"usage: kvrt COMMAND" in out and err == b""


def test_version(capfdbinary):
    assert main(["--version"]) == 0
    assert capfdbinary.readouterr().out.startswith(b"kvrt ")


@pytest.mark.parametrize("width", [60, 80, 100])
def test_help_names_every_flag_and_keeps_its_width(width):
    text = help_text(width)
    for flag in table():
        assert f"{flag.name} " in text and flag.info.help.split()[0] in text
    assert all(len(line) <= width for line in text.splitlines())


def test_help_imports_nothing_heavy():
    code = (
        "import sys\n"
        "from kvrt.cli.main import main\n"
        "assert main(['run', '--help']) == 0\n"
        "heavy = {'jax', 'jaxlib', 'numpy', 'flax', 'rich', 'models'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "--n_predict" in done.stdout and done.stderr == ""
