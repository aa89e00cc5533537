"""`kvrt doctor`, and what other commands make of "auto"."""

import json

import pytest

from kvrt.attention import registry
from kvrt.attention.choice import decide, verdicts
from kvrt.attention.choice.self_test import Verdict
from kvrt.cli import doctor
from kvrt.cli.batch.digest import Digests
from kvrt.cli.commands import COMMANDS
from kvrt.cli.flags.parse import parse_flags
from kvrt.cli.process import output

SAID = "chunked: no kernel for cpu"


MS = {"int8": 0.2, "f32": 0.4}


@pytest.fixture(autouse=True)
def measured(monkeypatch):
    """What a measurement finds."""
    found = dict(MS)
    monkeypatch.setattr(doctor, "product_ms", lambda: found)
    return found


@pytest.fixture
def tested(monkeypatch, tmp_path):
    """Makes CPUs a platform with a kernel, which passes; the cases that it is tested in."""
    # A process has one folder of programs, with verdicts beside them: here are none of other runs.
    monkeypatch.setattr(verdicts, "folder_of_verdicts", lambda: tmp_path)
    found = []

    def test(case, kernel):
        found.append(case)
        return Verdict(passed=True, why="")

    monkeypatch.setattr(registry, "_PLATFORMS", {"fake": ("cpu",)})
    monkeypatch.setitem(registry.IMPLEMENTATIONS, "fake", registry.IMPLEMENTATIONS["chunked"])
    monkeypatch.setattr(decide, "_verdicts", verdicts.Verdicts(test))
    return found


def test_it_says_what_there_is_and_what_computes_attention(kvrt, cache):
    done = kvrt("doctor")
    assert (done.code, done.err) == (0, "")
    rows = dict(line.split(maxsplit=1) for line in done.out.decode().splitlines())
    assert (
        list(rows)
        == "kvrt JAX platform devices memory programs weights products measured attention".split()
    )
    assert rows["platform"] == "cpu" and rows["attention"] == SAID
    assert rows["programs"] == str(cache / "xla")
    assert rows["weights"].endswith(f" of int8 in {cache / 'weights'}")
    found = json.loads(kvrt("doctor", "--json").out)
    assert found["attention"] == {"implementation": "chunked", "reason": "no kernel for cpu"}
    assert found["devices"] == ["cpu"] * len(found["devices"]) and found["free_bytes"] > 0
    line = "in lanes to 16 tokens, then f32"
    assert (rows["products"], found["int8_products"]) == (f"of int8 weights: {line}", line)
    assert rows["measured"] == "a product of one token: int8 0.200 ms, f32 0.400 ms"
    assert found["int8_product_ms"] == MS
    assert rows["kvrt"].startswith(found["kvrt"]) and rows["JAX"].startswith(found["jax"])


def test_it_says_where_int8_is_no_faster_than_f32(kvrt, monkeypatch, measured):
    assert "--dtype" not in kvrt("doctor").out.decode()
    measured["f32"] = 0.15
    assert "int8 is no faster than f32 here: use --dtype f32" in kvrt("doctor").out.decode()


def test_both_types_of_weights_are_measured(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(doctor, "_SIZE", (24, 64))
    found = doctor.product_ms()
    assert list(found) == ["int8", "f32"] and min(found.values()) > 0


def test_it_says_how_much_room_kept_weights_take(kvrt, monkeypatch, tmp_path):
    monkeypatch.setenv("KVRT_CACHE", str(tmp_path))
    folder = tmp_path / "weights"

    def told():
        return json.loads(kvrt("doctor", "--json").out)["int8_weights"]

    assert told() == {"folder": str(folder), "n_bytes": 0}
    folder.mkdir()
    for name, n_bytes in (("a-0", 3_000_000), ("b-0", 5_000_000)):
        (folder / f"{name}.safetensors").write_bytes(bytes(n_bytes))
        (folder / f".{name}.safetensors.lock").write_bytes(b"no weights")
    assert told() == {"folder": str(folder), "n_bytes": 8_000_000}
    (line,) = [x for x in kvrt("doctor").out.decode().splitlines() if x.startswith("weights")]
    assert line.split(maxsplit=1)[1] == f"8.00 MB of int8 in {folder}"


def test_a_named_kernel_that_this_device_lacks_is_one_line(kvrt):
    done = kvrt("doctor", "--attention", "pallas_tpu")
    assert (done.code, done.out) == (2, b"")
    assert done.err == ("kvrt: attention 'pallas_tpu' runs on tpu, not on cpu; use 'chunked'\n")


def test_it_tests_a_kernel_for_common_sizes_or_for_a_model(kvrt, tiny, tested):
    words = ("doctor", "--cache_type_k", "int8", "--rope", "read", "--mode", "paged")
    said = kvrt(*words).out.decode().splitlines()[-1]
    assert said.split() == ["attention", "fake:", "self-test", "passed"]
    assert [c.group.head_dim for c in tested] == [64, 128, 256]
    assert {(c.type_k, c.type_v, c.rope, c.block_size) for c in tested} == {
        ("int8", "f16", "read", 16)
    }
    tested.clear()
    assert kvrt("doctor", "-m", tiny).code == 0
    (case,) = tested
    assert (case.n_q_heads, case.group.n_kv_heads, case.dtype) == (4, 2, "float32")


def test_a_kernel_is_tested_under_a_status_line(kvrt, tested, monkeypatch):
    shown = []
    waiting = output.waiting

    def noted(what, wanted):
        shown.append((what, wanted))
        return waiting(what, wanted)

    monkeypatch.setattr(output, "waiting", noted)
    kvrt("doctor")
    kvrt("doctor", "--attention", "chunked")
    said = [x for x in shown if x[0].startswith("self-test")]
    assert said == [("self-test of fake", True), ("self-test of ", False)]


def test_results_of_a_batch_go_on_with_those_from_before_auto(tiny):
    batch = next(c for c in COMMANDS if c.name == "batch")

    def common(*words):
        return Digests(parse_flags(["-i", "a", "-o", "b", "-m", str(tiny), *words], batch))._common

    assert common() == common("--attention", "auto") == common("--attention", "chunked")
    assert common() != common("--attention", "pallas_gpu")
