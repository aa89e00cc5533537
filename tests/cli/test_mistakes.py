"""Mistakes in files and settings: one line on standard error, no traceback, the right code."""

import json
import math

import pytest
from conftest import tiny_gguf

from kvrt.cli.flags import parse
from kvrt.cli.process import startup
from kvrt.cli.run import prompt
from kvrt.cli.setup import config
from kvrt.config import GroupSpec
from kvrt.errors import BadConfig, KvrtError, UsageError
from kvrt.options.cache import CacheConfig
from kvrt.program.estimate import of_blocks, of_cells
from kvrt_models import load
from kvrt_models.tokenizer.encode import tokenizer_from_gguf

TEMPLATE = "{{ bos_token }}<{{ messages[0].content }}>"


def fails(done, code: int, *words: str) -> None:
    """One line that holds these words, and nothing on standard output."""
    assert done.out == b"" and done.err.count("\n") == 1 and done.err.endswith("\n")
    assert done.err.startswith("kvrt: ") and "Traceback" not in done.err
    assert done.code == code, done.err
    for word in words:
        assert word in done.err


def test_a_file_that_is_no_gguf(go, tmp_path):
    path = tmp_path / "story.gguf"
    path.write_text("Once upon a time, there was no model in this file at all.")
    fails(go("-m", path), 1, "story.gguf", "GGUF")


@pytest.mark.parametrize("part", [0, 3, 100, 0.5, 0.999])
def test_a_file_that_is_truncated(go, tiny, tmp_path, part):
    data = tiny.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(data[: part if isinstance(part, int) else int(part * len(data))])
    fails(go("-m", path), 1, "cut.gguf")


def test_an_architecture_that_is_unknown(go, tiny, tmp_path):
    path = tmp_path / "new.gguf"
    path.write_bytes(tiny.read_bytes().replace(b"llama", b"zebra"))
    fails(go("-m", path), 1, "zebra")


@pytest.mark.parametrize("name", ["no-such-model", "./none.gguf"])
def test_a_model_that_is_not_there(go, name):
    fails(go("-m", name), 2, name, "smollm2-135m")


def test_an_empty_folder(go, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    fails(go("-m", folder), 1, "config.json")


def test_a_kernel_for_another_device(go):
    fails(go("--attention", "pallas_gpu"), 2, "runs on cuda or rocm, not on cpu", "use 'chunked'")


IDS = {
    "no JSON": ("[1, 2", "no JSON"),
    "an object": ("{}", "it is {}; a list of at least 1"),
    "empty": ("[]", "it is []; a list of at least 1"),
    "text": ('["a"]', '[0] is "a"'),
    "a truth": ("[1, true]", "[1] is true"),
    "a fraction": ("[1.0]", "[0] is 1.0"),
    "negative": ("[-1]", "[0] is -1"),
    "deep": ("[" * 100_000, "no JSON"),
    "too high": ("[300]", "id 300 is outside the model's vocabulary, 0 to 299"),
}


@pytest.mark.parametrize(("text", "message"), IDS.values(), ids=IDS)
def test_ids_that_are_none(go, tmp_path, text, message):
    path = tmp_path / "ids.json"
    path.write_text(text)
    fails(go("--tokens", path, prompt=False), 2, "--tokens", message)


def test_prompts_that_cannot_be_read(go, tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9")
    fails(go("-f", path, prompt=False), 2, "byte 3 is no UTF-8")
    fails(go("-f", tmp_path / "none", prompt=False), 2, "no such file or directory")
    fails(go("-f", tmp_path, prompt=False), 2, "is a directory")
    fails(go("-f", "-", prompt=False), 2, "the prompt is empty")
    fails(go("-p", "\udcff", prompt=False), 2, "not valid Unicode")


def test_a_prompt_file_that_has_no_end(go, monkeypatch):
    monkeypatch.setattr(prompt, "MAX_BYTES", 1000)
    fails(go("-f", "/dev/zero", prompt=False), 2, "more than 1000 bytes")


def test_more_log_probabilities_than_tokens(go):
    fails(go("--json", "--logprobs", 301), 2, "the vocabulary has 300 tokens")


def test_chat_without_a_template(go):
    fails(go("--chat"), 2, "no chat template", "leave out --chat")


def test_chat_writes_the_beginning_once(tiny):
    from kvrt_models.gguf.file import open_gguf

    metadata = dict(open_gguf(tiny).metadata)
    metadata |= {"tokenizer.chat_template": TEMPLATE, "tokenizer.ggml.add_bos_token": True}
    text = tokenizer_from_gguf(metadata)
    ids = prompt.prompt_ids(prompt.Prompt(text="the"), text, chat=True)
    words = [tiny_gguf.vocabulary()[i] for i in ids]
    assert words == [tiny_gguf.BOS, "<", "the", ">"]


def test_flags_reach_the_cache():
    words = "-c 300 --cache_type_k f16 --cache_type_v bf16 --rope read --n_ubatch 32"
    options = parse.parse_flags([*words.split(), "--defrag_thold", "0.5", "--swa_full", "-p", "x"])
    assert options is not None
    assert config.cache_config(options, 512) == CacheConfig(
        n_ctx=300,
        type_k="f16",
        type_v="bf16",
        rope="read",
        n_ubatch=32,
        defrag_threshold=0.5,
        swa_full=True,
    )


# A token of the tiny model takes 512 bytes of rows, and 24 of positions and owners.
@pytest.mark.parametrize(
    ("words", "n_prompt", "n_bytes", "n_ctx"),
    [
        ([], 5, math.inf, 512),
        ([], 5, 4 * 512 * 280, 512),
        (["-n", "8"], 5, 4 * 512 * 280 - 4, 256),
        (["-n", "8"], 5, 4 * 300 * 280, 256),
        (["-n", "8"], 5, 0, 13),
        (["-n", "8"], 292, 4 * 300 * 280, 300),
        (["-n", "-1"], 400, 0, 401),
        (["-n", "8"], 600, 0, 512),
        (["-c", "77"], 600, 0, 77),
    ],
)
def test_the_context_is_the_trained_length_or_what_memory_allows(
    tiny, capfd, words, n_prompt, n_bytes, n_ctx
):
    options, spec = parse.parse_flags(["-p", "x", *words]), load.describe_model(tiny).spec
    assert options is not None
    assert (
        of_cells(spec.groups, None, CacheConfig(n_ctx=512, type_k="f16", type_v="f16")).n_bytes
        == 512 * 280
    )
    found = config.sized(options, spec, n_prompt, n_bytes, quiet=False)
    assert config.cache_config(found, spec.n_ctx_train).n_ctx == n_ctx
    said = capfd.readouterr().err
    if n_ctx in (77, 512):
        assert said == ""
    else:
        assert said.startswith(f"context: {n_ctx} of the 512 tokens") and said.count("\n") == 1
    assert config.sized(options, spec, n_prompt, n_bytes, quiet=True) == found
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_a_default_context_holds_a_prompt_beyond_the_former_limit(kvrt, tmp_path):
    """A model trained for 8,192 tokens reads 5,000, and its beginning with them."""
    model = tiny_gguf.write_gguf(
        tmp_path / "long.gguf", tiny_gguf.TinyModel(n_layers=1, n_ctx_train=8192)
    )
    (tmp_path / "ids").write_text(str([5] * 4200))
    done = kvrt("run", "-m", model, "--tokens", tmp_path / "ids", "-n", 1, "--json")
    assert (done.code, done.err) == (0, ""), done.err
    told = json.loads(done.out)
    assert (told["n_ctx"], told["cells_used"], told["n_dropped"]) == (8192, 4200, 0)


def test_a_cache_larger_than_memory(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    2000 kB\n")
    assert startup.available_bytes(tmp_path / "meminfo") == 2_048_000
    group = GroupSpec(layers=(0, 1), n_kv_heads=8, head_dim=128, rope=None)
    # 512 cells x 2 layers x 1024 channels x 4 bytes, keys and values.
    assert of_cells([group], None, CacheConfig(n_ctx=512)).n_bytes == 8_388_608 + 512 * 24
    huge = CacheConfig(n_ctx=2**31 - 1)
    with pytest.raises(BadConfig, match=r"a cache of 2,147,483,647 cells needs .* lower -c"):
        startup.check_memory([group], huge)


def test_a_widened_matrix_counts_in_the_memory_that_is_left(monkeypatch):
    group, config = GroupSpec(layers=(0,), n_kv_heads=2, head_dim=32, rope=None), CacheConfig()
    n_bytes = of_cells([group], None, config).n_bytes
    monkeypatch.setattr(startup, "available_bytes", lambda: n_bytes + 8_000_000)
    startup.check_memory([group], config, widened=8_000_000)
    with pytest.raises(
        BadConfig, match=r"needs \S+ GB \(with \S+ GB for a widened matrix\), \S+ GB"
    ):
        startup.check_memory([group], config, widened=8_000_001)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["run", "batch", "verify"])
def test_commands_refuse_a_cache_beside_which_no_matrix_could_be_widened(
    command, kvrt, tiny, prefilled, monkeypatch, tmp_path
):
    asked, check = [], startup.check_memory

    def spy(groups, config, recurrent, *, widened, **options):
        """Memory that the cache fits into, and nothing beside it."""
        how = of_blocks if options.get("paged") else of_cells
        n_bytes = how(groups, recurrent, config).n_bytes
        monkeypatch.setattr(startup, "available_bytes", lambda: n_bytes)
        check(groups, config, recurrent, widened=0, **options)
        asked.append(widened)
        check(groups, config, recurrent, widened=widened, **options)

    monkeypatch.setattr(startup, "check_memory", spy)
    (tmp_path / "in.jsonl").write_text(json.dumps({"id": "a", "prompt": "the"}) + "\n")
    given = {
        "run": ("-p", "the", "-c", 64),
        "batch": ("-i", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", "-c", 64),
        "verify": (prefilled, "--check_logits"),
    }
    done = kvrt(command, *given[command], "-m", tiny)
    assert (done.code, done.out, len(asked)) == (2, b"", 1)
    assert "for a widened matrix" in done.err and "lower -c" in done.err


def test_memory_that_runs_out_is_one_line():
    with pytest.raises(KvrtError, match=r"out of memory .* lower -c"), startup.enough_memory():
        raise MemoryError("Unable to allocate 9 TiB")


def test_a_folder_of_programs_that_others_may_write_is_not_used(
    tmp_path, monkeypatch, capfd, cache
):
    import jax

    monkeypatch.setenv("KVRT_CACHE", str(tmp_path))
    kept = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        (tmp_path / "xla").mkdir()
        (tmp_path / "xla").chmod(0o777)
        startup.keep_programs_or_warn()
        assert not jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    finally:
        jax.config.update("jax_compilation_cache_dir", kept)
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and "compiled programs are not kept" in err


def test_a_stop_text_is_checked_before_a_model_is_sought():
    with pytest.raises(UsageError, match="empty"):
        parse.parse_flags(["-m", "none", "-p", "x", "--stop="])
