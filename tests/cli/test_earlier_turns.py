"""What a template drops of earlier answers is found, and what it costs is told."""

import dataclasses
import json

import gguf
import numpy as np
import pytest
from conftest import tiny_gguf

from kvrt import session
from kvrt.cellcache.history import tokens
from kvrt.cli.run.turns import left_out
from kvrt.cli.session import explain
from kvrt_models.gguf.file import open_gguf
from kvrt_models.tokenizer.encode import tokenizer_from_gguf

BOS, EOS = tiny_gguf.BOS, tiny_gguf.EOS


def template(answer, begins=""):
    """ChatML; `answer` is what is written of an answer, `begins` what a new one begins with."""
    return (
        "{% for m in messages %}{{ '<|startoftext|>' + m['role'] + '\n' }}"
        "{% if m['role'] == 'assistant' and not loop.last %}{{ (" + answer + ") }}"
        "{% else %}{{ m['content'] }}{% endif %}{{ '<|endoftext|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|startoftext|>assistant\n" + begins + "' }}{% endif %}"
    )


ALL = "m['content']"
NO_THOUGHTS = "m['content'].split('</think>')[-1].lstrip('\n')"
NO_TOOLS = (
    "m['content'] if '<tool_call>' not in m['content'] else "
    "m['content'].split('<tool_call>')[0] + m['content'].split('</tool_call>')[-1]"
)
TEMPLATES = {
    "all": template(ALL),
    "thoughts": template(NO_THOUGHTS),
    "begun thoughts": template(NO_THOUGHTS, "<think>\n"),
    "tools": template(NO_TOOLS),
}


@pytest.fixture(scope="module")
def metadata(tiny):
    return dict(open_gguf(tiny).metadata)


def tokenizer_of(metadata, name):
    return tokenizer_from_gguf(metadata | {"tokenizer.chat_template": TEMPLATES[name]})


def held(tokenizer, *said, ended=True):
    """Tokens of a conversation as sampled, each answer whole, the last one perhaps not ended."""
    template = tokenizer.chat_template
    begins = "<think>\n" if "assistant\n<think>\n'" in template else ""
    text = "".join(
        f"{BOS}{('user', 'assistant')[i % 2]}\n{begins if i % 2 else ''}{x}{EOS}\n"
        for i, x in enumerate(said)
    )
    if len(said) % 2:
        text += f"{BOS}assistant\n{begins}"
    else:
        text = text.removesuffix("\n") if ended else text.removesuffix(f"{EOS}\n")
    return tokenizer.encode(text, parse_special=True)


THOUGHT = "<think>\nof the sand\n</think>\n\n"


def test_thoughts_of_earlier_answers(metadata):
    tokenizer = tokenizer_of(metadata, "thoughts")
    first = held(tokenizer, "the", ended=False)
    ids = held(tokenizer, "the", f"{THOUGHT}it is", "of", f"{THOUGHT}not", "and", "mist")
    found = left_out(ids, tokenizer)
    thought = tokenizer.encode(THOUGHT, add_special=False)
    assert found is not None and found.first == len(first)
    assert found.n_answers == 2 and found.n_held == len(ids)
    assert found.n_tokens == 2 * len(thought)
    assert found.text == THOUGHT.strip()
    assert found.n_recomputed == len(ids) - found.first - found.n_tokens
    # The last answer too, once a message follows it.
    assert left_out(held(tokenizer, "the", f"{THOUGHT}it"), tokenizer) is not None


def test_what_is_written_again_is_not_told(metadata):
    many = ["the", f"{THOUGHT}it is", "of", "<tool_call>\nsand()\n</tool_call>", "and", "  mist "]
    for name, said in [("all", many), ("thoughts", ["the", "it is", "of", "not"]), ("all", ["a"])]:
        tokenizer = tokenizer_of(metadata, name)
        assert left_out(held(tokenizer, *said), tokenizer) is None


def test_thoughts_that_the_template_begins(metadata):
    tokenizer = tokenizer_of(metadata, "begun thoughts")
    found = left_out(held(tokenizer, "the", "of the sand\n</think>\n\nit", "of"), tokenizer)
    assert found is not None and found.text == "<think>\nof the sand\n</think>"


def test_tool_lines_in_the_middle_of_an_answer(metadata):
    tokenizer = tokenizer_of(metadata, "tools")
    said = ["the", "I ask\n<tool_call>\nsand()\n</tool_call>\nand say", "of", "it"]
    found = left_out(held(tokenizer, *said), tokenizer)
    assert found is not None and found.text.startswith("<tool_call>") and found.n_answers == 1


@pytest.mark.parametrize("template", ["{{ messages[-1]['content'] }}", None, "{{ boom() }}"])
def test_a_template_that_renders_no_conversation_says_nothing_here(metadata, template):
    tokenizer = tokenizer_of(metadata, "all")
    vocab = dataclasses.replace(tokenizer.vocab, chat_template=template)
    assert left_out([5, 6, 7], dataclasses.replace(tokenizer, vocab=vocab)) is None


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    """A tiny model whose template drops thoughts."""
    add = gguf.GGUFWriter.add_add_bos_token

    def with_template(writer, value):
        add(writer, value)
        writer.add_chat_template(TEMPLATES["thoughts"])

    path = tmp_path_factory.mktemp("thinker") / "tiny.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_add_bos_token", with_template)
        return tiny_gguf.write_gguf(path, tiny_gguf.TinyModel(n_layers=1))


def test_what_a_prompt_leaves_out_of_a_text():
    held = np.arange(100, 140)
    for n, wanted in [
        (7, [*range(100, 110), *range(117, 140)]),
        (6, [*range(100, 110), 1, *range(117, 140)]),  # tokenized otherwise where parts meet
        (0, [*range(100, 110), 1, 2, 3, 4, *range(117, 140)]),
        (0, [*range(100, 110), *range(117, 120)]),
    ]:
        assert explain._n_left_out(held, np.array(wanted), 10) == n


@pytest.mark.slow
def test_a_conversation_that_continues_and_explain_say_what_it_costs(
    kvrt, go, thinker, metadata, tmp_path
):
    tokenizer, path = tokenizer_of(metadata, "thoughts"), tmp_path / "a.kv"
    ids, new = tmp_path / "ids.json", tmp_path / "new.json"
    said = ["the", f"{THOUGHT}it is the rest of the land", "of"]
    held_ids = held(tokenizer, *said)
    ids.write_text(json.dumps(held_ids))
    words = ["-m", thinker, "--tokens", ids]
    assert kvrt("prefill", *words, "-c", 256, "-o", path, "--quiet").code == 0
    found = left_out(held_ids, tokenizer)
    assert found is not None and str(found).startswith(
        f"the chat template leaves {found.n_tokens} tokens of an earlier answer out, the first at "
        f'token {found.first} ("<think>\\nof the sand'
    )
    asks = ["explain", path, "-m", thinker]
    done = kvrt(*asks, "--chat", "-p", "and")
    assert str(found) in done.out.decode()
    told = json.loads(kvrt(*asks, "--chat", "-p", "and", "--json").out)
    assert told["left_out_by_template"] == found.fields()
    # Who renders it anew without them computes what follows again.
    again = held(tokenizer, "the", "it is the rest of the land", "of")
    new.write_text(json.dumps(again))
    told = json.loads(kvrt(*asks, "--tokens", new, "--json").out)
    assert told["first_difference"]["n_left_out"] == found.n_tokens
    assert told["n_evaluated"] == found.n_recomputed
    text = kvrt(*asks, "--tokens", new).out.decode()
    assert (
        f"leaves {found.n_tokens} held tokens out there, as chat templates do with thoughts" in text
    )
    # A run does so too, says where, and keeps the former session.
    words = ["-m", thinker, "-c", 256, "--chat", "--session", path, "-p", "and", "-n", 2]
    done = go(*words, prompt=False)
    assert done.code == 0, done.err
    assert 'now writes "it is the rest' in done.err and "computed anew from token" in done.err
    kept = tokens(session.read(path).history, 0).tolist()
    assert kept[: len(again)] == again  # the last answer came without thoughts
    assert tokens(session.read(f"{path}~").history, 0).tolist() == held_ids
