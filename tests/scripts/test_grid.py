"""Cases of the benchmarks: what their flags ask for, and caches that hold what they say."""

import functools

import numpy as np
import pytest
from absl import app, flags
from absl.testing import flagsaver

from kvrt.arrays import array_bytes
from kvrt.attention import registry
from kvrt.program import estimate
from scripts._lib import cases, grid, implementations, shapes
from tests.store.plaincodec import head_bytes

WHAT = flags.DEFINE_list("grid_test_what", ["step"], "Stands for a script's own flag.")


def case(**options):
    options = {"n_batch": 3, "context": 100, "block_size": 16} | options
    return cases.Case(spec=shapes.shape("toy"), dtype="f32", **options)


@pytest.fixture(autouse=True)
def _flags():
    with flagsaver.flagsaver():
        flags.FLAGS(["bench", "--shape=toy", "--runs=1"])
        yield


def test_flags_make_cases():
    flags.FLAGS(
        [
            "bench",
            "--batch=1,8",
            "--context=0,5",
            "--type_k=int8",
            "--attention=chunked",
            "--n_new=4",
        ]
    )
    grid.check(WHAT, ["step"])
    found = [case for of in grid.cases() for case in of]
    assert [(c.n_batch, c.context) for c in found] == [(1, 0), (1, 5), (8, 0), (8, 5)]
    assert {(c.n_new, c.type_k, c.type_v, c.attention) for c in found} == {
        (4, "int8", "f32", "chunked")
    }


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("--batch=1,x", "whole numbers from 1"),
        ("--batch=0", "whole numbers from 1"),
        ("--attention=nothing", "attention=nothing; of chunked"),
        ("--layers=3", "3 layers asked, toy has 2"),
        ("--grid_test_what=steps", "what=steps; of step"),
    ],
)
def test_mistakes_are_told(flag, told):
    flags.FLAGS(["bench", flag])
    with pytest.raises(app.UsageError, match=told):
        grid.check(WHAT, ["step"])


def test_what_cannot_fit_is_told():
    assert grid.no_room(1) is None
    assert "GiB" in grid.no_room(1 << 60)
    assert case(context=1 << 26).n_bytes > 1 << 34


@pytest.mark.parametrize("n_new", [1, 5])
@pytest.mark.parametrize("context", [0, 15, 16, 100])
def test_sequences_lie_in_their_blocks(n_new, context):
    of = case(n_new=n_new, context=context)
    step = cases.batch(of)
    for group, spec, places in zip(of.layout.groups, of.layout.stores, step.places, strict=True):
        at = cases.held(of, group, spec.extent)
        assert len(set(at.table.ravel().tolist())) == at.table.size
        found = cases.cells(of, at, spec.extent)
        owners = np.where(found.seqs[:, 0] > 0, np.log2(np.maximum(found.seqs[:, 0], 1)), -1)
        slots = np.asarray(places.slots).reshape(3, n_new)
        for seq in range(3):
            pos = np.sort(found.pos[owners == seq])
            first = 0 if not group.mask.size else max(context - 63, 0) // 16 * 16
            assert pos.tolist() == list(range(first, context))
            # New tokens go to the empty cells behind them, in blocks of the sequence.
            assert (found.pos[slots[seq]] == -1).all()
            assert set((slots[seq] // 16).tolist()) <= set(at.table[seq].tolist())
        read = -(-(context - at.first) // 16)
        if n_new == 1:
            assert np.asarray(places.seq_blocks.n_blocks).tolist() == [read] * 3
        else:
            assert int(places.n_blocks) == 3 * read


def test_bytes_are_those_allocated():
    types = ("int8", "int4")
    of = case(type_k=types[0], type_v=types[1])
    made = cases.cache(of).stores
    held = estimate.of_cells(of.spec.groups, None, of.config).cache_bytes
    assert sum(map(array_bytes, made)) == held
    # Both layers are alike; of the window of 64 the token's own place is not read.
    width = sum(head_bytes(t, 32) for t in types) * 2
    assert cases.read_bytes(of, made) == width * 3 * (63 + 100)


def test_a_new_kernel_is_measured_without_a_line_here(monkeypatch):
    make = functools.partial(registry.load_kernel, "gpu")
    monkeypatch.setitem(registry.IMPLEMENTATIONS, "newer_gpu", make)
    assert "newer_gpu" in implementations.running(interpret=True)
    assert "cells" in implementations.tile_choices("newer_gpu")
    found = implementations.running(interpret=True)
    assert "reference" not in found and "chunked" in found
    assert "pallas_gpu" not in implementations.running()
    alias = implementations.with_options("newer_gpu", None, interpret=True)
    assert alias != "newer_gpu" and registry.implementation(alias)
    assert implementations.plain_name(alias) == "newer_gpu"
    monkeypatch.delitem(registry.IMPLEMENTATIONS, alias)


def test_shapes_have_the_size_that_their_names_say():
    n = {name: shapes.weight_bytes(shapes.shape(name), "f32")[0] / 4 for name in shapes.SHAPES}
    assert round(n["smollm2-135m"] / 1e6) == 135
    assert round(n["llama-3.2-1b"] / 1e9, 2) == 1.24
    assert round(n["llama-3.1-8b"] / 1e9, 2) == 8.03
    assert round(n["gemma-3-27b"] / 1e9, 1) == 27.0
    full = shapes.shape("gemma-3-27b").groups[1]
    assert full.layers == (5, 11, 17, 23, 29, 35, 41, 47, 53, 59)
    assert shapes.shape("gemma-3-27b", 6).groups[1].layers == (5,)
