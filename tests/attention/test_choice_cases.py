"""What a model asks of a kernel, and runtimes of a platform that has none."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from kvrt import CacheConfig, Runtime
from kvrt.attention import registry
from kvrt.attention.choice.cases import Query, case_of, cases_of
from kvrt.errors import NoKernel
from kvrt.program.layout import cell_layout
from kvrt.program.step import StepSpec
from kvrt.session import fingerprint
from kvrt.store.shards import Shards
from tests.toys import HybridLm, RowModel, ToyLm

OPTIMISED = False
SMALL = CacheConfig(n_ctx=32, block_size=16, n_ubatch=8)


def cases(model=None, config=SMALL, shards=None):
    model = model or ToyLm(n_layers=1)
    layout = cell_layout(model.groups, model.recurrent, config)
    return cases_of(model, config, layout.stored, shards)


def test_a_case_is_what_the_layers_ask_for():
    config = CacheConfig(
        n_ctx=64, n_seq_max=40, block_size=32, type_k="int8", type_v="bf16", rope="read"
    )
    (case,) = cases(RowModel(n_heads=6, n_kv_heads=3, head_dim=8), config)
    assert (case.n_q_heads, case.group.n_kv_heads, case.group.head_dim) == (6, 3, 8)
    assert (case.type_k, case.type_v, case.rope, case.block_size) == ("int8", "bf16", "read", 32)
    assert (case.dtype, case.sinks, case.n_words, case.n_prompt) == ("float32", False, 2, 144)
    # Layers alike are one case, whatever the length of the cache.
    assert len(cases()) == 1 and cases(ToyLm(n_layers=2)) == cases(ToyLm(n_layers=1)) == cases()
    assert cases(config=dataclasses.replace(SMALL, n_ctx=640)) == cases()
    (case,) = cases(HybridLm())
    assert (case.n_q_heads, case.group.n_kv_heads) == (2, 1)


@pytest.mark.parametrize(
    ("heads", "n_devices", "wanted"),
    [((8, 4), 2, (4, 2)), ((8, 1), 2, (4, 1)), ((6, 3), 2, (6, 3)), ((3, 1), 2, (3, 1))],
)
def test_a_device_of_a_mesh_has_its_share_of_the_heads(heads, n_devices, wanted):
    class Several(Shards):
        n_heads = n_devices

    shards = Several(Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("context", "tensor")))
    group = dataclasses.replace(cases()[0].group, n_kv_heads=heads[1])
    ((_, store),) = cell_layout((group,), None, SMALL).stored
    case = case_of(SMALL, group, store, Query(heads[0], "float32", False), shards)
    assert (case.n_q_heads, case.group.n_kv_heads) == wanted and case.divided


def test_without_a_kernel_a_default_cache_has_the_programs_of_xla():
    model = ToyLm(n_layers=1)
    default, named = (
        Runtime(model, dataclasses.replace(SMALL, attention=name)) for name in ("auto", "chunked")
    )
    assert CacheConfig().attention == "auto"
    assert default.programs.spec == named.programs.spec and default.config == named.config
    texts = []
    for r in (default, named):
        r.append([1])
        texts += [p.as_text() for p in r.programs.compiled().values()]
    assert texts[0] == texts[1] and len(texts[0]) > 1000
    found = [str(r.stats().attention) for r in (default, named)]
    assert found == ["chunked: no kernel for cpu", "chunked: named"]


def test_auto_is_no_name_where_nobody_chooses():
    layout = cell_layout(ToyLm(n_layers=1).groups, None, SMALL)
    for ask in (
        lambda: StepSpec(SMALL, layout),
        lambda: registry.implementation("auto"),
    ):
        with pytest.raises(NoKernel, match="is chosen where a Runtime or an Engine is made; name"):
            ask()
    with pytest.raises(NoKernel, match="'auto' exists already"):
        registry.register("auto", functools.partial(registry.load_kernel, "gpu"))
    with pytest.raises(NoKernel, match="'flash' does not exist; one of auto, chunked"):
        Runtime(ToyLm(n_layers=1), dataclasses.replace(SMALL, attention="flash"))


def test_a_session_does_not_know_what_computed_attention():
    groups = ToyLm(n_layers=1).groups
    found = [
        fingerprint.describe(groups, None, CacheConfig(attention=name), 64, "", {})
        for name in ("auto", "chunked", "pallas_gpu")
    ]
    assert found[0] == found[1] == found[2]
