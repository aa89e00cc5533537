"""The KV dtype where no flag names one: a session's, that of results, or the platform's."""

import json

import pytest

from kvrt import session
from kvrt.kv_types import default_kv_dtype, described


def kept_as(done) -> str:
    """What the summary says of keys and values."""
    assert done.code == 0, done.err
    lines = done.err.splitlines()
    (line,) = [x for x in lines if x.startswith("KV dtype") or " MB of " in x]
    return line.split(" MB of ")[-1].removeprefix("KV dtype").strip()


def test_half_precision_as_the_platform_has_it():
    assert [default_kv_dtype(x) for x in ("cpu", "gpu", "tpu")] == ["f16", "bf16", "bf16"]
    assert described("f16", "f16") == "f16"
    assert described("int8", ("f16", "f32")) == "int8 keys, f16, f32 values"


@pytest.mark.slow
def test_a_flag_names_keys_or_values_alone(go):
    assert kept_as(go("-n", 2)) == "f16"
    done = go("-n", 2, "--json", "--cache_type_v", "f32")
    said = json.loads(done.out)
    assert (said["type_k"], said["type_v"]) == ("f16", "f32")


@pytest.mark.slow
def test_a_session_and_a_folder_have_their_own(go, tmp_path):
    path, folder = tmp_path / "wide.kv", tmp_path / "sessions"
    folder.mkdir()
    for to in (path, folder):
        go("--session", to, "--cache_type_k", "f32", "--cache_type_v", "bf16")
        done = go("--session", to, "-n", 2)
        assert kept_as(done) == "f32 keys, bf16 values"
        assert "restored in" in done.err and " 0 computed" not in done.err
    said = session.open_session(path).manifest.fingerprint
    assert (said["type_k"], said["type_v"]) == ("f32", "bf16")
    refused = go("--session", path, "-n", 2, "--cache_type_k", "f16")
    assert refused.code == 2 and "type_k is f32" in refused.err


@pytest.mark.slow
def test_a_batch_goes_on_with_the_type_of_its_results(kvrt, tiny, tmp_path):
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    fixed = ["batch", "-m", tiny, "-i", given, "-o", out, "-c", 256, "--temp", 0, "-n", 2]
    fixed += ["--n_batch", 8, "--n_seq_max", 4, "--block_size", 8]  # those of test_batch.py
    lines = [json.dumps({"id": name, "prompt": "the sand"}) + "\n" for name in "ab"]
    for flags, kind in ((["--cache_type_k", "f32", "--cache_type_v", "f32"], "f32"), ([], "f16")):
        given.write_text(lines[0])
        assert kept_as(kvrt(*fixed, *flags)) == kind
        given.write_text("".join(lines))
        assert kept_as(kvrt(*fixed)) == kind
        assert len(out.read_text().splitlines()) == 2
        refused = kvrt(*fixed, "--cache_type_k", "bf16")
        assert refused.code == 2 and "made with other flags" in refused.err
        out.unlink()
