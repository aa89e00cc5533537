"""A GGUF model in several files: any part names it, and one that is missing is named."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from kvrt.errors import BadModelFile
from kvrt_models import load
from kvrt_models.file_digest import model_digest
from kvrt_models.gguf.parts import model_name, part_paths
from tests.peer import tiny_gguf

MODEL = tiny_gguf.TinyModel(n_layers=1)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    tiny_gguf.write_gguf(folder / "tiny.gguf", MODEL, n_part=5)
    return folder


@pytest.fixture
def parts(written, tmp_path):
    return [Path(shutil.copy(path, tmp_path)) for path in sorted(written.iterdir())]


def test_any_part_names_the_model(parts, tmp_path):
    whole = tiny_gguf.write_gguf(tmp_path / "whole.gguf", MODEL)
    wanted = load.open_model(whole, on_host=True)
    for part in parts:
        found = load.open_model(part, on_host=True)
        assert (found.name, found.spec, len(parts)) == ("tiny", wanted.spec, 3)
        assert found.tokenizer.digest == wanted.tokenizer.digest
        assert load.open_tokenizer(part).digest == wanted.tokenizer.digest
        assert load.describe_model(part).name == "tiny"
        weights = found.weights.wait()
        for name, x in wanted.weights.wait().items():
            np.testing.assert_array_equal(weights[name], x)


def test_weights_and_results_depend_on_every_part(parts):
    files = load._gguf(parts[1])[1].files
    assert files == tuple(parts)
    first = {model_digest(path) for path in parts}
    with open(parts[2], "r+b") as file:
        file.seek(-1, 2)
        file.write(b"!")
    assert len(first) == 1 and model_digest(parts[0]) not in first


def test_a_missing_part_is_named(parts):
    for path in parts[1:]:
        path.unlink()
    line = (
        r"tiny-00002-of-00003\.gguf: missing, part of 3, and 1 more; fetch the model's parts again"
    )
    with pytest.raises(BadModelFile, match=line):
        load.describe_model(parts[0])


def test_parts_keep_their_names(parts, tmp_path):
    renamed = shutil.copy(parts[0], tmp_path / "renamed.gguf")
    line = r"it is part 1 of 3, and its name does not end in -00001-of-00003\.gguf; fetch"
    with pytest.raises(BadModelFile, match=line):
        load.describe_model(renamed)
    shutil.copy(parts[1], parts[2])
    line = r"tiny-00003-of-00003\.gguf: its header says part 2 of 3, its name part 3 of 3"
    with pytest.raises(BadModelFile, match=line):
        load.describe_model(parts[0])


def test_parts_of_another_model_are_refused(parts, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    tiny_gguf.write_gguf(other / "tiny.gguf", tiny_gguf.TinyModel(n_layers=1, tied=True), n_part=5)
    shutil.copy(other / "tiny-00002-of-00003.gguf", tmp_path)
    with pytest.raises(
        BadModelFile, match=r"tiny-0000[23]-of-00003\.gguf: tensor .* earlier part too"
    ):
        load.describe_model(parts[0])


def test_a_name_without_numbers_is_one_file(tmp_path):
    for name in ("a.gguf", "a-1-of-3.gguf", "-00001-of-00003.gguf"):
        assert part_paths(tmp_path / name) == [tmp_path / name]
        assert model_name(tmp_path / name) == name.removesuffix(".gguf")
