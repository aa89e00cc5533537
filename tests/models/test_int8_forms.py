"""Which form of an eight-bit product is taken: by processor, or as measured and kept in a file."""

import json
from pathlib import Path

import jax
import pytest

from kvrt_models import load
from kvrt_models.layers.int8 import FORMS, Forms, Int8Matrix
from kvrt_models.weights import forms, loading
from kvrt_models.weights.forms import forms_line, limits_of, measured_forms
from tests.peer import tiny_gguf

FOUND = Forms(whole=((11, "int8"), (64, "bf16"), (1 << 30, "f32")), pieces=((1 << 30, "int8"),))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Counts measurements, which all find the same."""
    calls: list[None] = []

    def measure() -> Forms:
        calls.append(None)
        return FOUND

    monkeypatch.setattr(forms, "measure_forms", measure)
    return calls


def test_limits_lie_between_what_differs():
    limits = limits_of((8, 16, 32, 128), ("int8", "bf16", "bf16", "f32"))
    assert limits == ((11, "int8"), (64, "bf16"), (1 << 30, "f32"))
    assert limits_of((16, 64), ("int8", "int8")) == ((1 << 30, "int8"),)


def test_a_form_is_taken_up_to_its_limit():
    taken = [FOUND.of(n, in_pieces=False) for n in (1, 11, 12, 64, 65, 4096)]
    assert taken == ["int8", "int8", "bf16", "bf16", "f32", "f32"]
    assert FOUND.of(4096, in_pieces=True) == "int8"


@pytest.mark.parametrize(
    ("flags", "most"), [("fma avx2 avx512_vnni", 64), ("avx_vnni", 64), ("fma avx2", 6), ("", 6)]
)
def test_without_a_measurement_the_processor_decides(monkeypatch, flags, most):
    monkeypatch.setattr(forms, "_features", flags.split)
    found = forms.forms_by_processor()
    assert found.of(most, in_pieces=False) == "int8" != found.of(most + 1, in_pieces=False)


def test_a_start_measures_nothing_and_takes_what_doctor_kept(
    tmp_path: Path, measured, monkeypatch: pytest.MonkeyPatch
):
    spec = tiny_gguf.TinyModel(n_layers=1)
    path = tiny_gguf.write_gguf(tmp_path / "tiny.gguf", spec)
    monkeypatch.setenv("KVRT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(loading, "_LEAST_CHOSEN", 0)

    def taken() -> set[Forms]:
        opened = load.open_model(path, dtype="int8")
        return {x.forms for x in opened.weights.shapes.values() if isinstance(x, Int8Matrix)}

    assert taken() == {forms.forms_by_processor()} and not measured
    measured_forms(tmp_path / "cache")
    assert taken() == {FOUND} and len(measured) == 1


def test_what_was_measured_is_kept(tmp_path: Path, measured: list[None]):
    assert [measured_forms(tmp_path / "cache") for _ in range(3)] == [FOUND] * 3
    assert len(measured) == 1


@pytest.mark.parametrize(
    "spoil",
    [
        lambda held: "{",
        lambda held: json.dumps({"key": held["key"]}),
        lambda held: json.dumps(held)[:40],
        lambda held: json.dumps(held | {"value": {"whole": [], "pieces": []}}),
        lambda held: json.dumps(held | {"value": {"whole": [[1, "int4"]], "pieces": [[1, "f32"]]}}),
        lambda held: json.dumps(held | {"value": 3}),
    ],
)
def test_a_damaged_file_is_measured_again_and_said(tmp_path: Path, measured, spoil):
    measured_forms(tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text(spoil(json.loads(path.read_text())))
    with pytest.warns(UserWarning, match="damaged; kvrt doctor measures eight-bit products again"):
        assert measured_forms(tmp_path) == FOUND
    assert measured_forms(tmp_path) == FOUND
    assert len(measured) == 2


def test_another_machine_measures_again(tmp_path: Path, measured, monkeypatch: pytest.MonkeyPatch):
    measured_forms(tmp_path)
    monkeypatch.setattr(forms, "_processor", lambda: "another")
    measured_forms(tmp_path)
    assert len(measured) == 2


def test_a_folder_that_cannot_be_written_costs_a_measurement(
    tmp_path: Path, measured, monkeypatch: pytest.MonkeyPatch
):
    taken = tmp_path / "file"
    taken.write_text("")
    with pytest.warns(UserWarning, match="cannot be read: not a directory"):
        measured_forms(taken / "cache")
    measured.clear()
    monkeypatch.setattr(forms, "read_kept", lambda *_: None)
    assert [measured_forms(taken / "cache") for _ in range(2)] == [FOUND] * 2
    assert len(measured) == 2


def test_people_are_told():
    whole = "int8 to 11 tokens, bf16 to 64, then f32"
    assert forms_line(FOUND) == f"{whole}; large matrices: always int8"
    fixed = forms_line(Forms(whole=((1 << 30, "f32"),)))
    assert fixed == "always f32; large matrices: int8 to 24 tokens, then f32"


@pytest.mark.slow
def test_measuring_gives_forms_that_exist():
    with jax.default_device(jax.devices("cpu")[0]):
        found = forms.measure_forms()
    for limits in (found.whole, found.pieces):
        tokens, names = zip(*limits, strict=True)
        assert list(tokens) == sorted(tokens) and set(names) <= set(FORMS)
