"""What `kvrt run` writes and where: text, summary, JSON, the cell map."""

import json
import math

import pytest
from conftest import PROMPT, text_of, tiny_gguf, vocabulary

from kvrt.cli.process import output
from kvrt.cli.run import run_command
from kvrt.program.programs import Programs
from kvrt_models.gguf.file import open_gguf
from kvrt_models.tokenizer.encode import tokenizer_from_gguf

FIELDS = """model weights n_prompt tokens text finish_reason seed n_ctx n_kv cells_used n_shift
    n_dropped n_defrag programs n_compiles n_from_disk compile_s attention type_k type_v prefill_s
    decode_s prefill_tps decode_tps rss_bytes approximate approximations""".split()


@pytest.fixture(scope="module")
def plain(request):
    """A run with no flag but the usual ones, as JSON; made by the first test that asks."""
    return {}


@pytest.fixture
def told(plain, go):
    if not plain:
        done = go("--json")
        assert (done.code, done.err) == (0, "")
        plain.update(json.loads(done.out))
    return plain


@pytest.mark.slow
def test_json_is_one_object_with_the_fields_of_the_issue(told):
    assert list(told) == FIELDS
    assert (told["model"], told["weights"]) == ("tiny", "int8")
    assert told["finish_reason"] == "length"
    assert (told["n_ctx"], len(told["tokens"])) == (64, 24)
    # The last token was drawn but not evaluated.
    assert told["cells_used"] == told["n_kv"] == told["n_prompt"] + 23
    assert (told["n_shift"], told["n_dropped"], told["n_defrag"]) == (0, 0, 0)
    assert told["n_compiles"] == 8 and told["compile_s"] > 0
    assert told["prefill_tps"] == pytest.approx(told["n_prompt"] / told["prefill_s"])
    assert told["decode_tps"] == pytest.approx(23 / told["decode_s"])
    assert 10**7 < told["rss_bytes"] < 10**11
    assert told["text"] == text_of(told["tokens"])


def test_standard_output_is_the_text_and_nothing_else(go, told):
    done = go()
    assert done.code == 0
    assert done.out.decode() == told["text"]
    lines = done.err.splitlines()
    # The empty line ends the text's last one where both streams share a screen.
    assert lines[0] == "" and [line.split()[0] for line in lines[1:]] == [
        "prompt",
        "generated",
        "compiled",
        "weights",
        "attention",
        "cache",
        "upkeep",
    ]
    assert f"{told['n_prompt']} tokens in" in lines[1] and lines[1].endswith("tokens/s")
    assert "24 tokens in" in lines[2] and lines[2].endswith("tokens/s; length reached")
    assert "8 programs in" in lines[3]
    used = told["cells_used"]
    assert lines[5] == "attention  chunked: no kernel for cpu"
    assert told["attention"] == {"implementation": "chunked", "reason": "no kernel for cpu"}
    assert f"{used} of 64 cells used, n_kv {used}" in lines[6]
    assert lines[4] == "weights    int8 (default on cpu)"
    assert lines[7].endswith("0 context shifts, 0 tokens dropped, 0 defrags")


def test_quiet_is_silent(go, told):
    done = go("--quiet")
    assert (done.code, done.err, done.out.decode()) == (0, "", told["text"])


@pytest.mark.slow
def test_files_and_ids_are_prompts_as_well(go, told, tmp_path):
    text = tmp_path / "prompt.txt"
    text.write_text(PROMPT + "\n")
    ids = tmp_path / "ids.json"
    # "the", then " s", "and": what the merges make of the prompt.
    ids.write_text(json.dumps([vocabulary().index(word) for word in (b"the", b" s", b"and")]))
    ways = [(["-f", text], b""), (["-f", "-"], PROMPT.encode()), (["--tokens", ids], b"")]
    ways.append((["--tokens", "-"], ids.read_bytes()))
    for words, stdin in ways:
        done = go(*words, "--quiet", stdin=stdin, prompt=False)
        assert (done.code, done.out.decode(), done.err) == (0, told["text"], ""), words


@pytest.mark.slow
def test_a_stop_text_across_token_borders(go, told):
    parts = [text_of([token]) for token in told["tokens"]]
    # The end of one token, all of the next and the start of the third.
    at = next(i for i in range(4, 20) if all(len(p) > 1 for p in (parts[i], parts[i + 2])))
    stop = parts[at][-1] + parts[at + 1] + parts[at + 2][0]
    before = told["text"][: told["text"].index(stop)]
    assert before and go("--quiet", "--stop", stop).out.decode() == before
    done = json.loads(go("--json", "--stop", "never", "--stop", stop).out)
    assert (done["finish_reason"], done["text"]) == ("stop_string", before)
    assert len(done["tokens"]) <= at + 3


@pytest.mark.slow
def test_logprobs_are_the_best_of_each_token(go, told):
    done = json.loads(go("--json", "--logprobs", 3, "-n", 5).out)
    assert list(done) == [*FIELDS, "logprobs"]
    assert done["tokens"] == told["tokens"][:5]
    for token, entry in zip(done["tokens"], done["logprobs"], strict=True):
        ids, texts, values = zip(*(x.values() for x in entry["best"]), strict=True)
        assert [list(x) for x in entry["best"]] == 3 * [["id", "text", "logprob"]]
        assert list(entry) == ["id", "text", "best"] and entry["id"] == token == ids[0]
        # A control token says nothing and has a name.
        assert list(texts) == [text_of([i]) or tiny_gguf.vocabulary()[i] for i in ids]
        assert entry["text"] == texts[0] != ""
        assert len(set(ids)) == 3 and list(values) == sorted(values, reverse=True)
        assert 0 > values[0] and sum(map(math.exp, values)) < 1


@pytest.mark.slow
def test_the_seed_decides(go):
    # Flat enough for control tokens and bytes that never become a character.
    flat = ["--temp", 50, "--top_k", 0, "--top_p", 1, "--min_p", 0, "--ignore_eos", "-n", 48]
    first, again, other = (
        json.loads(go(*flat, "--json", "--seed", seed).out) for seed in (7, 7, 4294967295)
    )
    assert first["tokens"] == again["tokens"] and first["tokens"] != other["tokens"]
    for told in (first, other):
        assert told["text"] == text_of(told["tokens"]) and "\ufffd" in told["text"]


def test_the_cell_map_is_on_standard_error(go, told):
    done = go("--cells", "--quiet")
    used = told["cells_used"]
    cells, legend = done.err.splitlines()
    assert done.out.decode() == told["text"]
    assert cells == " 0 " + ("0" * used).ljust(64, ".")
    assert legend.startswith(f"cells: {used} of 64 cells used, n_kv {used}; 0-9a-z owner")


def test_all_programs_are_there_before_the_first_token_is_shown(go, monkeypatch):
    seen, wait, write = [], Programs.wait, output.write_generated

    def waiting(self, progress):
        said = []
        wait(self, lambda *n: said.append(n[:2]))
        seen.append(said)

    def writing(text):
        seen.append(text)
        write(text)

    monkeypatch.setattr(Programs, "wait", waiting)
    monkeypatch.setattr(output, "write_generated", writing)
    assert go("-n", 5).code == 0
    (*_, almost, done), *texts = seen
    assert almost == (done[0] - 1, done[1]) and done[0] == done[1] and texts


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
