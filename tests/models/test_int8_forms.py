"""The form of an eight-bit product: a rule of the processor, fixed when a model is opened."""

from pathlib import Path

import pytest

from kvrt_models import load
from kvrt_models.layers.int8 import Forms, Int8Matrix
from kvrt_models.weights import forms, loading
from kvrt_models.weights.forms import forms_by_processor, forms_line
from tests.peer import tiny_gguf

FORMS = Forms(whole=((11, "int8"), (64, "bf16"), (1 << 30, "f32")), pieces=((1 << 30, "int8"),))


def test_a_form_is_taken_up_to_its_limit():
    taken = [FORMS.of(n, in_pieces=False) for n in (1, 11, 12, 64, 65, 4096)]
    assert taken == ["int8", "int8", "bf16", "bf16", "f32", "f32"]
    assert FORMS.of(4096, in_pieces=True) == "int8"


@pytest.mark.parametrize(
    ("flags", "most"), [("fma avx2 avx512_vnni", 64), ("avx_vnni", 64), ("fma avx2", 6), ("", 6)]
)
def test_the_processor_decides(monkeypatch, flags, most):
    monkeypatch.setattr(forms, "_features", flags.split)
    found = forms_by_processor()
    assert found.of(most, in_pieces=False) == "int8" != found.of(most + 1, in_pieces=False)


def test_an_opened_model_has_the_forms_of_the_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tiny_gguf.write_gguf(tmp_path / "tiny.gguf", tiny_gguf.TinyModel(n_layers=1))
    monkeypatch.setenv("KVRT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(loading, "_LEAST_CHOSEN", 0)
    monkeypatch.setattr(forms, "_features", lambda: ["avx_vnni"])
    shapes = load.open_model(path, dtype="int8").weights.shapes.values()
    matrices = [x for x in shapes if isinstance(x, Int8Matrix)]
    assert {x.forms for x in matrices} == {forms_by_processor()} != {Forms()}


def test_people_are_told():
    whole = "int8 to 11 tokens, bf16 to 64, then f32"
    assert forms_line(FORMS) == f"{whole}; large matrices: always int8"
    fixed = forms_line(Forms(whole=((1 << 30, "f32"),)))
    assert fixed == "always f32; large matrices: int8 to 24 tokens, then f32"
