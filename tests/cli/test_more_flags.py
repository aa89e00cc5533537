"""Flags that few need do what the same fields do from Python, and refuse what they cannot."""

import json

import pytest
from conftest import PROMPT, tiny_gguf
from test_batch import batch, written  # noqa: F401
from test_mistakes import fails

from kvrt import CacheConfig, Runtime, session
from kvrt.cli.setup.model import with_window_sinks
from kvrt.policies import AttentionSinks, ContextShift
from kvrt_models import load
from kvrt_models.decoder import Decoder

N = 120


def told(done) -> dict:
    assert done.code == 0, done.err
    return json.loads(done.out)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    """A model of which every other layer sees 16 positions."""
    path = tmp_path_factory.mktemp("windowed") / "tiny.gguf"
    return tiny_gguf.write_gguf(path, tiny_gguf.TinyModel(arch="gemma2", n_layers=2))


def by_runtime(path, config, policy=None, n_sink=0, n=N):
    """Greedy tokens of a `Runtime`, in the dtypes that a run takes without flags."""
    model = load.load(path, dtype="int8")
    spec = with_window_sinks(model.spec, n_sink)
    decoder = Decoder(spec, load.open_model(path, dtype="int8").weights.wait())
    runtime = Runtime(decoder, CacheConfig(type_k="f16", type_v="f16", **config), policy=policy)
    runtime.append(model.tokenizer.encode(PROMPT))
    return [t.id for t in runtime.generate(n)]


WORDS = ["--json", "--quiet", "-n", N, "--ignore_eos", "--rope", "read"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "policy"),
    [
        (["--policy", "attention_sinks", "--n_sink", 2, "--n_window", 20], (2, 20, 1)),
        (["--policy", "attention_sinks", "--n_drop", 7], (4, 60, 7)),
        (["--n_discard", 9, "--keep", 1], None),
    ],
)
def test_policies_of_a_run_are_those_of_a_runtime(go, tiny, words, policy):
    found = told(go(*WORDS, *words))
    wanted = ContextShift(n_keep=1, n_discard=9)
    if policy is not None:
        n_sink, n_window, n_drop = policy
        wanted = AttentionSinks(n_sink=n_sink, n_window=n_window, n_drop=n_drop)
    assert found["tokens"] == by_runtime(tiny, {"n_ctx": 64, "rope": "read"}, wanted)
    assert found["n_dropped"] > 0


@pytest.mark.slow
def test_sinks_that_the_context_does_not_hold(go):
    words = ["--policy", "attention_sinks", "--n_sink", 10, "--n_window", 60]
    fails(go(*words), 2, "keep 70 tokens, the context has 64 cells", "-c to 70")
    few = go("--policy", "attention_sinks", "--n_window", 2, "--n_sink", 0, "-n", 1)
    assert few.code == 0 and "of which 2 stay: the first 0 and the last 2" in few.err


@pytest.mark.slow
def test_several_steps_a_program_write_the_same(go, tmp_path):
    words = ["--json", "--quiet", "-n", 30]
    assert told(go(*words, "--stride", 7))["tokens"] == told(go(*words))["tokens"]
    path = tmp_path / "a.kv"
    fails(go(*words, "--stride", 2, "--session", path, "--session_all"), 2, "--stride 2 runs ahead")
    assert told(go(*words, "--stride", 2, "--session", path))["tokens"]
    assert session.read_manifest(path).n_tokens


@pytest.mark.slow
def test_a_text_in_blocks_stays_there_in_its_session(go, tmp_path):
    path = tmp_path / "a.kv"
    words = ["--json", "--quiet", "-c", 96, "--block_size", 16, "--nocontext_shift"]
    kept = [*words, "--session", path, "--session_all", "--blocks"]
    first = told(go(*kept))
    assert first["tokens"] == told(go(*words))["tokens"]
    assert session.read(path).in_blocks == (0,)
    again = told(go(*kept, prompt=False))
    more = told(go(*words, "-n", 48))["tokens"]
    assert first["tokens"] + again["tokens"] == more and session.read(path).in_blocks == (0,)


@pytest.mark.slow
def test_windows_with_sinks_are_those_of_the_model_so_changed(go, windowed, tmp_path):
    path = tmp_path / "a.kv"
    words = ["-m", windowed, "--json", "--quiet", "-n", 60, "-c", 128]
    found = told(go(*words, "--window_sinks", 3, "--session", path))
    assert found["tokens"] == by_runtime(windowed, {"n_ctx": 128}, n_sink=3, n=60)
    assert found["tokens"] != told(go(*words))["tokens"]
    # A session says so itself, and another number is another cache.
    assert told(go(*words, "--session", path, "--session_ro"))["tokens"] == found["tokens"]
    other = go(*words, "--window_sinks", 2, "--session", path)
    fails(other, 2, "mask.n_sink is 3 in the session and 2 here")


def test_sinks_of_windows_where_there_is_none(go, kvrt, tiny):
    fails(go("--window_sinks", 4), 2, "no layer of this model has a window")
    fails(kvrt("fit", "-m", tiny, "--window_sinks", 4), 2, "no layer of this model has a window")


@pytest.mark.slow
def test_a_name_in_orbax_is_a_folder_that_is_resumed(go, kvrt, tiny, book, tmp_path):
    path = tmp_path / "a.orbax"
    done = kvrt("prefill", "-m", tiny, "-c", 64, "-f", book, "-o", path)
    assert done.code == 0 and path.is_dir(), done.err
    words = ["-f", book, "--json", "-c", 128]
    found = told(go(*words, "--session", path, prompt=False))
    assert found["n_restored"] == found["n_prompt"] - 1 or found["n_restored"] == found["n_prompt"]
    assert found["tokens"] == told(go(*words, prompt=False))["tokens"]
    assert kvrt("fork", path, "--at", 5, "-o", tmp_path / "b.orbax").code == 0
    assert (tmp_path / "b.orbax").is_dir() and session.read_manifest(tmp_path / "b.orbax")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["cell", "paged"])
def test_salts_keep_prefixes_apart(batch, written, mode):  # noqa: F811
    text = "the sand of the sea and the rest of the land"
    lines = [{"id": str(i), "prompt": text, "temp": 0} for i in range(4)]
    lines[1] |= {"salt": "x"}
    lines[3] |= {"cache": False}
    done = batch("--n_seq_max", 1, "-n", 4, "--mode", mode, "--salt", "all", lines=lines)
    assert done.code == 0, done.err
    found = written()
    assert [r["n_cached"] > 0 for r in found] == [False, False, True, False]
    assert len({tuple(r["tokens"]) for r in found}) == 1


@pytest.mark.slow
def test_rules_and_tiers_change_no_result(batch, written):  # noqa: F811
    lines = [
        {"id": str(i), "prompt": "the sand of the sea " * (1 + i % 3), "priority": -i, "temp": 0}
        for i in range(6)
    ]
    penalty = ["-n", 12, "--repeat_penalty", 1.2, "--repeat_last_n", 100]
    done = batch(*penalty, lines=lines)
    assert done.code == 0, written()
    plain = [r["tokens"] for r in written()]
    rules = ["--order", "fcfs", "--n_wait", 0, "--n_chunk", 8, "--admit", "whole"]
    rules += ["--group_by_prefix", "--n_alike", 8, "--host_cache", "2MB", "--preempt", "swap"]
    rules += ["--eviction_policy", "arc", "--always_load", "-c", 96]
    assert batch(*penalty, *rules, out="b.jsonl").code == 0
    assert [r["tokens"] for r in written("b.jsonl")] == plain


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--preempt", "swap"], "add --host_cache SIZE"),
        (["--eviction_policy", "arc"], "--eviction_policy is for tiers"),
        (["--always_load"], "--always_load is for tiers"),
        (["--defrag_thold", "0.2"], "blocks are never packed"),
    ],
)
def test_flags_of_a_batch_that_need_others(batch, words, message):  # noqa: F811
    fails(batch(*words, lines=[{"id": "a", "prompt": "the"}]), 2, message)
