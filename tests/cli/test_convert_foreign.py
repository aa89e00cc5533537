"""Flags of `kvrt convert` for what files of other programs lack: ids, a sequence, notes."""

import dataclasses
import json

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from test_mistakes import fails

from kvrt import session
from kvrt.cellcache.history import tokens

NOTES = {"model": "tiny", "tokenizer_config": "{}"}


def ids_of(path, seq=0):
    return tokens(session.read(path).history, seq).tolist()


@pytest.fixture
def two(prefilled, tmp_path):
    """A session whose second sequence shares all cells of the first."""
    found, path = session.read(prefilled), tmp_path / "two.kv"
    parts = [dataclasses.replace(x, seqs=x.seqs * np.uint32(3)) for x in found.groups]
    history = dataclasses.replace(
        found.history, pieces={s: found.history.pieces[0] for s in (0, 1)}
    )
    session.save(path, dataclasses.replace(found, groups=tuple(parts), history=history, logits={}))
    return path


@pytest.mark.parametrize("to", ["mlx", "llama.cpp-slot"])
def test_one_of_several_sequences_is_written(kvrt, two, tmp_path, to):
    words = ["convert", two, "--to", to, "-o", tmp_path / "b.bin"]
    fails(kvrt(*words), 2, "the session holds [0, 1]; name one (--seq)")
    assert kvrt(*words, "--seq", 1).code == 0
    fails(kvrt("convert", two, "--to", "f32", "-o", tmp_path / "c", "--seq", 1), 2, "leave it out")


def test_notes_stand_in_a_prompt_cache_of_mlx(kvrt, prefilled, tmp_path):
    notes, cache = tmp_path / "notes.json", tmp_path / "cache.safetensors"
    words = ["convert", prefilled, "--to", "mlx", "-o", cache, "--notes", notes]
    for wrong in ("[1]", '{"model": 1}', "{"):
        notes.write_text(wrong)
        fails(kvrt(*words), 2, str(notes))
    notes.write_text(json.dumps(NOTES))
    assert kvrt(*words).code == 0
    with safe_open(cache, framework="numpy") as file:
        found = file.metadata()
    assert {key: found[f"0.{key}"] for key in NOTES} == NOTES
    fails(kvrt("convert", prefilled, "--to", "f16", "-o", "x", "--notes", notes), 2, "for mlx-lm")


@pytest.mark.slow
def test_a_cache_without_ids_is_read_with_them(kvrt, prefilled, tiny, tmp_path):
    whole, bare, ids = (tmp_path / x for x in ("whole.safetensors", "bare.safetensors", "ids.json"))
    assert kvrt("convert", prefilled, "--to", "mlx", "-o", whole).code == 0
    with safe_open(whole, framework="numpy") as file:
        kept = {k: x for k, x in file.metadata().items() if not k.endswith("kvrt_tokens")}
    save_file(load_file(whole), bare, kept)
    words = ["convert", bare, "-m", tiny, "--to", "f16", "-o"]
    fails(kvrt(*words, tmp_path / "a.kv"), 1, "give those that were evaluated (--tokens)")
    fails(kvrt(*words[:2], "--to", "f16", "-o", "x", "--tokens", ids), 2, "add -m NAME")
    for wrong in ("3", '{"0": [-1]}', '{"a": [1]}', '[1, "a"]'):
        ids.write_text(wrong)
        fails(kvrt(*words, tmp_path / "a.kv", "--tokens", ids), 2, "name a file of token ids")
    held = ids_of(prefilled)
    for name, value in (("a", held), ("b", {"0": held})):
        ids.write_text(json.dumps(value))
        assert kvrt(*words, tmp_path / f"{name}.kv", "--tokens", ids).code == 0
        assert ids_of(tmp_path / f"{name}.kv") == held
    # From one other program to another.
    slot = [*words[:4], "--to", "llama.cpp-slot", "-o", tmp_path / "slot.bin", "--tokens", ids]
    assert kvrt(*slot).code == 0
    assert kvrt("convert", slot[7], "-m", tiny, "--to", "f16", "-o", tmp_path / "c.kv").code == 0
    assert ids_of(tmp_path / "c.kv") == held
