"""The table of measured tile sizes: what kernels take from it while they are traced."""

import dataclasses

import jax
import jax.numpy as jnp
import kernel_cases
import pytest
from kernel_cases import Form

from kvrt.attention.pallas import common, gpu, tiles, tpu
from kvrt.errors import BadConfig
from scripts._lib import chips

FORM = Form(tokens=2, heads=2, rows=True, k="int8", v="bf16", d=32, block=32, blocks=64)
KEY = tiles.Key(
    kernel="gpu",
    device="cpu",
    type_q="f32",
    type_k="int8",
    type_v="bf16",
    head_dim=32,
    block_size=32,
    step="decode",
)


def traced_sums(kernel, form=FORM):
    """Shapes of what a kernel returns for the work of a form."""

    def run(tokens, rows, view, _):
        qkv, kv, view, how = kernel_cases.bundled(form, tokens, rows, view, None)
        work = common.kernel_work(qkv.q, form.kv_heads, view, view.blocks, view.n_blocks, form.mask)
        return kernel.sums(work, kv, how)

    return jax.eval_shape(run, *kernel_cases.shapes(form))


def n_splits(**key):
    table = {dataclasses.replace(KEY, **key): {"cells": 128, "programs": 8}}
    return traced_sums(gpu.kernel(interpret=True, table=table)).m.shape[2]


@pytest.mark.slow
def test_an_entry_takes_the_place_of_the_rule():
    # Two lists of two kv heads: eight programs are two splits, of the sixteen that the rule makes.
    assert traced_sums(gpu.kernel(interpret=True)).m.shape[2] == 16
    assert n_splits() == 2


@pytest.mark.parametrize(
    "other",
    [
        {"device": "NVIDIA H200"},
        {"type_q": "bf16"},
        {"type_k": "bf16"},
        {"type_v": "int8"},
        {"head_dim": 64},
        {"block_size": 16},
        {"step": "prefill"},
        {"kernel": "tpu"},
    ],
    ids=lambda x: next(iter(x)),
)
def test_an_entry_is_for_its_key_alone(other):
    assert n_splits(**other) == 16


def test_a_program_for_another_device_takes_that_ones_entry():
    one = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=chips.H200)
    with jax.sharding.use_abstract_mesh(one):
        assert n_splits(device=chips.H200.device_kind) == 2
        assert n_splits() == 16


def test_unrotated_keys_keep_the_rule():
    form = dataclasses.replace(FORM, k="f32", raw=kernel_cases.RopeSpec(n_rot=32))
    table = {dataclasses.replace(KEY, type_k="f32"): {"cells": 128, "programs": 8}}
    kernel = gpu.kernel(interpret=True, table=table)
    assert traced_sums(kernel, dataclasses.replace(form, raw=None)).m.shape[2] == 2
    assert traced_sums(kernel, form).m.shape[2] > 2


def test_warps_and_stages_are_those_of_the_entry():
    def parameters(sizes):
        form = dataclasses.replace(FORM, k="bf16", d=64)
        key = dataclasses.replace(KEY, type_k="bf16", head_dim=64, device=chips.H200.device_kind)
        kernel, _ = kernel_cases.calls(form, gpu.kernel(table={key: sizes} if sizes else {}))
        text = chips.lowered(kernel, kernel_cases.shapes(form), "cuda").mlir_module()
        return [f"num_{name} = {n} : i32" in text for name, n in (("stages", 3), ("warps", 8))]

    assert parameters({"stages": 3, "warps": 8}) == [True, True]
    assert parameters({}) == [False, False]


def test_the_tpu_kernel_takes_its_own_sizes():
    rows = jnp.zeros((4, 8, 16, 128), jnp.float32)
    assert [tpu._heads(rows, rows, 1, n) for n in (1 << 20, 1 << 14)] == [8, 2]
    form = Form(tokens=2, heads=2, rows=True, d=32, block=128, blocks=2)
    key = dataclasses.replace(KEY, kernel="tpu", type_k="f32", type_v="f32", block_size=128)
    with pytest.raises(BadConfig, match="tile sizes cells are unknown; of pass_bytes, queries"):
        traced_sums(tpu.kernel(interpret=True, table={key: {"cells": 16}}), form)
    assert traced_sums(tpu.kernel(interpret=True, table={key: {"queries": 16}}), form)


def test_a_table_is_read_as_it_was_written():
    table = {KEY: {"cells": 32, "warps": 8}, dataclasses.replace(KEY, head_dim=128): {"cells": 16}}
    text = tiles.table_text(table, {KEY: "5.0 us, by the rule 6.0"})
    assert tiles.parse_table(text) == table
    assert "by the rule 6.0" in text and text.count("\n") == len(table) + 2
    assert tiles.parse_table(tiles.table_text({})) == {}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "no table of tile sizes"),
        ('{"format": 2, "tiles": []}', "format 2, 1 wanted"),
        ('{"format": 1, "tiles": [{"key": {}, "sizes": {}}]}', "missing"),
    ],
)
def test_what_is_no_table_is_refused(text, told):
    with pytest.raises(BadConfig, match=told):
        tiles.parse_table(text)


def test_sizes_are_whole_numbers():
    text = tiles.table_text({KEY: {"cells": 32}}).replace("32}}", "0}}")
    with pytest.raises(BadConfig, match="whole numbers above 0"):
        tiles.parse_table(text)


def test_kvrts_own_table_is_one_and_names_sizes_that_kernels_know():
    known = {"gpu": gpu.SIZES, "tpu": tpu.SIZES}
    for key, sizes in tiles.packaged_table().items():
        tiles.check_names(sizes, known[key.kernel])
