"""The sides of a cell without a GPU: timed interleaved, one that fails, and one that dies."""

import dataclasses

import pytest
from gpu_day_results import GRID, MACHINE

from scripts.gpu_day import measuring, tables
from scripts.gpu_day.budget import Budget
from scripts.gpu_day.measuring import Measuring, OutOfTime
from scripts.gpu_day.sides import busy
from scripts.gpu_day.workers import Failed, Worker


class Fake:
    """Stands for a process: what it says by side, and what it was asked."""

    running = True

    def __init__(self, open_=(), sample=(), seconds=None):
        self.machine, self.asked, self.open = MACHINE, [], set()
        self.fails = {("prepare", k): v for k, v in dict(open_).items()}
        self.fails |= {("sample", k): v for k, v in dict(sample).items()}
        self.seconds = seconds or {}

    def start(self, timeout_s):
        pass

    def stop(self):
        self.open.clear()

    def ask(self, message, timeout_s):
        what, side = message["do"], message.get("side", "")
        self.asked.append((what, side))
        fail = self.fails.get((what, side))
        if fail is not None and not (fail.room and not self.open):
            if not fail.alive:
                self.open.clear()
            raise fail
        match what:
            case "copy":
                return 100.0
            case "prepare":
                self.open.add(side)
                return {"n_bytes": 10**9, "n_layers": 2}
            case "sample":
                assert side in self.open
                return [self.seconds.get(side, 0.02)] * message["n"]
            case "device":
                return 0.019
            case "close":
                self.open.clear()
        return {}


def measured(tmp_path, fake, monkeypatch, cell=GRID, minutes=10):
    monkeypatch.setattr(measuring, "Worker", lambda *args: fake)
    monkeypatch.setattr(measuring.importlib.util, "find_spec", lambda name: None)
    found = Measuring(tmp_path, smoke=False, budget=Budget(minutes))
    return found.measure(cell)


def test_sides_are_timed_interleaved(tmp_path, monkeypatch):
    fake = Fake(seconds={"pallas_gpu": 0.0125})
    line = measured(tmp_path, fake, monkeypatch, dataclasses.replace(GRID, peers="all"))
    sides = line["sides"]
    assert sides["flashinfer"] == {"skipped": "not installed"}
    assert sides["pallas_gpu"]["us"] == [12500.0] * 3 and sides["pallas_gpu"]["share"] == 0.8
    assert set(sides) > {"pallas_gpu bf16 q", "chunked", "jax.nn cudnn"} and line["aim"] == 0.83
    samples = [side for what, side in fake.asked if what == "sample"]
    assert samples[: len(set(samples))] == samples[len(set(samples)) : 2 * len(set(samples))]


def test_a_side_that_dies_is_recorded_and_the_others_are_measured(tmp_path, monkeypatch):
    dead = Failed("its process died with -11", alive=False)
    fake = Fake(open_={"chunked": dead}, sample={"jax.nn xla": dead})
    sides = measured(tmp_path, fake, monkeypatch)["sides"]
    for name in ("chunked", "jax.nn xla"):
        assert sides[name]["failed"] == "its process died with -11"
    assert all("us" in sides[name] for name in ("pallas_gpu", "jax.nn cudnn", "pallas_gpu bf16 q"))
    assert sides["pallas_gpu"]["alone"] is True


def test_a_side_without_room_beside_the_others_is_timed_alone(tmp_path, monkeypatch):
    full = Failed("MemoryError: a layer needs 50 GiB of 30 that are free", room=True)
    sides = measured(tmp_path, Fake(open_={"jax.nn xla": full}), monkeypatch)["sides"]
    assert sides["jax.nn xla"]["alone"] is True and "alone" not in sides["chunked"]


def test_a_cell_of_which_nothing_is_measured_failed(tmp_path, monkeypatch):
    no = Failed("MemoryError: a layer needs 50 GiB of 30 that are free", room=True)

    class Full(Fake):
        def ask(self, message, timeout_s):
            if message["do"] == "prepare":
                raise no
            return super().ask(message, timeout_s)

    line = measured(tmp_path, Full(), monkeypatch)
    assert "50 GiB of 30" in line["failed"] and line["sides"]["chunked"]["no_room"]


def test_what_a_kernel_does_not_read_is_refused_and_no_failure(tmp_path, monkeypatch):
    no = Failed("NoKernel: a cache of 4 bits")
    line = measured(tmp_path, Fake(open_={"pallas_gpu": no}), monkeypatch)
    assert line["sides"]["pallas_gpu"] == {"refused": "NoKernel: a cache of 4 bits"}
    text = tables.render(MACHINE, [GRID], {GRID.name: line})
    assert f"| {GRID.name} | pallas_gpu | NoKernel: a cache of 4 bits |" in text


def test_the_end_of_the_time_is_no_failure_of_a_cell(tmp_path, monkeypatch):
    slow = Failed("no answer within 0 s", alive=False)
    with pytest.raises(OutOfTime):
        measured(tmp_path, Fake(open_={"pallas_gpu": slow}), monkeypatch, minutes=0)


def test_a_step_says_how_long_the_device_was_busy(tmp_path, monkeypatch):
    step = dataclasses.replace(GRID, what="step")
    sides = measured(tmp_path, Fake(), monkeypatch, step)["sides"]
    assert sides["pallas_gpu"]["device_us"] == 19000.0 and sides["pallas_gpu"]["host_gap"] == 0.05
    assert set(sides) == {"pallas_gpu"}  # the loop in XLA only where all peers are wanted


def test_spans_that_overlap_count_once():
    assert busy.covered([(5, 7), (0, 2), (1, 3), (6, 6.5)]) == 5
    assert busy.covered([]) == 0


WORKER = """
import os, time
from scripts.gpu_day.workers import serve
def hello(m):
    return {"said": m["what"]}
def do(m):
    print("noise of a library")
    if m["how"] == "dies": os._exit(7)
    if m["how"] == "hangs": time.sleep(60)
    if m["how"] == "fails": raise ValueError("two\\nlines | and a bar")
    if m["how"] == "full": raise RuntimeError("RESOURCE_EXHAUSTED: 5 GiB")
    return m["how"]
serve({"hello": hello, "do": do})
"""


def test_a_process_may_fail_hang_or_die(tmp_path, monkeypatch):
    (tmp_path / "fake_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    worker = Worker("fake_worker", tmp_path / "log", {}, {"do": "hello", "what": "x"})

    def ask(how, timeout_s=20):
        return worker.ask({"do": "do", "how": how}, timeout_s)

    assert ask("well") == "well" and worker.machine == {"said": "x"}
    for how, told, room, alive in (
        ("fails", "ValueError: two lines / and a bar", False, True),
        ("full", "RuntimeError: RESOURCE_EXHAUSTED", True, True),
        ("dies", "its process died with 7", False, False),
    ):
        with pytest.raises(Failed, match=told) as error:
            ask(how)
        assert (error.value.room, error.value.alive) == (room, alive)
    assert ask("again") == "again"
    monkeypatch.setattr("scripts.gpu_day.workers._END_S", 0.1)
    with pytest.raises(Failed, match="no answer within 0 s"):
        ask("hangs", 0.3)
    assert not worker.running and "noise" in (tmp_path / "log").read_text()
