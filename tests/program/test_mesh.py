"""One mesh of eight simulated devices gives what one device gives, and moves no layer about."""

import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from kvrt import CacheConfig, Engine, Runtime
from kvrt.errors import BadConfig
from kvrt.program.mesh import MeshSpec
from kvrt.sizes import DividedConfig, extent
from kvrt_models.layers.sharding import partition
from tests.toys import RowModel, ToyLm

ROOT = Path(__file__).parents[2]
# Greatest difference of logits as a part of the greatest logit: sums run in another order. The
# toys differ by up to 5e-7.
TOLERANCE = 4e-6
ALL = "tensor=2,context=4"
ENV = {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUMPY_DTYPE_PROMOTION": "strict",
    "JAX_NUMPY_RANK_PROMOTION": "raise",
    # Behind those of conftest.py.
    "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8",
}


@functools.cache
def findings() -> dict:
    """What `mesh_program` found: all of it in one process, for programs are most of the time."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.program.mesh_program"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | ENV,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {k: v for line in done.stdout.splitlines() for k, v in json.loads(line).items()}


@pytest.mark.slow
class TestEightDevices:
    @pytest.mark.parametrize("case", ["full", "heads", "raw", "grouped", "coded", "window"])
    def test_prompts_shifts_and_defrag_give_the_logits_of_one_device(self, case):
        found = findings()[case]
        assert found
        assert all(x < TOLERANCE for x in found.values()), found

    def test_kernels_give_the_logits_of_one_device(self):
        """Heads and cells divided, for both kernels; and raw keys where all axes divide."""
        found = findings()["kernels"]
        assert len(found) == 4
        assert all(x < TOLERANCE for x in found.values()), found

    def test_a_kernel_of_a_chip_is_called_with_what_its_device_holds(self):
        found = findings()["lowered"]
        assert found == {"cuda": [8, 1], "rocm": [8, 1], "tpu": [8, 1]}

    def test_a_decoder_from_a_file_gives_the_logits_of_one_device(self):
        found = findings()["decoder"]
        # Products into and out of attention, three of the experts, embedding and head.
        assert (found["divided"], found["halves"]) == (7, True)
        assert found[ALL] < TOLERANCE

    def test_a_kv_head_that_does_not_divide_is_kept_whole_and_told_of(self):
        found = findings()["recurrent"]
        (said,) = found["said"]
        assert said.startswith("tensor=2 does not divide the 1 kv heads of 1 layers")
        # 12 blocks over four devices, each with the one head.
        assert found["shape"] == [3, 1, 8, 4]
        assert all(x < TOLERANCE for x in found["differs"].values()), found

    def test_a_shifting_context_goes_on_alike(self):
        found = findings()["shifted"]
        assert found["one"] == found["many"]
        assert found["one"][1] > 0, "the context did not shift"

    def test_a_session_goes_to_one_device_and_to_others(self):
        found = findings()["saved"]
        assert found["rows"] == [18 * 2 * 16 * 4 * 2, True]
        assert len(set(found["ids"])) == 1
        assert found["differs"] < TOLERANCE

    @pytest.mark.parametrize("cache", ["f32", "int8", "states"])
    def test_devices_write_a_session_where_they_are_for_any_mesh(self, cache):
        same, on_host, shard, of_round, moved = findings()["divided"][cache]
        assert same == [True, True]
        # Nothing travels, and nothing larger than a shard is ever one array on the host.
        assert moved == [[]]
        assert on_host <= shard < of_round
        assert of_round == shard * (4 if cache == "states" else 8)

    def test_engines_serve_alike_and_heads_to_the_bit(self):
        heads = findings()["bits"]
        for where in (findings()["served"], findings()["served_by_kernels"], heads):
            assert where["tokens"]
            assert where["differs"] < TOLERANCE
        # Which cells are summed where depends on their blocks, unless heads alone are divided.
        assert heads["as_missed"]
        assert heads["as_cells"]

    def test_programs_by_layer_give_what_one_device_gives_whole(self):
        """A runtime and an engine, of four layers: differences grow from one to the next.

        They are 1.7e-5 with AVX2, 7e-6 with AVX-512.
        """
        found = findings()["by_layer"]
        assert found["tokens"] and set(found["said"]) == {"by_layer: as asked for"}
        assert found["n_programs"] == 1, "runs of equal layers share one"
        assert max(found["differs"]) < 6 * TOLERANCE, found

    def test_caches_stay_in_place_and_no_layer_travels(self):
        found = findings()["programs"]
        assert found["all"] == 8 * found["own"]
        assert found["blocks"] == [True, True]
        kept = ("forward", "shift", "move_kv", "scrub", "put_kv", "put_blocks")
        for name in kept:
            program = found["programs"][name]
            assert program["alias"] >= found["own"], name
            assert program["temp"] < found["own"], name
            assert program["moved"] <= found["own_layer"] // 16, name
        # Taken rows and blocks come whole, and nothing beside them.
        assert found["programs"]["take_kv"]["moved"] == 256 * 2 * 16
        assert found["programs"]["take_blocks"]["moved"] <= 2 * 2 * 16 * 16 * 4


def test_without_a_mesh_programs_know_of_none():
    runtime = Runtime(RowModel(), CacheConfig(n_ctx=16, block_size=4, n_ubatch=8))
    runtime.append([1, 2, 3])
    (program,) = runtime.programs.compiled().values()
    text = program.as_text()
    assert "num_partitions=" not in text
    for word in ("sharding=", '"Sharding"', "SPMD", "partition-id", "all-reduce", "all-gather"):
        assert word not in text, word
    assert all(len(x.devices()) == 1 for x in jax.tree.leaves(runtime.cache))


def test_a_mesh_of_one_device_gives_the_same():
    config = CacheConfig(n_ctx=16, block_size=4, n_ubatch=8)
    model = RowModel()
    plain, mesh = Runtime(model, config), Runtime(model, config, mesh=MeshSpec())
    for tokens in ([1, 2, 3, 4, 5], [6, 7]):
        np.testing.assert_array_equal(plain.append(tokens), mesh.append(tokens))


def test_both_keep_the_configuration_that_they_were_given():
    config = CacheConfig(n_ctx=16, block_size=4, n_ubatch=8)
    named = dataclasses.replace(config, attention="chunked", programs="whole")
    for kind in (Runtime, Engine):
        assert kind(RowModel(), named, mesh=MeshSpec()).config is named
        # What was left open is settled.
        found = kind(RowModel(), config, mesh=MeshSpec()).config
        assert found == named and type(found) is CacheConfig


def test_blocks_are_rounded_up_so_that_they_divide():
    size = extent(RowModel().group, DividedConfig(n_ctx=20, block_size=4, n_shards=4))
    assert (size.n_cells, size.n_blocks, size.n_slots) == (20, 8, 32)


def test_weights_are_divided_by_the_names_of_their_modules():
    assert partition(("blocks", 0, "qkv", "weight"), 2) == jax.P("tensor")
    assert partition(("blocks", 0, "out", "weight"), 2) == jax.P(None, "tensor")
    assert partition(("blocks", 0, "ffn", "down", "weight"), 3) == jax.P(None, None, "tensor")
    assert partition(("embedding",), 2) == jax.P("tensor")
    for whole in (("norm",), ("blocks", 0, "attn_norm"), ("blocks", 0, "qkv", "bias")):
        assert partition(whole, 1) == jax.P()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("tensor=2,head=4", "axis 'head' is unknown; axes are tensor, context"),
        ("tensor=2,tensor=2", "axis 'tensor' is twice"),
        ("context=0", "mesh axis context is 0; at least 1"),
        ("context=two", "context=two is no size"),
        ("context=-1", "context=-1 is no size"),
        ("tensor=2,data=2", "there is no axis 'data', which divided cells and no sequences; give"),
        ("", "axis '' is unknown"),
    ],
)
def test_what_no_mesh_can_be_is_told_in_a_line(text, told):
    with pytest.raises(BadConfig, match=re.escape(told)) as caught:
        MeshSpec.parse(text)
    assert "\n" not in str(caught.value)


def test_more_devices_than_there_are_are_told_in_a_line():
    with pytest.raises(BadConfig, match=r"needs 1000 devices, there are \d+; make an axis"):
        Runtime(ToyLm(), CacheConfig(n_ctx=16), mesh=MeshSpec(tensor=500, context=2))
    assert MeshSpec.parse(" context=4, tensor=2") == MeshSpec(tensor=2, context=4)
