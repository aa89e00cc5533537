"""Text behind a session, and turns of a conversation that go on from what it holds."""

import dataclasses
import json

import gguf
import numpy as np
import pytest
from conftest import BOOK, PROMPT, text_of, tiny_gguf

from kvrt import session
from kvrt.cellcache.history import tokens
from kvrt.cli.process.interrupt import Interrupted
from kvrt.cli.run import generation, prompt, turns
from kvrt.cli.run.turns import HeldText, left_out
from kvrt.cli.session import explain
from kvrt.errors import UsageError
from kvrt_models import chat
from kvrt_models.gguf.file import open_gguf
from kvrt_models.tokenizer.encode import tokenizer_from_gguf

BOS, EOS = tiny_gguf.BOS, tiny_gguf.EOS
# What several families write, with the control tokens that the tiny vocabulary has.
CHATML = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
    "{{ '<|startoftext|>system\nBe kind<|endoftext|>\n' }}{% endif %}"
    "{{ '<|startoftext|>' + m['role'] + '\n' + m['content'] + '<|endoftext|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|startoftext|>assistant\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set first = "
    "messages[0]['content'] + '\n\n' %}{% set turns = messages[1:] %}{% else %}"
    "{% set first = '' %}{% set turns = messages %}{% endif %}{% for m in turns %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<' + ('model' if m['role'] == 'assistant' else 'user') + '>\n' }}"
    "{{ (first if loop.first else '') + (m['content'] | trim) + '<|endoftext|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<model>\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ '[INST] ' + m['content'] + ' [/INST]' }}{% elif m['role'] == 'assistant' %}"
    "{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
TEMPLATES = {"chatml": CHATML, "gemma": GEMMA, "mistral": MISTRAL}


def with_template(path, template):
    """A tiny model with a chat template."""
    add = gguf.GGUFWriter.add_add_bos_token

    def add_both(writer, value):
        add(writer, value)
        writer.add_chat_template(template)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_add_bos_token", add_both)
        return tiny_gguf.write_gguf(path / "tiny.gguf", tiny_gguf.TinyModel(n_layers=1))


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    return with_template(tmp_path_factory.mktemp("talker"), CHATML)


@pytest.fixture(scope="module")
def metadata(tiny):
    return dict(open_gguf(tiny).metadata)


@pytest.fixture(scope="module")
def tokenizers(metadata):
    """A tokenizer with each template."""
    return {
        name: tokenizer_from_gguf(metadata | {"tokenizer.chat_template": template})
        for name, template in TEMPLATES.items()
    }


def written(ids, tokenizer):
    return turns.text_of(ids, tokenizer)


def rendered(tokenizer, *contents, system=None):
    messages = [] if system is None else [{"role": "system", "content": system}]
    for i, content in enumerate(contents):
        messages.append({"role": "assistant" if i % 2 else "user", "content": content})
    return chat.render_template(tokenizer.chat_template, messages, bos=BOS, eos=EOS)


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
def test_turns_are_what_the_template_writes_of_all(tokenizers, name):
    tokenizer = tokenizers[name]
    end = tokenizer.eos_id
    space = " " if name == "mistral" else ""
    ids = turns.first_turn("the sand", None, tokenizer)
    assert written(ids, tokenizer) == rendered(tokenizer, "the sand")
    said = ["the sand"]
    # Ended by its token; cut short with a token that is not evaluated; ended in the cache.
    for answer, newest, more in [("of it", end, []), ("and o", None, []), ("in", None, [end])]:
        ids = [*ids, *tokenizer.encode(space + answer, add_special=False), *more]
        if newest is None and not more:
            ids, newest = ids[:-1], ids[-1]
        turn = turns.next_turn(HeldText(ids=ids, newest=newest, name="a.kv"), "of", None, tokenizer)
        assert not turn.unanswered and turn.rewritten is None
        assert turn.ids[: len(ids)] == ids and turn.n_kept == len(ids)
        ids, said = turn.ids, [*said, answer, "of"]
        assert written(ids, tokenizer) == rendered(tokenizer, *said)


def test_an_end_of_another_kind_is_replaced(tokenizers):
    tokenizer = tokenizers["chatml"]
    vocab = dataclasses.replace(tokenizer.vocab, eos_ids=frozenset({7, tokenizer.eos_id}))
    tokenizer = dataclasses.replace(tokenizer, vocab=vocab)
    ids = [*turns.first_turn("the", None, tokenizer), 8]
    one, two = (
        turns.next_turn(HeldText(ids=ids, newest=n, name="a"), "of", None, tokenizer).ids
        for n in (7, tokenizer.eos_id)
    )
    assert one == two and one[len(ids)] == tokenizer.eos_id and 7 not in one


DATED = CHATML.replace("Be kind", "Today is {{ strftime_now('%d %B %Y') }}. Be kind").replace(
    "'<|startoftext|>system\nToday is {{ strftime_now('%d %B %Y') }}. Be kind<|endoftext|>\n'",
    "'<|startoftext|>system\nToday is ' + strftime_now('%d %B %Y') + '. Be kind<|endoftext|>\n'",
)


def test_a_conversation_of_another_day_is_written_with_todays_date(tokenizers):
    tokenizer = tokenizers["chatml"]
    vocab = dataclasses.replace(tokenizer.vocab, chat_template=DATED)
    tokenizer = dataclasses.replace(tokenizer, vocab=vocab)
    before = turns.render_turns(tokenizer, None, ["the"], now="2024-02-29T12:00:00")
    assert "29 February 2024. Be kind" in before
    ids = tokenizer.encode(before + "of it", parse_special=True)
    so_far = HeldText(ids=ids, newest=tokenizer.eos_id, name="a.kv")
    turn = turns.next_turn(so_far, "in", None, tokenizer)
    assert written(turn.ids, tokenizer) == rendered(tokenizer, "the", "of it", "in")
    assert turn.rewritten is not None and turn.n_kept < 20 < len(ids)
    assert "the session holds" in str(turn.rewritten) and "2024. Be kind" in str(turn.rewritten)


def test_a_message_that_waits_is_not_repeated(tokenizers):
    tokenizer = tokenizers["chatml"]
    first = turns.first_turn("the sand", None, tokenizer)
    told = HeldText(ids=first, newest=None, name="a.kv")
    assert turns.next_turn(told, "the sand", None, tokenizer).ids == first
    other = turns.next_turn(told, "of", None, tokenizer)
    assert other.unanswered
    assert written(other.ids, tokenizer) == rendered(tokenizer, "the sand", "", "of")
    again = turns.next_turn(
        HeldText(ids=other.ids, newest=None, name="a.kv"), "of", None, tokenizer
    )
    assert again.ids == other.ids


def test_a_system_message_comes_first_and_stays(tokenizers):
    for name in ("chatml", "gemma"):
        tokenizer = tokenizers[name]
        ids = turns.first_turn("the", "Bé brief", tokenizer)
        assert written(ids, tokenizer) == rendered(tokenizer, "the", system="Bé brief")
        told = HeldText(ids=[*ids, 8], newest=tokenizer.eos_id, name="a.kv")
        alone = turns.next_turn(told, "of", None, tokenizer)
        assert turns.next_turn(told, "of", "Bé brief", tokenizer) == alone
        with pytest.raises(UsageError, match=r"a\.kv: .* did not begin with this system message"):
            turns.next_turn(told, "of", "Be long", tokenizer)
    with pytest.raises(UsageError, match="no place for a system message"):
        turns.first_turn("the", "Be brief", tokenizers["mistral"])


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[-1]['content'] }}",
        "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}<model>",
        "{% for m in messages | reverse %}{{ m['content'] }}{% endfor %}<model>",
    ],
)
def test_a_template_that_forgets_cannot_go_on(tokenizers, template):
    tokenizer = tokenizers["chatml"]
    vocab = dataclasses.replace(tokenizer.vocab, chat_template=template)
    tokenizer = dataclasses.replace(tokenizer, vocab=vocab)
    with pytest.raises(UsageError, match="one behind the other"):
        turns.next_turn(HeldText(ids=[8], newest=None, name="a.kv"), "of", None, tokenizer)


def ids_of(path):
    return tokens(session.read(path).history, 0).tolist()


def told(done):
    assert done.code == 0, done.err
    return json.loads(done.out)


@pytest.mark.slow
def test_a_conversation_goes_on(go, talker, tmp_path, tokenizers):
    path, tokenizer = tmp_path / "a.kv", tokenizers["chatml"]
    talk = ["-m", talker, "-c", 256, "--chat", "--session", path, "--json", "-n", 6]
    first = told(go(*talk, "--quiet"))
    held = turns.first_turn(PROMPT, None, tokenizer)
    assert ids_of(path) == [*held, *first["tokens"][:-1]]
    done = go(*talk, "-p", "of the", prompt=False)
    second = told(done)
    assert f"{path}: {len(held) + 5} tokens restored" in done.err and "follow" in done.err
    end = tokenizer.encode(f"{EOS}\n", parse_special=True)
    turn = turns.first_turn("of the", None, tokenizer)
    turn = turn[len(tokenizer.encode(f"{BOS}system\nBe kind{EOS}\n", parse_special=True)) :]
    held = [*held, *first["tokens"], *end, *turn]
    assert ids_of(path) == [*held, *second["tokens"][:-1]]
    assert second["n_recomputed"] == second["n_prompt"] - second["n_restored"]


@pytest.mark.slow
def test_a_text_is_no_conversation(go, talker, tmp_path, monkeypatch):
    path = tmp_path / "a.kv"
    assert go("-m", talker, "--session", path, "-n", 0).code == 0
    kept = path.read_bytes()
    for more in ([], ["--append"]):
        done = go("-m", talker, "--session", path, "--chat", *more)
        assert done.code == 2 and "holds no conversation" in done.err and "--append" in done.err
    assert path.read_bytes() == kept
    words = ["--session", path, "--chat", "--overwrite", "--quiet", "-n", 1]
    assert go("-m", talker, *words).code == 0
    assert f"{BOS}user" in "".join(tiny_gguf.vocabulary()[i] for i in ids_of(path))


@pytest.mark.slow
def test_append_goes_on_behind_what_is_held(go, book, prefilled, tokenizers):
    held = ids_of(prefilled)
    more = tokenizers["chatml"].encode(" and more", add_special=False)
    add = ["--session", prefilled, "--append", "-p", " and more", "--session_all", "--json"]
    done = go(*add, "-n", 4, prompt=False)
    first = told(done)
    assert first["n_restored"] == len(held) and f"{len(more)} follow" in done.err
    assert ids_of(prefilled) == [*held, *more, *first["tokens"][:-1]]
    book.write_text(BOOK + " and more")
    plain = told(go("-f", book, "-n", 4, "--json", prompt=False))
    assert plain["tokens"] == first["tokens"]
    # The newest token was sampled and not evaluated: it is held all the same.
    told(go(*add, "-n", 0, "--quiet", prompt=False))
    assert ids_of(prefilled) == [*held, *more, *first["tokens"], *more]


@pytest.mark.slow
def test_an_ended_text_goes_on_without_its_end(go, prefilled, tokenizers):
    old, end = session.read(prefilled), tokenizers["chatml"].eos_id
    draws = {0: session.SamplingState(token=end, n_drawn=1, sampling={"temp": 0.25})}
    session.save(prefilled, dataclasses.replace(old, draws=draws))
    held = ids_of(prefilled)
    assert go("--session", prefilled, "--append", "-n", 0).code == 0
    assert ids_of(prefilled) == [*held, *tokenizers["chatml"].encode(PROMPT)]


def test_append_makes_a_session_and_reads_ids(go, kvrt, tiny, tmp_path):
    path, ids = tmp_path / "a.kv", tmp_path / "ids.json"
    assert go("--session", path, "--append", "-n", 0).code == 0
    first = ids_of(path)
    ids.write_text("[5, 6]")
    done = kvrt("prefill", "-m", tiny, "--tokens", ids, "-o", path, "--append", "--quiet")
    assert (done.code, done.err) == (0, "") and ids_of(path) == [*first, 5, 6]


def test_what_cannot_be_appended(go, tmp_path, prefilled):
    kept = prefilled.read_bytes()
    for words, what in [
        (["--session", tmp_path], "name the one to append to"),
        (["--session", prefilled, "-p", ""], "the text to append is empty"),
        (["--session", prefilled, "-m", "nowhere"], "nowhere"),
    ]:
        done = go(*words, "--append")
        assert done.code and what in done.err and done.out == b""
    assert prefilled.read_bytes() == kept


@pytest.mark.slow
def test_a_book_and_a_question_without_a_session(go, book, tmp_path):
    both = tmp_path / "both.txt"
    both.write_text(f"{BOOK}\n\n{PROMPT}")
    assert go("-f", book).out == go("-f", both, prompt=False).out


@pytest.mark.slow
def test_half_of_a_text_is_not_appended(go, prefilled, tmp_path, monkeypatch):
    ids, kept, steps = tmp_path / "ids.json", prefilled.read_bytes(), generation.Reading._steps
    ids.write_text(json.dumps([5] * 12))

    def stopped(self, runtime, interrupt, show):
        def check():
            if self.n_done >= 8:
                raise Interrupted

        interrupt.check = check
        steps(self, runtime, interrupt, show)

    add = ["--session", prefilled, "--append", "--tokens", ids, "--n_ubatch", 8, "-n", 0]
    with monkeypatch.context() as patch:
        patch.setattr(generation.Reading, "_steps", stopped)
        done = go(*add, prompt=False)
    assert done.code == 130 and "stays as it was" in done.err
    assert prefilled.read_bytes() == kept
    held = ids_of(prefilled)
    assert go(*add, "--quiet", prompt=False).code == 0
    assert ids_of(prefilled) == [*held, *([5] * 12)]


@pytest.mark.slow
def test_append_to_a_text_that_shifted(go, tmp_path):
    path = tmp_path / "a.kv"
    words = ["--session", path, "--ignore_eos", "--quiet", "--json"]
    first = told(go(*words, "--session_all", "-n", 100))
    assert first["n_dropped"] > 0
    n = len(ids_of(path))
    second = told(go(*words, "--append", "-n", 0))
    # Nothing is computed again, though keys and values behind a hole are no longer exact.
    assert second["n_restored"] == n and second["n_recomputed"] == 4
    assert text_of(ids_of(path)).endswith(text_of([first["tokens"][-1]]) + PROMPT)


def test_a_prompt_has_its_system_message(tmp_path):
    from kvrt.cli.flags import parse

    options = parse.parse_flags(["-p", "x", "--chat", "--system", "y"])
    assert options is not None and prompt.read_prompt(options).system == "y"


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
DROPPING = {
    "all": template(ALL),
    "thoughts": template(NO_THOUGHTS),
    "begun thoughts": template(NO_THOUGHTS, "<think>\n"),
    "tools": template(NO_TOOLS),
}


def tokenizer_of(metadata, name):
    return tokenizer_from_gguf(metadata | {"tokenizer.chat_template": DROPPING[name]})


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
    return with_template(tmp_path_factory.mktemp("thinker"), DROPPING["thoughts"])


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
