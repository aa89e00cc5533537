"""The prompt that a terminal shows before its continuation."""

import pytest
from conftest import PROMPT, tiny_gguf

from kvrt.cli.run import run_command
from kvrt_models.gguf.file import open_gguf
from kvrt_models.tokenizer.encode import tokenizer_from_gguf


@pytest.fixture(scope="module")
def tokenizer(tiny):
    """Of the tiny model."""
    return tokenizer_from_gguf(open_gguf(tiny).metadata)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Once upon a time", "Once upon a time"),
        (" the sand", "the sand"),
        ("a\n\tb\x1b[31m\r", "a\n\tb\\x1b[31m\\r"),
        ("word " * 200, "…" + (" word" * 79) + " "),
        ("x" * 500, "…" + "x" * 400),
    ],
)
def test_the_ending_of_a_prompt(tokenizer, text, found):
    assert run_command.prompt_ending(tokenizer.encode(text), tokenizer) == found


def test_a_long_prompt_is_cut_between_characters(tokenizer):
    shown = run_command.prompt_ending(tokenizer.encode("ä" * 600), tokenizer)
    assert set(shown) == {"…", "ä"} and len(shown) > 100


def test_control_tokens_are_not_shown(tokenizer):
    end = tiny_gguf.vocabulary().index(tiny_gguf.EOS)
    assert run_command.prompt_ending([end, *tokenizer.encode("the"), end], tokenizer) == "the"


@pytest.mark.slow
def test_standard_output_is_the_text_alone(go):
    done = go()
    assert not done.out.startswith(PROMPT.encode()) and PROMPT not in done.err


@pytest.mark.slow
@pytest.mark.parametrize(("more", "n_shown"), [([], 1), (["--quiet"], 0), (["--json"], 0)])
def test_quiet_and_json_show_no_prompt(go, monkeypatch, more, n_shown):
    shown = []
    monkeypatch.setattr(
        run_command, "show_prompt", lambda ids, text: shown.append(text.decode(ids))
    )
    assert go("-n", 8, *more).code == 0
    assert shown == [PROMPT] * n_shown
