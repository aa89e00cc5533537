"""`kvrt fit`: what it says, against what is then allocated."""

import json
import math
from pathlib import Path

import jax
import pytest
from conftest import tiny_gguf
from test_mistakes import fails

from kvrt import CacheConfig, Runtime
from kvrt.cli.main import main
from kvrt.cli.process import startup
from kvrt.options.engine import EngineConfig
from kvrt.options.serving import Rules
from kvrt.options.size import show_size
from kvrt.policies import AttentionSinks
from kvrt.policies.scored import SnapKV
from kvrt.serving.engine import Engine
from kvrt_models import load


@pytest.fixture
def fit(kvrt, tiny):
    """`kvrt fit` on the tiny model."""
    return lambda *args: kvrt("fit", "-m", tiny, *args)


def said(done, code=0):
    assert (done.code, done.err) == (code, ""), done.err
    return json.loads(done.out)


def allocated(path, config, dtype, policy=None):
    """Bytes of everything that a runtime of this model holds."""
    return bytes_of(Runtime(load.load(path, dtype=dtype).decoder, config, policy=policy))


def bytes_of(runtime):
    cells = [jax.tree.leaves(runtime.cache.cells), jax.tree.leaves(runtime.group_cells)]
    weights = sum(x.nbytes for x in runtime.programs.params)
    return weights + runtime.stats().cache_bytes + sum(x.nbytes for part in cells for x in part)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "int8"])
@pytest.mark.parametrize(
    ("n_ctx", "n_seq", "kind"), [(64, 1, "f32"), (1000, 40, "f16"), (300, 2, "q8_0")]
)
def test_it_says_what_a_runtime_takes(fit, tiny, dtype, n_ctx, n_seq, kind):
    types = ("--dtype", dtype, "--cache_type_k", kind, "--cache_type_v", "bf16")
    found = said(fit("--json", "-c", n_ctx, "--n_seq_max", n_seq, *types))
    config = CacheConfig(n_ctx=n_ctx, n_seq_max=n_seq, type_k=kind, type_v="bf16")
    widened = found["widened_bytes"]
    assert found["n_bytes"] - widened == allocated(tiny, config, dtype)
    parts = [found[f"{name}_bytes"] for name in ("weights", "widened", "cache", "index")]
    assert sum(parts) == found["n_bytes"] and (widened > 0) == (dtype == "int8")
    assert [(p["kind"], p["n_layers"], p["n_held"]) for p in found["parts"]] == [("full", 1, n_ctx)]
    assert found["fits"] and found["n_ctx_train"] == 512


def test_types_by_group(fit, tiny):
    types = ("--cache_type_k", "int8", "--cache_type_v", "int4")
    found = said(fit("--json", "-c", 100, "--dtype", "f32", *types))
    config = CacheConfig(n_ctx=100, type_k="int8", type_v="int4", hadamard=True)
    assert found["n_bytes"] == allocated(tiny, config, "f32")
    assert [p["types"] for p in found["parts"]] == ["int8/int4"]
    # The tiny model has one group of layers.
    fails(
        fit("--cache_type_k", "f16,int8"), 2, "type_k has 2 types (f16, int8), the model 1 groups"
    )


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["cell", "paged"])
def test_checkpoints_are_counted(kvrt, tmp_path, mode):
    path = tmp_path / "tiny.gguf"
    tiny_gguf.write_gguf(path, tiny_gguf.TinyModel(arch="gemma2", n_layers=2))
    given = ["fit", "-m", path, "-c", 3000, "--mode", mode, "--budget", "1GB", "--n_seq_max", 2]
    kept = ["--n_checkpoints", 4]
    none, four = (said(kvrt(*given, "--json", *x)) for x in ([], kept))
    assert not none["checkpoint_bytes"] and four["checkpoint_bytes"] % 8 == 0
    assert four["n_bytes"] == none["n_bytes"] + four["checkpoint_bytes"] + (
        four["index_bytes"] - none["index_bytes"] + four["rounding_bytes"] - none["rounding_bytes"]
    )
    assert "context checkpoints" in kvrt(*given, *kept).out.decode()
    one = four["checkpoint_bytes"] // 8
    two = said(kvrt(*given, "--json", *kept, "--checkpoint_bytes", 2 * one))
    assert two["checkpoint_bytes"] == 2 * one


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["cell", "paged"])
def test_what_a_policy_by_score_keeps_does_not_grow(fit, tiny, mode):
    words = ("--mode", mode, "--policy", "snapkv", "--policy_budget", 96, "--dtype", "f32")
    found, longer = (said(fit("--json", *words, "-c", n)) for n in (256, 4096))
    (part,) = found["parts"]
    assert (part["kind"], part["types"], part["n_layers"]) == ("by score", "f16/f16", 1)
    assert part == longer["parts"][0]
    text = fit(*words, "-c", 256, "--budget", "1GB").out.decode()
    assert "KV f16/f16, by score" in text and "any length: what is kept" in text
    if mode == "cell":
        config = CacheConfig(n_ctx=256, type_k="f16", type_v="f16")
        policy = SnapKV(budget=96, interval=64)
        assert found["n_bytes"] == allocated(tiny, config, "f32", policy)


@pytest.mark.slow
def test_windows_of_a_policy_are_counted_in_blocks(kvrt, tmp_path):
    path = tmp_path / "tiny.gguf"
    tiny_gguf.write_gguf(path, tiny_gguf.TinyModel(arch="gemma2", n_layers=2))
    words = ["fit", "-m", path, "-c", 3000, "--mode", "paged", "--budget", "1GB", "--dtype", "f32"]
    words += ["--n_seq_max", 2]
    policy = ["--policy", "attention_sinks", "--n_sink", 64]
    none, some = (said(kvrt(*words, "--json", *x)) for x in ([], policy))
    assert none["policy_bytes"] == 0 < some["policy_bytes"]
    more = {k: some[k] - none[k] for k in ("policy_bytes", "rounding_bytes", "index_bytes")}
    assert some["n_bytes"] == none["n_bytes"] + sum(more.values())
    assert "windows of a policy" in kvrt(*words, *policy).out.decode()
    # As an engine makes it.
    model = load.load(path, dtype="f32").decoder
    rules = Rules(n_batch=512, n_ctx_seq=1500)
    config = CacheConfig(n_ctx=3000, n_seq_max=2, type_k="f16", type_v="f16", block_size=16)
    sinks = AttentionSinks(n_sink=64, n_window=1500 - 64)
    engine = Engine(model, config, EngineConfig(mode="paged", rules=rules), policy=sinks)
    assert engine.stats().cache_bytes == some["cache_bytes"]


def test_a_table(fit):
    done = fit("-c", 100, "--n_seq_max", 4, "--budget", "1GB")
    text = done.out.decode()
    assert done.code == 0
    head = "tiny, trained for 512 tokens; 100 tokens of context, 4 sequences together\n"
    assert text.startswith(head)
    assert "KV f16/f16, full" in text and "100 cells" in text
    assert "budget      1.00 GB given, " in text
    assert text.endswith(" for each of 4 sequences\n")
    assert max(map(len, text.splitlines())) < 80


def test_the_longest_context_is_the_longest(fit):
    found = said(fit("--json", "--budget", "3MB"))
    n = found["longest"]
    assert said(fit("--json", "-c", n, "--budget", "3MB"))["fits"]
    assert not said(fit("--json", "-c", n + 1, "--budget", "3MB"), code=1)["fits"]
    longer = said(fit("--json", "--budget", "3MB", "--cache_type_k", "int8"))
    assert longer["longest"] > 1.2 * n


def test_what_does_not_fit_is_told_by_the_exit_code(fit):
    done = fit("--budget", "64kB")
    assert done.code == 1
    assert "kB too few" in done.out.decode() and "no token fits" in done.out.decode()


def test_paged_mode(fit):
    found = said(fit("--json", "--mode", "paged", "-c", 100, "--n_seq_max", 3))
    (part,) = found["parts"]
    assert (part["block_size"], part["n_held"]) == (16, (100 + 3 * 15) // 16)
    block_bytes = found["null_bytes"]
    assert found["cache_bytes"] == (part["n_held"] + 1) * block_bytes
    assert part["n_bytes"] == part["n_held"] * block_bytes
    longer = said(fit("--json", "--mode", "paged", "-c", 100, "--block_size", 32))
    assert longer["parts"][0]["n_held"] == 4


# 10 full and 52 windowed layers of 16 heads of 128 channels, by its published sizes.
GEMMA_3_27B = {
    "model_type": "gemma3_text",
    "vocab_size": 262208,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 168,
    "rope_theta": 1000000,
    "rope_local_base_freq": 10000,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "hidden_activation": "gelu_pytorch_tanh",
}


@pytest.mark.slow
def test_a_config_alone_is_enough(kvrt, tmp_path):
    """Gemma 3 27B: the padding layers of the design document, and what windows save."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GEMMA_3_27B))
    types = ("--dtype", "bf16", "--cache_type_k", "bf16", "--cache_type_v", "bf16")
    words = ("fit", "-m", path, *types, "-c", 131072, "--budget", "80GB")
    found = said(kvrt(*words, "--mode", "paged", "--json", "--unified"))
    assert found["n_params"] == pytest.approx(27.0e9, rel=0.01)
    by_kind = {p["kind"]: p for p in found["parts"]}
    assert (by_kind["window"]["n_groups"], by_kind["full"]["n_groups"]) == (6, 1)
    assert (by_kind["window"]["n_layers"], by_kind["full"]["n_layers"]) == (52, 10)
    row_bytes = 16 * 128 * 4
    assert by_kind["full"]["n_bytes"] == 131072 * 10 * row_bytes
    # 1,023 tokens in sight and 512 new ones, in each of 6 groups of 10 layers.
    assert by_kind["window"]["n_held"] == 6 * (96 + 1)
    assert (found["n_padding"], found["unified"]["n_padding"]) == (8, 8)
    assert found["padding_bytes"] == 97 * 16 * 8 * row_bytes
    assert found["cache_bytes"] == found["unified"]["cache_bytes"]
    all_kept = said(kvrt(*words, "--swa_full", "--json"), code=1)
    assert all_kept["cache_bytes"] > 5.5 * found["cache_bytes"]
    text = kvrt(*words, "--mode", "paged", "--unified").out.decode()
    assert "KV bf16/bf16, window 1,024" in text and "582 blocks of 16, 6 groups" in text
    assert text.count("padding     8 layers that no group has, ") == 2
    assert "one page size" in text


def test_memory_that_nobody_knows(fit, monkeypatch):
    monkeypatch.setattr(startup, "available_bytes", lambda: math.inf)
    found = said(fit("--json"))
    assert (found["budget_bytes"], found["longest"], found["fits"]) == (None, None, True)
    text = fit().out.decode()
    assert "budget      unknown" in text and "longest" not in text


class _Accelerator:
    def __init__(self, stats):
        self.memory_stats = lambda: stats


@pytest.mark.parametrize(
    ("stats", "left"),
    [({"bytes_limit": 900, "bytes_in_use": 300}, 600), ({"bytes_limit": 9}, 9), (None, math.inf)],
)
def test_an_accelerator_says_what_it_has_left(monkeypatch, stats, left):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [_Accelerator(stats)])
    assert startup.available_bytes() == left


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("--budget", "much"), "--budget much: a size is wanted"),
        (("--budget", "9" * 400), "a size is wanted"),
        (("--n_seq_max", 0), "n_seq_max"),
        (("--n_seq_max", 5000), "from 1 to 4096"),
        (("--mode", "pages"), "cell or paged"),
        (("--unified",), "--unified compares blocks; add --mode paged"),
        (("--block_size", -1), "block_size"),
        (("-c", 2**31), "n_ctx"),
        (("prompt",), "unexpected argument 'prompt'"),
    ],
)
def test_mistakes(fit, words, found):
    fails(fit(*words), 2, found)


def test_a_model_that_is_none(kvrt, tmp_path):
    path = tmp_path / "config.json"
    path.write_text("{}")
    fails(kvrt("fit", "-m", path), 1, "config.json", "model_type")
    fails(kvrt("fit", "-m", tmp_path / "none.gguf"), 2, "none.gguf")


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (12_345, "12.3 kB"),
        (726_902_016, "727 MB"),
        (8 * 2**30, "8.59 GB"),
        (5e15, "5,000 TB"),
    ],
)
def test_sizes_for_people(n_bytes, text):
    assert show_size(n_bytes) == text


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_real_models(capfd, name):
    """In the cache folder that all commands use, for the model is fetched once."""
    decoder = load.load(name, dtype="bf16").decoder
    for n_ctx, kind in (("4096", "f32"), ("1000", "q8_0")):
        words = ["-c", n_ctx, "--n_seq_max", "2", "--cache_type_k", kind, "--dtype", "bf16"]
        words += ["--cache_type_v", "f32"]
        assert main(["fit", "-m", name, "--json", *words]) == 0
        found = json.loads(capfd.readouterr().out.splitlines()[-1])
        config = CacheConfig(n_ctx=int(n_ctx), n_seq_max=2, type_k=kind)
        n_bytes = bytes_of(Runtime(decoder, config))
        print(f"{name} -c {n_ctx} {kind}: said {found['n_bytes']:,}, allocated {n_bytes:,}")
        assert found["n_bytes"] == n_bytes


def test_index_keys_are_named_and_counted_in_cells_and_blocks(kvrt):
    """DeepSeek-V3.2: what is said is what an engine of either mode allocates."""
    folder = Path(__file__).parents[1] / "golden" / "hf" / "deepseek-v32"
    types = ("--dtype", "f32", "--cache_type_k", "f32", "--cache_type_v", "f32")
    done = kvrt("fit", "-m", folder, "--budget", "1GiB")
    line = "indexer     3 layers of KV above are index keys, by which a token chooses the "
    assert line in done.out.decode() and done.err == ""
    model, config = load.load(folder, dtype="f32").decoder, CacheConfig(n_ctx=256, block_size=16)
    for mode in ("cell", "paged"):
        flags = ("--json", "-c", 256, "--block_size", 16, *types, "--mode", mode)
        found = said(kvrt("fit", "-m", folder, *flags))
        engine = Engine(model, config, EngineConfig(mode=mode, prefix_cache=False))
        assert engine.stats().cache_bytes == found["cache_bytes"]


def test_layers_that_read_others_are_named(kvrt):
    """Gemma 4: three layers of six, two of which read the same one."""
    folder = Path(__file__).parents[1] / "golden" / "hf" / "gemma4"
    done = kvrt("fit", "-m", folder, "--budget", "1GiB")
    assert (done.code, done.err) == (0, "")
    line = (
        "shared      3 layers keep none and read the keys and values of others: 3, 4 of 1; 5 of 2"
    )
    assert line in str(done.out.decode() if isinstance(done.out, bytes) else done.out)
    assert said(kvrt("fit", "-m", folder, "--json"))["kv_of"] == [[3, 1], [4, 1], [5, 2]]
    config = CacheConfig(n_ctx=64)
    types = ("--dtype", "f32", "--cache_type_k", "f32", "--cache_type_v", "f32")
    found = said(kvrt("fit", "-m", folder, "--json", "-c", 64, *types))
    assert found["n_bytes"] == allocated(folder, config, "f32")


@pytest.mark.parametrize("policy", ["none", "snapkv"])
def test_programs_take_what_those_of_a_run_do(fit, tiny, policy):
    words = ("--dtype", "int8", "-c", 300, "--policy", policy)
    words += ("--policy_budget", 96) if policy != "none" else ()
    alone, found = said(fit("--json", *words)), said(fit("--json", "--programs", *words))
    config = CacheConfig(n_ctx=300, type_k="f16", type_v="f16")
    policies = {"none": None, "snapkv": SnapKV(budget=96, interval=64)}
    runtime = Runtime(load.load(tiny, dtype="int8").decoder, config, policy=policies[policy])
    runtime.prefill(list(range(3, 290)))
    assert len(list(runtime.generate(2))) == 2
    programs = {"n": runtime.programs.n_compiles, "n_bytes": runtime.programs.temp_bytes()}
    assert found["programs"] == programs and programs["n_bytes"] > alone["widened_bytes"] > 0
    more = programs["n_bytes"] - alone["widened_bytes"]
    assert found["n_bytes"] == alone["n_bytes"] + more
    # Its programs come from the disk, where the first call has left them.
    text = fit("--programs", *words).out.decode()
    assert f"{programs['n_bytes']:,}" in text and "programs, the largest" in text


def test_programs_of_a_cache_that_cannot_be_made(fit):
    for words in (("--mode", "paged"), ("--n_seq_max", 2)):
        fails(fit("--programs", *words), 2, "which has one sequence in cells; leave --mode paged")
    done = fit("--programs", "--budget", "1MB", "-c", 4096)
    fails(done, 2, "do not fit beside the weights; lower -c")
