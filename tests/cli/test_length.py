"""How long `kvrt run` goes on: -n, stops, a full context, and context shifts."""

import dataclasses
import json
import re

import pytest
from conftest import text_of

from kvrt import AttentionSinks, ContextShift
from kvrt.cli.flags import parse
from kvrt.cli.flags.evaluate import RunOptions
from kvrt.cli.setup import config
from kvrt.errors import BadConfig, BadSession
from kvrt_models.families.shared.registry import spec_from_gguf
from kvrt_models.gguf.file import open_gguf
from kvrt_models.tokenizer.encode import tokenizer_from_gguf


def json_of(done) -> dict:
    # A text that is not exact is said to be.
    assert done.code == 0 and all(x.startswith("exactness") for x in done.err.splitlines())
    return json.loads(done.out)


def with_end(path, token: int, new):
    """A copy of a model file whose end-of-text token is another."""
    key = b"tokenizer.ggml.eos_token_id"
    data = path.read_bytes()
    at = data.index(key) + len(key) + 4  # the type of the value stands before it
    new.write_bytes(data[:at] + token.to_bytes(4, "little") + data[at + 4 :])
    assert open_gguf(new).metadata[key.decode()] == token
    return new


def spec_of(path):
    opened = open_gguf(path)
    return spec_from_gguf(opened.metadata, opened.tensors)


def test_no_token_is_wanted(go):
    told = json_of(go("--json", "-n", 0))
    assert (told["tokens"], told["text"], told["finish_reason"]) == ([], "", "length")
    assert told["cells_used"] == told["n_prompt"] == 3 and told["decode_tps"] is None


def test_a_prompt_of_exactly_the_context_needs_no_cell_more(go, tmp_path):
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(list(range(64))))
    told = json_of(go("--json", "-n", 0, "--tokens", ids, prompt=False))
    assert told["cells_used"] == told["n_prompt"] == 64
    done = go("-n", 1, "--tokens", ids, "--nocontext_shift", prompt=False)
    assert done.code == 2 and done.out == b"" and done.err.count("\n") == 1
    assert "the prompt has 64 tokens, the context 64 cells, and 65 are needed" in done.err


@pytest.mark.slow
def test_a_prompt_longer_than_the_context_is_read_in_parts(go, tmp_path):
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps([i % 60 for i in range(150)]))
    done = go("--json", "-n", 4, "--keep", 2, "--tokens", ids, prompt=False)
    told = json.loads(done.out)
    assert done.code == 0 and done.err.count("\n") == 2
    assert "the prompt has 150 tokens, the context 64 cells: older tokens are dropped" in done.err
    assert told["n_prompt"] == 150 and len(told["tokens"]) == 4
    assert told["cells_used"] == 150 + 3 - told["n_dropped"] and told["n_shift"] > 1
    full = go("-n", 4, "--nocontext_shift", "--tokens", ids, prompt=False)
    assert full.code == 2 and "raise -c to 154, drop older tokens" in full.err


@pytest.mark.slow
def test_until_the_context_is_full_is_a_wish_and_no_error(go):
    told = json_of(go("--json", "-n", -2))
    assert told["finish_reason"] == "context_full"
    # One token more than cells: the last is drawn from the row that filled the cache.
    assert len(told["tokens"]) == 64 - 3 + 1
    assert told["cells_used"] == told["n_kv"] == 64 and told["n_shift"] == 0


@pytest.mark.slow
def test_a_full_context_without_shift(go):
    whole = json_of(go("--json", "-n", -2))
    done = go("--json", "-n", -1, "--nocontext_shift")
    told = json.loads(done.out)
    assert done.code == 1 and told["finish_reason"] == "context_full"
    assert (told["tokens"], told["text"]) == (whole["tokens"], whole["text"])
    assert done.err.count("\n") == 1 and "the context is full: its 64 cells" in done.err
    assert "--context_shift" in done.err and "-c" in done.err


@pytest.mark.slow
def test_context_shifts_are_counted_and_told(go):
    words = ["--keep", 2, "--ignore_eos", "-n"]
    one, many = (json_of(go("--json", *words, n)) for n in (70, 200))
    # 63 cells fill up, half of the 61 that are not kept goes; the same each 30 tokens.
    assert (one["n_shift"], one["n_dropped"]) == (1, 30)
    n_shift = 1 + (200 - 62) // 30
    assert (many["n_shift"], many["n_dropped"]) == (n_shift, 30 * n_shift)
    assert many["n_compiles"] == one["n_compiles"] == 9
    assert many["tokens"][:70] == one["tokens"] and len(many["tokens"]) == 200
    assert many["cells_used"] == 3 + 199 - many["n_dropped"] <= 63
    done = go(*words, 200)
    assert done.code == 0 and done.out.decode() == many["text"] == text_of(many["tokens"])
    lines = done.err.splitlines()
    assert lines[7].startswith(f"upkeep     {n_shift} context shifts, {30 * n_shift} tokens")
    when = [61 + 30 * i for i in range(n_shift)]
    assert lines[8:-1] == [f"           30 of 63 dropped after {i} generated" for i in when]
    assert lines[-1].startswith("exactness  approximate from token 63 on: 150 older tokens")


def options(*words: str) -> RunOptions:
    found = parse.parse_flags(["-p", "x", *words])
    assert found is not None
    return found


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize(("keep", "n_keep"), [(1, 1), (5, 5), (20, 20), (-1, 20), (21, 20)])
def test_keep_counts_tokens_of_the_prompt(tiny, add_bos, keep, n_keep):
    text = tokenizer_from_gguf(
        {**open_gguf(tiny).metadata, "tokenizer.ggml.add_bos_token": add_bos}
    )
    ids = [text.bos_id if add_bos else 7, *range(19)]
    shift = config.policy_of_run(options("--keep", str(keep)), 64, ids, text)
    # A token that begins the text is kept beside those that are counted.
    assert shift is not None and shift.n_keep == min(n_keep + add_bos, 20)
    with pytest.raises(BadConfig, match=rf"--keep {keep} keeps \d+ .* nothing to drop in 2 cells"):
        config.policy_of_run(options("--keep", str(keep)), 2, ids, text)


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize(
    ("words", "said", "wanted"),
    [
        ([], ContextShift(n_keep=9, n_discard=5), ContextShift(n_keep=9, n_discard=5)),
        ([], AttentionSinks(n_window=30, n_sink=2), AttentionSinks(n_window=30, n_sink=2)),
        (["--n_window", "40"], AttentionSinks(n_window=30), AttentionSinks(n_window=40)),
        (["--policy", "attention_sinks"], ContextShift(n_keep=9), AttentionSinks(n_window=60)),
        (["--context_shift"], AttentionSinks(n_window=30), ContextShift(n_keep=0)),
        (["--nocontext_shift"], ContextShift(n_keep=9), None),
        (["--n_discard", "7"], ContextShift(n_keep=9), ContextShift(n_keep=9, n_discard=7)),
    ],
)
def test_a_session_brings_its_policy_where_no_flag_says_otherwise(
    tiny, add_bos, words, said, wanted, tmp_path
):
    text = tokenizer_from_gguf(
        {**open_gguf(tiny).metadata, "tokenizer.ggml.add_bos_token": add_bos}
    )
    ids = [text.bos_id if add_bos else 7, *range(19)]
    there = {"name": type(said).__name__, **dataclasses.asdict(said)}
    (tmp_path / "a.kv").touch()  # a session that is not there says no policy
    before = options(*words, "--session", str(tmp_path / "a.kv"))
    after = config.follow_policy(before, there, ids, text)
    if wanted == ContextShift(n_keep=0):
        wanted = ContextShift(n_keep=int(add_bos))  # what is kept without a session
    assert config.policy_of_run(after, 64, ids, text) == wanted
    assert bool(config.followed(before, after)) == (after != before)


def test_what_a_session_says_of_a_policy_is_checked(tiny):
    text = tokenizer_from_gguf(open_gguf(tiny).metadata)
    for said in ({"n_keep": "5"}, {"n_keep": -3}, {"n_bits": 3}, {"n_keep": 0.5}):
        with pytest.raises(BadSession, match="kvrt repair"):
            config.follow_policy(options(), {"name": "ContextShift", **said}, [1, 2], text)
    for said in (None, {}, {"name": "Mine", "n_keep": "all"}):
        assert config.follow_policy(options(), said, [1, 2], text) == options()


@pytest.mark.parametrize("words", [["-n", "-2"], ["--nocontext_shift"]])
def test_no_shift_is_made_where_none_is_wanted(tiny, words):
    text = tokenizer_from_gguf(open_gguf(tiny).metadata)
    assert config.policy_of_run(options("--keep", "-1", *words), 2, [1, 2], text) is None


def test_a_context_above_the_trained_length_is_warned_of(capfd):
    assert config.cache_config(options("-c", "1000"), 512).n_ctx == 1000
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and err.startswith("kvrt: warning: -c 1000 is above the 512 tokens")
    assert "-gan (SelfExtend) reads further, -c 512 drops older tokens instead" in err
    assert config.cache_config(options("-c", "512"), 512).n_ctx == 512
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("n_trained", "n_prompt"), [(512, 300), (512, 900), (8192, 54_365)])
def test_the_advised_flags_hold_prompt_and_answer_without_another_advice(
    tiny, capfd, n_trained, n_prompt
):
    spec = dataclasses.replace(spec_of(tiny), n_ctx_train=n_trained)
    words = ["-n", "100", "--grp_attn_w", "256"]

    def check(*more):
        asked = options(*words, *more)
        config.check_prompt(asked, n_prompt, spec, config.cache_config(asked, n_trained))
        return capfd.readouterr().err

    advice = re.search(r"raise (-c) to (\d+)(?: with (-gan) (\d+))?", check("-c", "256"))
    assert advice is not None and int(advice[2]) == n_prompt + 100
    assert check(*(word for word in advice.groups() if word)) == ""


def test_a_prompt_that_no_flag_reads_whole_is_told_so(tiny, capfd):
    spec = spec_of(tiny)
    asked = options("-c", "256")
    config.check_prompt(asked, 10**6, spec, config.cache_config(asked, spec.n_ctx_train))
    assert "to keep it use a model trained for more than its" in capfd.readouterr().err


@pytest.fixture
def ended(go, tiny, tmp_path):
    """The model, but the sixth token that it writes ends the text; and what it writes."""
    tokens = json_of(go("--json"))["tokens"]
    return with_end(tiny, tokens[5], tmp_path / "ended.gguf"), tokens


@pytest.mark.slow
def test_end_of_text_ends_it_unless_ignored(go, ended):
    path, tokens = ended
    n = tokens.index(tokens[5]) + 1
    told = json_of(go("-m", path, "--json"))
    assert (told["finish_reason"], told["tokens"]) == ("stop", tokens[:n])
    # Without --ignore_eos an endless run ends here as well.
    done = go("-m", path, "-n", -1)
    assert "end of text" in done.err and done.out.decode() == told["text"]
    told = json_of(go("-m", path, "--json", "--ignore_eos"))
    assert (told["finish_reason"], told["tokens"]) == ("length", tokens)
