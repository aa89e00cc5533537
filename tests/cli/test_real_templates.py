"""Conversations by turns with 70 real chat templates: always their text of all messages."""

import functools
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from kvrt.cli.run import turns
from kvrt_models import chat, chat_child
from kvrt_models.tokenizer.encode import tokenizer_from_gguf
from kvrt_models.tokenizer.vocab import Kind

sys.path.append(str(Path(__file__).parents[1] / "models"))
import tiny_vocab
from llama_cpp_files import llama_cpp_files

pytestmark = pytest.mark.model

CONTROL = re.compile(r"<[|｜][^\s<>|｜]+[|｜]>|<\w+_of_\w+>|\[/?[A-Z_]{3,}\]|</?s>")  # noqa: RUF001
PLAIN = ("It is a river.", "No.", "Yes, of course")
THOUGHTS = ("<think>\nA river?\n</think>\n\nIt is a river.", "No.", "Yes")


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch):
    """A process for each of 3,000 renderings would take minutes."""
    monkeypatch.setattr(
        chat, "_ask", lambda request: chat_child._answer(chat_child.json.loads(request))
    )


@functools.cache
def tokenizer_of(template):
    """A byte-level vocabulary with the control tokens that a template names."""
    metadata = tiny_vocab.metadata("bpe")
    names = sorted({"<s>", "</s>", *CONTROL.findall(template)} - {*metadata[P + "tokens"]})
    tokens = [*metadata[P + "tokens"], *names]
    kinds = [*metadata[P + "token_type"], *(Kind.CONTROL for _ in names)]
    roles = {
        P + f"{role}_token_id": tokens.index(n) for role, n in (("bos", "<s>"), ("eos", "</s>"))
    }
    return tokenizer_from_gguf(
        metadata
        | {P + "tokens": tokens, P + "token_type": kinds, "tokenizer.chat_template": template}
        | roles
    )


P = "tokenizer.ggml."


def by_turns(tokenizer, answers, system=None):
    """What a session holds after each message, and whether the template rewrote what it held."""
    messages = [f"Question {i}?" for i in range(len(answers) + 1)]
    ids, rewritten = turns.first_turn(messages[0], system, tokenizer), []
    texts = [turns.text_of(ids, tokenizer)]
    for answer, message in zip(answers, messages[1:], strict=True):
        held = [*ids, *tokenizer.encode(answer, add_special=False)]
        so_far = turns.HeldText(ids=held, newest=tokenizer.eos_id, name="a.kv")
        turn = turns.next_turn(so_far, message, system, tokenizer)
        assert turn.ids[: turn.n_kept] == held[: turn.n_kept]
        ids = turn.ids
        rewritten.append(turn.rewritten is not None or turn.n_kept < len(held))
        texts.append(turns.text_of(ids, tokenizer))
    return texts, rewritten


def whole(tokenizer, answers, n, system=None):
    said = [x for i in range(n) for x in (f"Question {i}?", answers[i])]
    return turns.render_turns(tokenizer, system, [*said, f"Question {n}?"])


# Of the 70, those whose text goes on behind an answer, and those that write it otherwise then.
COUNTS = {("plain", None): (38, 32), ("plain", "Be brief."): (36, 33)}
COUNTS |= {("thoughts", None): (32, 38), ("thoughts", "Be brief."): (30, 39)}


@pytest.mark.parametrize(("answers", "system"), COUNTS)
def test_turns_are_the_template_rendered_whole(answers, system):
    said, counts = {"plain": PLAIN, "thoughts": THOUGHTS}[answers], Counter()
    for file in sorted((llama_cpp_files() / "models" / "templates").glob("*.jinja")):
        if system and file.name == "google-gemma-2-2b-it.jinja":
            continue  # It refuses a system message.
        tokenizer = tokenizer_of(file.read_text("utf-8"))
        texts, rewritten = by_turns(tokenizer, said, system)
        for n, text in enumerate(texts):
            expected = whole(tokenizer, said, n, system)
            assert text.removeprefix("<s>") == expected.removeprefix("<s>"), (file.name, n)
        counts[any(rewritten)] += 1
    assert (counts[False], counts[True]) == COUNTS[answers, system]
