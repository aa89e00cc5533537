"""`kvrt run` and `kvrt batch` with a policy by score: budgets, sessions, and refusals."""

import json
import signal

import pytest
from test_mistakes import fails

from kvrt import CacheConfig, Runtime
from kvrt.cli.flags import parse
from kvrt.cli.process.interrupt import Interrupt, Interrupted
from kvrt.cli.setup import config
from kvrt.policies.scored import KVzip, SnapKV
from kvrt.runtime.compress import REPEAT, compress_prompt
from kvrt_models import load

# Of 64 cells, 24. What copies slots is compiled for their number, so that most tests have as many.
SIZE = ("--policy_budget", "37.5%", "--policy_interval", "8")
FLAGS = ("--policy", "h2o", *SIZE)
# Of those that keep the last 32 tokens.
MORE = ("--policy_budget", "40", "--policy_interval", "8")
LONG = ("-n", 60, "--ignore_eos", "--dtype", "f32", "--temp", 0)


@pytest.mark.slow
def test_the_summary_says_what_is_kept(go):
    done = go(*LONG, *FLAGS)
    assert done.code == 0
    assert "policy     H2O keeps 24 tokens a kv head, 31 at most" in done.err
    assert "exactness  approximate from token 32 on: each kv head keeps some" in done.err


@pytest.mark.slow
def test_a_session_is_gone_on_with_by_its_own_policy(go, tmp_path):
    path = tmp_path / "kept.kv"
    first = go(*LONG, *FLAGS, "--session", path)
    assert first.code == 0, first.err
    # A week later the flags are forgotten.
    again = go("-n", 5, "--dtype", "f32", "--temp", 0, "--session", path, "--append")
    assert again.code == 0, again.err
    assert "H2O keeps 24 tokens a kv head" in again.err
    other = go("-n", 5, "--dtype", "f32", "--session", path, "--append", "--policy", "tova")
    assert other.code == 2 and "scored[0].policy" in other.err and other.err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--policy_budget", "1"), "--policy h2o --policy_budget 1: n_recent is 0"),
        (("--policy_budget", "0%"), "a part of the context is from above 0 to 100%"),
        (("--policy_budget", "many"), "--policy_budget many: a size is wanted"),
        (("-gan", 2), "choose one"),
        (("--rope", "read"), "use rope='write'"),
        (("--cache_type_k", "kivi4", "--block_size", 32), "use int4 or int8"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_one_line(go, flags, message):
    done = go("--policy", "h2o", *flags)
    assert done.code == 2 and done.out == b"" and done.err.count("\n") == 1
    assert message in done.err


@pytest.mark.slow
def test_some_of_the_budget_is_read_and_a_session_says_how_many(go, tmp_path):
    path = tmp_path / "kept.kv"
    flags = ("--policy", "sparse_window", *SIZE)
    some = ("--n_read", 16, "--refresh_every", 8)
    done = go(*LONG, *flags, *some, "--session", path)
    said = "SparseWindow keeps 24 tokens a kv head, 31 at most, and reads 16 of them, but all every"
    assert done.code == 0 and said in done.err, done.err
    again = go("-n", 3, "--dtype", "f32", "--session", path, prompt=False)
    assert again.code == 0 and said in again.err, again.err
    assert go(*LONG, *flags).out != done.out
    done = go("--policy", "h2o", *some)
    assert done.code == 2 and "add --policy sparse_window;" in done.err
    done = go(*flags, "--refresh_every", 8)
    assert done.code == 2 and "add --n_read N;" in done.err
    done = go(*flags, "--n_read", 16)
    assert done.code == 2 and "raise n_read, or lower refresh_every" in done.err


@pytest.mark.slow
def test_a_session_says_that_keys_are_compared_by_place(go, tmp_path):
    path = tmp_path / "kept.kv"
    done = go(*LONG, *FLAGS, "--close_up", "--session", path)
    said = "H2O keeps 24 tokens a kv head, 31 at most, by place"
    assert done.code == 0 and said in done.err, done.err
    assert go(*LONG, *FLAGS).out != done.out
    again = go("-n", 3, "--dtype", "f32", "--session", path, prompt=False)
    assert again.code == 0 and said in again.err, again.err
    other = go("-n", 3, "--dtype", "f32", "--session", path, *FLAGS, "--noclose_up", prompt=False)
    assert other.code == 2 and "scored[0].policy" in other.err and other.err.count("\n") == 1


def test_a_budget_is_tokens_a_part_or_bytes(tiny):
    spec, found = load.open_model(tiny, dtype="f32").spec, []
    for budget in ("56", "12.5%", "64KiB", "128KiB"):
        options = parse.parse_flags(["-p", "x", "--policy", "h2o", "--policy_budget", budget])
        assert options is not None
        found.append(config.by_score(options, spec, 512).budget)
    assert found[:2] == [56, 64]
    # 64 further slots of each head are for tokens between two evictions.
    assert 0 <= (found[3] + 64) - 2 * (found[2] + 64) <= 1


@pytest.fixture
def long_prompt(tmp_path):
    path = tmp_path / "prompt.json"
    path.write_text(str([1 + i * i % 90 for i in range(60)]))
    return "--tokens", path


@pytest.mark.slow
def test_a_prompt_beyond_the_budget_is_warned_of_at_the_start(go, long_prompt):
    done = go(*long_prompt, *FLAGS, "-n", 3, "--ignore_eos", "--dtype", "f32", prompt=False)
    assert done.code == 0, done.err
    first = done.err.splitlines()[0]
    assert first.startswith(
        "kvrt: warning: the prompt has 60 tokens: H2O keeps 24 tokens a kv head"
    )
    assert "cache      1 of 1 state used" in done.err


@pytest.mark.slow
def test_kvzip_says_what_its_repetition_takes(go, long_prompt, tmp_path):
    path = tmp_path / "kept.kv"
    size = ("--policy", "kvzip", *MORE)
    flags = (*long_prompt, *size, "-n", 3, "--ignore_eos", "--dtype", "f32", "--session", path)
    done = go(*flags, prompt=False)
    assert done.code == 0, done.err
    said = [x for x in done.err.splitlines() if x.startswith("KVzip")]
    assert said[0].startswith("KVzip has the prompt repeated: ") and len(said) == 2
    assert " for its 60, each time beside all of them: several times a prefill" in said[0]
    assert said[1].startswith("KVzip keeps 40 tokens a kv head; ")
    again = go("-n", 3, "--dtype", "f32", "--session", path, prompt=False)
    assert again.code == 0 and "KVzip keeps 40 tokens a kv head, 47 at most" in again.err
    assert "repeated" not in again.err


@pytest.mark.slow
def test_kvzip_repeats_nothing_that_fits(go, long_prompt):
    size = ("--policy_budget", "40", "--policy_interval", "33")
    flags = (*long_prompt, "--policy", "kvzip", *size, "-c", 128, "-n", 3)
    done = go(*flags, "--ignore_eos", "--dtype", "f32", prompt=False)
    assert done.code == 0, done.err
    assert "KVzip keeps all of it, for it fits the slots; 60 tokens were evaluated" in done.err
    assert "repeated" not in done.err


@pytest.mark.slow
def test_a_prompt_is_compressed_once(go, long_prompt):
    size = ("--policy", "snapkv", "--policy_budget", "40", "--policy_interval", "32")
    flags = (*long_prompt, *size, "-c", 128, "-n", 3, "--ignore_eos", "--dtype", "f32")
    done = go(*flags, "--compress", "--policy_interval", 33, prompt=False)
    assert done.code == 0 and "SnapKV keeps all of it, for it fits the slots" in done.err
    done = go("--compress", "-n", 1)
    assert done.code == 2 and "add --policy snapkv" in done.err


@pytest.mark.slow
def test_heads_that_stream_are_named_and_a_session_says_them(go, long_prompt, tmp_path):
    size = (*MORE, "--n_stream", "40")
    path = tmp_path / "kept.kv"
    flags = (*long_prompt, "-n", 3, "--ignore_eos", "--dtype", "f32", "--session", path)
    done = go(*flags, "--policy", "duo_attention", *size, prompt=False)
    assert done.code == 2 and "add --streaming_heads FILE" in done.err
    done = go(*flags, "--streaming_heads", "[[0]]", prompt=False)
    assert done.code == 2 and "add --policy duo_attention" in done.err
    said = "DuoAttention keeps 40 tokens a kv head, 47 at most, and 1 heads that stream 40"
    heads = ("--policy", "duo_attention", "--streaming_heads", "[[0]]")
    done = go(*flags, *heads, *size, prompt=False)
    assert done.code == 0 and said in done.err, done.err
    again = go("-n", 3, "--dtype", "f32", "--session", path, prompt=False)
    assert again.code == 0 and said in again.err, again.err


@pytest.mark.slow
def test_ctrl_c_ends_a_compression_and_leaves_no_session(go, long_prompt, tmp_path, monkeypatch):
    n_asked, path = [], tmp_path / "kept.kv"

    def check(self):
        n_asked.append(1)
        if len(n_asked) == 3:  # before the first step, behind it, behind the second
            signal.raise_signal(signal.SIGINT)
            raise Interrupted

    monkeypatch.setattr(Interrupt, "check", check)
    size = (*FLAGS, "--compress", "--n_ubatch", 16)
    flags = (*long_prompt, *size, "--dtype", "f32", "--session", path)
    done = go(*flags, prompt=False)
    assert done.code == 130 and done.out == b"" and len(n_asked) == 3, done.err
    assert not path.exists() and "0 of 60 tokens" in done.err, done.err


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "n"), [("cell", 101), ("paged", 96)])
@pytest.mark.parametrize("name", ["snapkv", "kvzip"])
def test_prompts_of_a_batch_are_compressed_once(kvrt, tiny, tmp_path, name, mode, n):
    """All but its last token, in blocks whole blocks of it; a short prompt fits the slots."""
    ids = [[1 + (i * i + k) % 90 for i in range(m)] for k, m in enumerate((102, 20))]
    lines = [{"id": str(i), "tokens": x, "n_predict": 8, "temp": 0} for i, x in enumerate(ids)]
    asks, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asks.write_text("".join(json.dumps({"ignore_eos": True, **x}) + "\n" for x in lines))
    flags = ["batch", "-m", tiny, "-i", asks, "-o", out, "-c", 256, "--dtype", "f32"]
    size = ["--policy_budget", 40, "--policy_interval", 32]
    flags += ["--mode", mode, "--block_size", 8, "--policy", name, *size]
    fine = ["--hash_block_size", 4] if mode == "paged" else []
    done = kvrt(*flags, *fine, *(["--compress"] if name == "snapkv" else []))
    assert done.code == 0, done.err
    found = sorted(map(json.loads, out.read_text().splitlines()), key=lambda x: x["id"])
    model = load.load(tiny, dtype="f32")
    policy = {"snapkv": SnapKV, "kvzip": KVzip}[name](budget=40, interval=32)
    ask = model.tokenizer.encode(REPEAT, add_special=False) if name == "kvzip" else []
    n_evaluated = n + (name == "kvzip") * (n + len(ask))
    for text, record, n_once in zip(ids, found, (n, 0), strict=True):
        config = CacheConfig(n_ctx=256, type_k="f16", type_v="f16")
        runtime = Runtime(model.decoder, config, policy=policy)
        if n_once:
            compress_prompt(runtime, text[:n_once], ask=ask)
        runtime.append(text[n_once:])
        assert record["tokens"] == [t.id for t in runtime.generate(8)]
    (why,) = found[0]["approximations"]
    assert why == {"by": name, "from_token": n} and "approximations" not in found[1]
    said = f"compressed 1 prompt read whole, {n_evaluated:,} tokens evaluated for it"
    assert said in done.err
    if name == "snapkv":
        fails(kvrt(*flags, *fine), 2, "results made with other flags")
    fails(kvrt(*flags, "--compress", "--noprefix_cache"), 2, "the prefix cache of one process")
    fails(kvrt(*flags[:-6], "--compress"), 2, "add --policy snapkv or another of them")
