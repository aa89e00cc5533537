"""Models whose weights have NaN: commands end with 1 and a line, and keep what was right."""

import dataclasses
import json

import gguf
import numpy as np
import pytest
from conftest import PROMPT, tiny_gguf
from test_mistakes import fails

from kvrt import session
from kvrt.store.codec import Quantized


def damaged(path, name, row):
    """A tiny model with NaN in a row of a tensor, or in all of it with None."""
    tiny_gguf.write_gguf(path, tiny_gguf.TinyModel(n_layers=1))
    tensor = next(t for t in gguf.GGUFReader(path, "r+").tensors if t.name == name)
    tensor.data[slice(None) if row is None else row] = np.nan
    return path


@pytest.fixture(scope="module")
def nothing_works(tmp_path_factory):
    """Every token's logits are NaN, and its keys and values are sound."""
    return damaged(tmp_path_factory.mktemp("bad") / "all.gguf", "output_norm.weight", None)


@pytest.fixture(scope="module")
def no_keys(tmp_path_factory):
    """Every token's keys, values and logits are NaN."""
    return damaged(tmp_path_factory.mktemp("bad") / "keys.gguf", "blk.0.attn_norm.weight", None)


@pytest.fixture
def breaks_off(go, tmp_path):
    """A model that cannot read the sixth token that it writes, and what it writes till then."""
    done = go("--json", "--quiet")
    wanted = json.loads(done.out)
    ids = wanted["tokens"]
    at = next(i for i, t in enumerate(ids) if i >= 2 and t not in ids[:i])
    return damaged(tmp_path / "off.gguf", "token_embd.weight", ids[at]), ids[: at + 1]


@pytest.mark.slow
def test_a_run_ends_where_the_logits_do_with_what_was_right(go, breaks_off, tmp_path):
    model, wanted = breaks_off
    path = tmp_path / "a.kv"
    done = go("-m", model, "--session", path, "--session_all", "--json", "--quiet")
    assert done.code == 1
    told = json.loads(done.out)
    assert told["tokens"] == wanted and told["finish_reason"] == "bad_logits"
    (line,) = done.err.splitlines()
    where = f"sequence 0: the logits of its token at position {told['n_prompt'] + len(wanted) - 1}"
    assert line.startswith(f"kvrt: {where} have NaN") and line.endswith("the answer is not saved")
    # The prompt, which was sound, is there alone.
    assert sum(session.read_manifest(path).n_tokens.values()) == told["n_prompt"]


@pytest.mark.slow
def test_text_is_written_up_to_there(go, breaks_off):
    model, _ = breaks_off
    whole = go("--quiet").out
    done = go("-m", model)
    assert done.code == 1 and done.out and whole.startswith(done.out.rstrip())
    assert "; logits are not finite" in done.err


@pytest.mark.parametrize("command", ["run", pytest.param("prefill", marks=pytest.mark.slow)])
def test_a_prompt_that_came_out_damaged_is_not_saved(kvrt, no_keys, book, tmp_path, command):
    path = tmp_path / "a.kv"
    where = ["-o", path] if command == "prefill" else ["-n", 3, "--session", path]
    done = kvrt(command, "-m", no_keys, "-c", 64, "-f", book, "--quiet", *where)
    fails(done, 1, f"{path}: not saved, since the keys of layer 0 have", "first at position 0")
    assert not path.exists()


def test_without_a_session_the_first_token_says_so(kvrt, nothing_works):
    done = kvrt("run", "-m", nothing_works, "-c", 64, "-p", PROMPT, "-n", 3, "--quiet")
    fails(done, 1, "the logits of its token at position 2 have NaN")


@pytest.mark.slow
def test_a_question_without_an_answer_ends_with_a_line(kvrt, book, tmp_path):
    model, path = damaged(tmp_path / "z.gguf", "token_embd.weight", ord("Z")), tmp_path / "a.kv"
    assert kvrt("prefill", "-m", model, "-c", 64, "-f", book, "-o", path).code == 0
    kept = path.read_bytes()
    asked = ["ask", path, "-m", model, "-n", 3, "--quiet"]
    assert kvrt(*asked, "of the").code == 0
    done = kvrt(*asked, "Z")
    assert done.code == 1 and "have NaN, +inf or no finite value" in done.err
    assert done.err.count("\n") == 1 and path.read_bytes() == kept


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("bf16", "f16", "int8")]


@pytest.mark.parametrize("kind", ["f32", *SLOW])
def test_verify_finds_keys_and_values_that_are_no_numbers(kvrt, go, tmp_path, kind):
    path = tmp_path / "a.kv"
    assert go("--session", path, "-n", 1, "--cache_type_k", kind, "--cache_type_v", kind).code == 0
    assert kvrt("verify", path).code == 0
    held = session.read(path)
    (block,) = held.groups[0].blocks
    values = np.array(block.v.scale if isinstance(block.v, Quantized) else block.v)
    values[0, 1, 0, 0] = 0x7F80 if kind == "bf16" else np.inf  # bf16 is kept as its bits
    v = dataclasses.replace(block.v, scale=values) if isinstance(block.v, Quantized) else values
    group = dataclasses.replace(held.groups[0], blocks=[dataclasses.replace(block, v=v)])
    path.unlink()
    session.save(path, dataclasses.replace(held, groups=(group,)))
    # Digests hold, for this is what was saved.
    done = kvrt("verify", path)
    fails(done, 1, f"{path}: the values of layer 0 have 1 value of NaN", "first at position 1;")


@pytest.mark.slow
def test_a_batch_tells_of_it_and_goes_on(kvrt, breaks_off, tmp_path):
    model, wanted = breaks_off
    lines = [
        {"id": "off", "prompt": PROMPT, "n_predict": 20, "temp": 0},
        {"id": "fine", "prompt": PROMPT, "n_predict": 2, "temp": 0},
    ]
    given, out, counted = (tmp_path / x for x in ("in.jsonl", "out.jsonl", "m.prom"))
    given.write_text("".join(json.dumps(x) + "\n" for x in lines))
    flags = ["-c", 256, "--n_batch", 8, "--n_seq_max", 4, "--block_size", 8, "--metrics", counted]
    done = kvrt("batch", "-m", model, "-i", given, "-o", out, *flags)
    assert done.code == 1
    found = {r["id"]: r for r in map(json.loads, out.read_text().splitlines())}
    assert found["fine"]["tokens"] == wanted[:2] and "error" not in found["fine"]
    assert "have NaN, +inf or no finite value" in found["off"]["error"]
    assert found["off"]["finish_reason"] == "error"
    assert "kvrt_bad_logits_total 1.0\n" in counted.read_text()
