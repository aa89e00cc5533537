"""The form of an eight-bit product: a rule of the processor, fixed when a model is opened."""

from pathlib import Path

import pytest

from kvrt_models import load
from kvrt_models.layers.int8 import Forms, Int8Matrix
from kvrt_models.weights import forms, loading, measured_forms
from kvrt_models.weights.forms import few_by_processor, forms_here, forms_line, forms_of
from tests.peer import tiny_gguf

FORMS = Forms(limits=((11, "sum"), (64, "int8"), (1 << 30, "f32")))


def test_a_form_is_taken_up_to_its_limit():
    taken = [FORMS.of(n) for n in (1, 11, 12, 64, 65, 4096)]
    assert taken == ["sum", "sum", "int8", "int8", "f32", "f32"]


@pytest.mark.parametrize(
    ("flags", "few", "most"),
    [
        ("fma avx2 avx512_vnni", "sum", 8),
        ("avx_vnni", "int8", 4),
        ("avx2", "sum", 8),
        ("", "int8", 4),
    ],
)
def test_the_processor_decides(monkeypatch, flags, few, most):
    monkeypatch.setattr(forms, "_features", flags.split)
    found = forms_of(few_by_processor())
    assert found.of(1) == found.of(most) == few
    assert found.of(most + 1) == "f32"


@pytest.mark.parametrize(("jaxlib", "few"), [((0, 9), "int8"), ((0, 12), "sum"), ((0, 13), "int8")])
def test_the_version_of_jaxlib_decides(monkeypatch, jaxlib, few):
    monkeypatch.setattr(forms, "_features", lambda: ["avx2"])
    monkeypatch.setattr(forms, "_jaxlib", lambda: jaxlib)
    assert forms_of(few_by_processor()).of(1) == few


@pytest.mark.parametrize(
    ("ms", "few"),
    [
        ({"sum": 1.0, "int8": 0.8}, "int8"),
        ({"sum": 1.0, "int8": 0.9}, "sum"),
        ({"sum": 1.0, "int8": 5.0}, "sum"),
    ],
)
def test_a_clear_measurement_overrules_the_rule_for_later_starts(monkeypatch, tmp_path, ms, few):
    monkeypatch.setenv("KVRT_CACHE", str(tmp_path))
    monkeypatch.setattr(forms, "_features", lambda: ["avx2"])
    assert forms_here() == forms_of(few_by_processor())
    measured_forms.keep_fastest(ms, "sum", forms.processor())
    assert forms_here().of(1) == few
    assert forms_of(few_by_processor()).of(1) == "sum"
    monkeypatch.setattr(forms, "_features", lambda: ["avx2", "avx512bw"])
    assert forms_here() == forms_of(few_by_processor())
    monkeypatch.setattr(forms, "_features", lambda: ["avx2"])
    measured_forms.keep_fastest({"sum": 1.0, "int8": 1.0}, "sum", forms.processor())
    assert forms_here() == forms_of(few_by_processor()) and not list(
        tmp_path.glob("weights/*.json")
    )


def test_a_damaged_measurement_counts_for_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("KVRT_CACHE", str(tmp_path))
    measured_forms.keep_fastest({"sum": 9.0, "int8": 1.0}, "sum", "here")
    (path,) = tmp_path.glob("weights/*.json")
    assert measured_forms.kept_fastest("here") == "int8"
    for text in ("", "[]", "{}", path.read_text().replace("int8", "f64")):
        path.write_text(text)
        assert measured_forms.kept_fastest("here") is None


def test_every_form_is_measured(monkeypatch):
    monkeypatch.setattr(measured_forms, "_SIZE", (24, 64))
    found = measured_forms.measure()
    assert list(found) == ["sum", "int8", "f32"] and min(found.values()) > 0


def test_an_opened_model_has_the_forms_of_the_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tiny_gguf.write_gguf(tmp_path / "tiny.gguf", tiny_gguf.TinyModel(n_layers=1))
    monkeypatch.setenv("KVRT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(loading, "_LEAST_CHOSEN", 0)
    monkeypatch.setattr(forms, "_features", lambda: ["neon"])
    shapes = load.open_model(path, dtype="int8").weights.shapes.values()
    matrices = [x for x in shapes if isinstance(x, Int8Matrix)]
    assert {x.forms for x in matrices} == {forms_of(few_by_processor())} != {Forms()}


def test_people_are_told():
    assert forms_line(FORMS) == "sum to 11 tokens, int8 to 64, then f32"
    assert forms_line(Forms(limits=((1 << 30, "f32"),))) == "always f32"
