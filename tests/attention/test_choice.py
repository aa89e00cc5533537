"""`attention="auto"`: who decides what, from whose verdict, and what is kept of it."""

import dataclasses
import functools
import json
import os
import pathlib
import socket
import subprocess
import sys
import types

import jax
import pytest

from kvrt import CacheConfig, Engine, MaskSpec, Runtime
from kvrt.attention import registry
from kvrt.attention.choice import AttentionChoice, choose, decide, verdicts
from kvrt.attention.choice.cases import cases_of
from kvrt.attention.choice.self_test import Verdict
from kvrt.attention.choice.verdicts import Verdicts
from kvrt.cli.batch import progress as metrics_table
from kvrt.errors import NoKernel
from kvrt.files import locks
from kvrt.program.layout import cell_layout
from kvrt.serving import prometheus
from tests.toys import HybridLm, ToyLm

OPTIMISED = False
SMALL = CacheConfig(n_ctx=32, block_size=16, n_ubatch=8)
PASSED = Verdict(passed=True, why="largest difference 1e-06, limit 0.0001")
FAILED = Verdict(passed=False, why="failed its self-test at head size 80: largest difference 0.03")


def cases(model=None, config=SMALL, shards=None):
    model = model or ToyLm(n_layers=1)
    layout = cell_layout(model.groups, model.recurrent, config)
    return cases_of(model, config, layout.stored, shards)


# Without a prompt: what is traced here is traced in less time.
ONE = cases(config=dataclasses.replace(SMALL, n_ubatch=1))


class Judge:
    """Gives verdicts by kernel, and counts how often it was asked for one."""

    def __init__(self, **verdicts):
        self.verdicts, self.asked = verdicts, []

    def __call__(self, case, kernel):
        self.asked.append((case, kernel))
        return self.verdicts[kernel]


@pytest.fixture
def kernels(monkeypatch):
    """Makes CPUs a platform with kernels of these names, which run as XLA does."""

    def make(*names):
        monkeypatch.setattr(registry, "_PLATFORMS", dict.fromkeys(names, ("cpu",)))
        for name in names:
            monkeypatch.setitem(registry.IMPLEMENTATIONS, name, registry.IMPLEMENTATIONS["chunked"])

    return make


@pytest.fixture(autouse=True)
def no_programs():
    """A command that ran in this process before leaves JAX a folder, and verdicts in it."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A folder for verdicts, not yet there."""
    folder = tmp_path / "verdicts"
    monkeypatch.setattr(verdicts, "folder_of_verdicts", lambda: folder)
    return folder


def chosen(tests, config="auto", platform="cpu", agree=None):
    return choose(config, platform, lambda: ONE, agree, Verdicts(tests))


def test_a_platform_without_a_kernel_looks_at_nothing():
    def no_cases():
        raise AssertionError("the model was traced")

    found = choose("auto", "cpu", no_cases)
    assert str(found) == "chunked: no kernel for cpu"
    assert registry.kernels("gpu") == ("pallas_gpu", "mosaic_gpu")
    assert registry.kernels("rocm") == ("pallas_gpu",)
    assert registry.kernels("tpu") == ("pallas_tpu",)


@pytest.mark.parametrize(("capability", "first"), [("9.0", "mosaic_gpu"), ("8.0", "pallas_gpu")])
def test_hopper_tries_mosaic_gpu_first(monkeypatch, capability, first):
    device = types.SimpleNamespace(platform="gpu", compute_capability=capability)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert registry.kernels("gpu")[0] == first
    assert sorted(registry.kernels("gpu")) == ["mosaic_gpu", "pallas_gpu"]


def test_who_names_a_kernel_gets_it_or_a_refusal(kernels):
    assert choose("chunked", "tpu", list) == AttentionChoice("chunked", "named")
    assert choose("pallas_gpu", "gpu", list) == AttentionChoice("pallas_gpu", "named")
    with pytest.raises(NoKernel, match="'pallas_gpu' runs on cuda or rocm, not on cpu"):
        choose("pallas_gpu", "cpu", list)
    # Its self-test is not asked for, so a kernel that fails it is used all the same.
    kernels("fake")
    assert chosen(Judge(fake=FAILED), "fake") == AttentionChoice("fake", "named")


def test_a_named_kernel_that_cannot_serve_is_refused_with_the_runtime(kernels, monkeypatch):
    def picky(qkv, kv, view, how):
        raise NoKernel("this cache is not for it; use attention='chunked'")

    kernels("picky")
    monkeypatch.setitem(registry.IMPLEMENTATIONS, "picky", lambda: picky)
    with pytest.raises(NoKernel, match=r"^this cache is not for it; use attention='chunked'"):
        Runtime(ToyLm(n_layers=1), dataclasses.replace(SMALL, attention="picky"))
    # A model without attention asks nothing of it.
    config = dataclasses.replace(SMALL, attention="picky")
    assert Runtime(HybridLm(attention=False), config).config.attention == "picky"


def test_the_first_kernel_that_passes_is_taken_and_others_say_why(kernels):
    kernels("first", "second")
    found = chosen(Judge(first=PASSED))
    assert str(found) == "first: self-test passed"
    found = chosen(Judge(first=FAILED, second=PASSED))
    assert str(found) == "second: self-test passed"
    tests = Judge(first=FAILED, second=Verdict(passed=False, why="does not serve int2"))
    assert str(chosen(tests)) == f"chunked: first {FAILED.why}; second does not serve int2"


def test_a_model_without_attention_needs_no_kernel(kernels):
    kernels("fake")
    model = HybridLm(attention=False)
    found = choose("auto", "cpu", lambda: cases(model), None, Verdicts(Judge()))
    assert str(found) == "chunked: no layer has attention"


def test_all_cases_have_to_pass(kernels):
    kernels("fake")
    masks = [MaskSpec(), MaskSpec(kind="window", size=8)]
    both = cases(ToyLm(masks=masks))
    assert [c.group.mask for c in both] == masks

    def test(case, kernel):
        return FAILED if case.group.mask.size else PASSED

    found = choose("auto", "cpu", lambda: both, None, Verdicts(test))
    assert str(found) == f"chunked: fake {FAILED.why}"


def test_processes_take_a_kernel_together_or_not_at_all(kernels):
    kernels("fake")
    votes = []

    def agree(passed):
        votes.append(passed)
        return [passed, True, False]

    found = chosen(Judge(fake=PASSED), agree=agree)
    assert str(found) == "chunked: fake failed its self-test in process 2"
    assert str(chosen(Judge(fake=PASSED), agree=lambda passed: [passed] * 3)).startswith("fake:")
    # One that failed here is voted on as well, for the others wait.
    assert chosen(Judge(fake=FAILED), agree=agree).reason == f"fake {FAILED.why}"
    assert votes == [True, False]


@pytest.mark.slow
def test_two_processes_choose_the_same():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    here = pathlib.Path(__file__)
    words = [sys.executable, str(here.with_name("choice_program.py")), port]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (here.parents[1], here.parents[2])))}
    start = functools.partial(subprocess.Popen, env=env, stdout=subprocess.PIPE, text=True)
    both = [start([*words, str(i)]) for i in range(2)]
    found = [json.loads(p.communicate(timeout=120)[0].splitlines()[-1]) for p in both]
    wanted = {"implementation": "second", "reason": "self-test passed", "config": "second"}
    assert found == [wanted, wanted]


# --- what is kept --------------------------------------------------------------------------------


@pytest.mark.parametrize("verdict", [PASSED, FAILED])
def test_a_second_start_reads_the_verdict_and_tests_nothing(folder, kernels, verdict):
    kernels("fake")
    tests = Judge(fake=verdict)
    first, again = chosen(tests), chosen(tests)
    assert len(tests.asked) == 1
    assert again == AttentionChoice(first.implementation, f"{first.reason} (cached)")
    (file,) = folder.iterdir()
    held = json.loads(file.read_text())
    assert held["value"]["passed"] == verdict.passed and held["key"]["kernel"] == "fake"
    assert held["key"]["jax"] == jax.__version__ and held["key"]["device"] == "cpu"
    assert held["key"]["case"]["group"]["head_dim"] == 16


def test_a_process_tests_once_with_and_without_a_folder(kernels, monkeypatch):
    kernels("fake")
    assert verdicts.folder_of_verdicts() is None or jax.config.jax_compilation_cache_dir
    monkeypatch.setattr(verdicts, "folder_of_verdicts", lambda: None)
    tests = Judge(fake=PASSED)
    held = Verdicts(tests)
    for _ in range(2):
        assert choose("auto", "cpu", lambda: ONE, None, held).reason == "self-test passed"
    assert len(tests.asked) == 1


DAMAGES = {
    "empty": lambda file: file.write_text(""),
    "torn": lambda file: file.write_bytes(file.read_bytes()[:100]),
    "no text": lambda file: file.write_bytes(b"\xff\xfe\x00"),
    "a list": lambda file: file.write_text("[]"),
    "another key": lambda file: file.write_text(file.read_text().replace('"fake"', '"other"')),
    "no verdict": lambda file: file.write_text(file.read_text().replace("true", '"yes"')),
    "deep": lambda file: file.write_text("[" * 60_000),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_said_and_written_anew(folder, kernels, damage):
    kernels("fake")
    tests = Judge(fake=PASSED)
    chosen(tests)
    (file,) = folder.iterdir()
    DAMAGES[damage](file)
    with pytest.warns(UserWarning, match=r"self-test runs again") as said:
        assert chosen(tests).reason == "self-test passed"
    assert len(said) == 1 and "\n" not in str(said[0].message)
    assert chosen(tests).reason == "self-test passed (cached)" and len(tests.asked) == 2
    assert len(list(folder.iterdir())) == 1


def test_a_folder_in_the_place_of_a_file_is_no_error(folder, kernels):
    kernels("fake")
    tests = Judge(fake=PASSED)
    chosen(tests)
    (file,) = folder.iterdir()
    file.unlink()
    file.mkdir()
    for _ in range(2):
        with pytest.warns(UserWarning, match="it is a folder"):
            assert chosen(tests).reason == "self-test passed"


def test_a_folder_that_cannot_be_written_is_no_error(folder, kernels):
    kernels("fake")
    folder.write_text("")
    tests = Judge(fake=PASSED)
    with pytest.warns(UserWarning, match="not a directory"):
        assert chosen(tests).reason == "self-test passed"
    assert folder.read_text() == ""


def test_a_disk_that_is_full_is_no_error(folder, kernels, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    kernels("fake")
    monkeypatch.setattr(os, "replace", full)
    assert chosen(Judge(fake=PASSED)).reason == "self-test passed"
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("what", ["device", "platform", "driver", "jax", "jaxlib", "sources"])
def test_another_version_of_anything_is_tested_again(folder, kernels, monkeypatch, what):
    kernels("fake")
    tests = Judge(fake=PASSED)
    chosen(tests)
    found = verdicts.environment()
    assert set(found) == {"device", "platform", "driver", "jax", "jaxlib", "flags", "sources"}
    monkeypatch.setattr(verdicts, "environment", lambda: found | {what: "another"})
    assert chosen(tests).reason == "self-test passed" and len(tests.asked) == 2
    monkeypatch.undo()


def test_a_test_that_ended_its_process_is_not_run_again(folder, kernels):
    kernels("fake")
    tests = Judge(fake=PASSED)
    chosen(tests)
    (file,) = folder.iterdir()
    mark = file.with_suffix(".running")
    file.rename(mark)  # something is in it, and nobody has it locked
    found = str(chosen(tests))
    assert found.startswith("chunked: fake ended its process in its self-test at head size 16, f32")
    assert f"remove {file} to try again" in found and str(chosen(tests)) == f"{found} (cached)"
    assert len(tests.asked) == 1 and not mark.exists()
    file.unlink()
    assert str(chosen(tests)) == "fake: self-test passed" and len(tests.asked) == 2


def test_a_test_that_another_process_runs_now_is_run_here_too(folder, kernels):
    kernels("fake")
    tests = Judge(fake=PASSED)
    chosen(tests)
    (file,) = folder.iterdir()
    mark = file.with_suffix(".running")
    file.rename(mark)
    with mark.open("r+b") as other:
        unlock = locks.lock_file(other.fileno(), mark)
        assert str(chosen(tests)) == "fake: self-test passed" and mark.exists()
    unlock()
    assert str(chosen(tests)) == "fake: self-test passed (cached)"


def test_a_test_that_raises_leaves_no_mark(folder, kernels):
    def stop(case, kernel):
        assert [x.suffix for x in folder.iterdir()] == [".running"]
        raise KeyboardInterrupt

    kernels("fake")
    with pytest.raises(KeyboardInterrupt):
        choose("auto", "cpu", lambda: ONE, None, Verdicts(stop))
    assert list(folder.iterdir()) == []


def test_what_ran_out_of_memory_is_not_kept(folder, kernels):
    kernels("fake")
    tests = Judge(fake=dataclasses.replace(FAILED, lasting=False))
    held = Verdicts(tests)
    for _ in range(2):
        choose("auto", "cpu", lambda: ONE, None, held)
    assert len(tests.asked) == 2 and list(folder.iterdir()) == []


def test_verdicts_lie_with_the_compiled_programs():
    before = jax.config.jax_compilation_cache_dir
    try:
        for kept, wanted in [(None, None), ("gs://a/b", None), ("/a/b", "/a/b/kvrt_self_tests")]:
            jax.config.update("jax_compilation_cache_dir", kept)
            assert verdicts.folder_of_verdicts() == (wanted and pathlib.Path(wanted))
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_the_digest_of_sources_follows_the_kernels(monkeypatch):
    read = pathlib.Path.read_bytes
    seen = []

    def changed(path):
        seen.append(path.name)
        return read(path) + (b"#" if path.name == "gpu_kernel.py" else b"")

    monkeypatch.setattr(pathlib.Path, "read_bytes", changed)
    other = verdicts._sources.__wrapped__()
    assert other != verdicts._sources()
    assert {"gpu_kernel.py", "tpu.py", "xla.py", "codec.py", "mask.py", "self_test.py"} <= set(seen)


# --- runtimes and engines ------------------------------------------------------------------------


def test_a_choice_is_made_once_and_told_everywhere(kernels, monkeypatch):
    kernels("fake")
    tests = Judge(fake=PASSED)
    monkeypatch.setattr(decide, "_verdicts", Verdicts(tests))
    runtime = Runtime(ToyLm(n_layers=1), SMALL)
    engines = [Engine(ToyLm(n_layers=1), SMALL)]
    assert len(tests.asked) == 1
    for one in (runtime, *engines):
        assert one.config.attention == one.programs.spec.config.attention == "fake"
        assert str(one.stats().attention) == "fake: self-test passed"
    stats = engines[0].stats()
    line = 'kvrt_attention_info{implementation="fake",reason="self-test passed"} 1.0'
    assert line in prometheus.exposition(stats).splitlines()
    assert ("attention", "fake: self-test passed") in list(metrics_table.rows(stats))
    assert SMALL.attention == "auto"
