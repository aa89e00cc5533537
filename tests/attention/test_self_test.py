"""The self-test of kernels: right ones pass it, and every way of being wrong is found."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvrt import CacheConfig, GroupSpec, MaskSpec, RopeSpec
from kvrt.attention import registry, xla
from kvrt.attention.choice import self_test
from kvrt.attention.choice.cases import Query, case_of, cases_of
from kvrt.options.cache import SelfExtend
from kvrt.program.layout import cell_layout
from tests import interpreted
from tests.interpreted import GPU
from tests.toys import ToyLm

OPTIMISED = False
COUNT = itertools.count()
ROPE = RopeSpec(n_rot=16, base=100.0)
GROUP = GroupSpec(layers=(0,), n_kv_heads=1, head_dim=16, rope=ROPE)
# Without a prompt, which compiles in a third less time.
DECODE = CacheConfig(n_ctx=32, block_size=16, n_ubatch=1)


def made(config=DECODE, dtype="float32", sinks=False, **group):
    group = dataclasses.replace(GROUP, **group)
    ((_, store),) = cell_layout((group,), None, config).stored
    return case_of(config, group, store, Query(2, dtype, sinks))


@pytest.fixture
def named(monkeypatch):
    """Gives an implementation a name for as long as a test runs, which none has had before."""

    def name(implementation):
        # What JAX has traced for a name it does not trace again.
        found = f"tried {next(COUNT)}"
        monkeypatch.setitem(registry.IMPLEMENTATIONS, found, lambda: implementation)
        return found

    return name


def of_group(**wrong):
    """XLA's attention, with another group than it is told of."""

    def attend(qkv, kv, view, how):
        group = dataclasses.replace(how.group, **wrong)
        return xla.attend(qkv, kv, view, dataclasses.replace(how, group=group))

    return attend


def of_view(**wrong):
    """The same, with another view."""

    def attend(qkv, kv, view, how):
        changed = {name: change(getattr(view, name)) for name, change in wrong.items()}
        return xla.attend(qkv, kv, dataclasses.replace(view, **changed), how)

    return attend


def how_without(name):
    """The same, without a part of how a layer attends."""

    def attend(qkv, kv, view, how):
        return xla.attend(qkv, kv, view, dataclasses.replace(how, **{name: None}))

    return attend


def leaking(qkv, kv, view, how):
    out, lse = xla.attend(qkv, kv, view, how)
    return out + 0 * jnp.sum(kv.v).astype(out.dtype), lse


def lse_of_two(qkv, kv, view, how):
    out, lse = xla.attend(qkv, kv, view, how)
    return out, lse + jnp.log(2.0)


def rounded(qkv, kv, view, how):
    out, lse = xla.attend(qkv, kv, view, how)
    return out.astype(jnp.bfloat16).astype(out.dtype), lse


WINDOW = MaskSpec(kind="window", size=20, n_sink=2)
EVERYONE = functools.partial(jnp.full_like, fill_value=3)
WRONG = {
    "scale": (made(), of_group(scale=0.26)),
    "soft cap": (made(soft_cap=50.0), of_group(soft_cap=None)),
    "window": (made(mask=WINDOW), of_group(mask=MaskSpec(kind="window", size=24, n_sink=2))),
    "sink positions": (made(mask=WINDOW), of_group(mask=MaskSpec(kind="window", size=20))),
    "chunk": (made(mask=MaskSpec(kind="chunked", size=16)), of_group(mask=MaskSpec())),
    "sinks": (made(sinks=True), how_without("sinks")),
    "owners": (made(), of_view(cell_seqs=EVERYONE)),
    "a list cut short": (made(), of_view(n_blocks=lambda n: jnp.asarray(n) - 1)),
    "a list read on": (made(), of_view(n_blocks=lambda n: jnp.asarray(n) * 0 + 8)),
    "unrotated keys": (made(dataclasses.replace(DECODE, rope="read")), how_without("rope")),
    "NaN of released cells": (made(), leaking),
    "the sum of weights": (made(), lse_of_two),
    "rounded outputs": (made(), rounded),
}
FAST = {"scale", "owners", "NaN of released cells"}


@pytest.mark.parametrize(
    "wrong", [pytest.param(x, marks=() if x in FAST else pytest.mark.slow) for x in WRONG]
)
def test_a_kernel_that_is_wrong_is_found(named, wrong):
    case, attend = WRONG[wrong]
    found = self_test.run_test(case, named(attend))
    assert not found.passed and found.lasting
    assert found.why.startswith("failed its self-test at head size 16, f32, decode")
    assert ": largest difference " in found.why and found.why.endswith(", limit 0.0001")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_a_half_type_rounds_is_no_mistake_and_a_scale_is_one(named, dtype):
    kinds = {"bfloat16": "bf16", "float16": "f16"}
    config = dataclasses.replace(DECODE, type_k=kinds[dtype], type_v=kinds[dtype])

    def weights_rounded(qkv, kv, view, how):
        q = qkv.q.astype(jnp.float32).astype(jnp.bfloat16 if dtype == "bfloat16" else jnp.float16)
        return rounded(dataclasses.replace(qkv, q=q), kv, view, how)

    assert self_test.run_test(made(config, dtype), named(weights_rounded)).passed
    assert not self_test.run_test(made(config, dtype), named(of_group(scale=0.4))).passed


def test_a_kernel_that_does_not_compile_is_told_of():
    # Compiled, not interpreted: JAX refuses it on a CPU.
    found = self_test.run_test(made(), "pallas_gpu")
    assert not found.passed and found.lasting
    assert found.why.startswith("failed its self-test at head size 16, f32: ValueError: ")
    assert "\n" not in found.why


def test_a_kernel_that_does_not_serve_is_told_of():
    config = dataclasses.replace(DECODE, block_size=32, type_k="kivi4")
    found = self_test.run_test(made(config), "pallas_tpu")
    why = "a cache or scales of f16: TPUs have no such vectors"
    assert found.why == f"does not serve head size 16, kivi4/f32: {why}"


@pytest.mark.slow
def test_keys_by_channel_are_served_by_a_kernel():
    config = dataclasses.replace(DECODE, block_size=32, type_k="kivi4")
    assert self_test.run_test(made(config), GPU).passed


@pytest.mark.slow
def test_grouped_positions_are_served_by_a_kernel():
    """Of one frame of keys: the kernel's own tests have both."""
    extend = SelfExtend(ga_n=4, ga_w=8, kind="paper")
    config = CacheConfig(n_ctx=32, block_size=16, n_ubatch=8, self_extend=extend)
    assert self_test.run_test(made(config), GPU).passed


def test_what_may_be_otherwise_another_time_is_not_lasting(named):
    def full(qkv, kv, view, how):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes.\nmore")

    found = self_test.run_test(made(), named(full))
    assert not found.passed and not found.lasting
    assert found.why.endswith("RuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes.")


@pytest.mark.parametrize("side", [0, 1])
def test_a_value_that_is_not_finite_is_no_agreement(side):
    sides = [(np.ones((1, 2)), np.zeros(2)), (np.ones((1, 2)), np.zeros(2))]
    sides[side][0][0, 1] = np.nan
    fine = (np.ones(2), np.ones(2))
    found = {"prefill": (fine, fine), "decode": tuple(sides)}
    verdict = self_test._compared(made(), found)
    assert not verdict.passed and ", decode: largest difference inf" in verdict.why
    assert self_test._compared(made(), {"prefill": (fine, fine)}).passed


CONFIGS = {
    "f32": CacheConfig(n_ctx=64, block_size=16, n_ubatch=160),
    "int8": CacheConfig(n_ctx=64, block_size=16, n_ubatch=8, type_k="int8", type_v="int8"),
    "bf16, at read": CacheConfig(
        n_ctx=64, block_size=32, n_ubatch=8, type_k="bf16", type_v="bf16", rope="read"
    ),
}


# Tests of the kernels have each of them beside every type and form.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "config"),
    [("gpu", "f32"), ("tpu", "int8"), ("tpu", "bf16, at read")],
)
def test_the_kernels_pass(named, kernel, config):
    model, config = ToyLm(n_layers=1), CONFIGS[config]
    layout = cell_layout(model.groups, None, config)
    (case,) = cases_of(model, config, layout.stored)
    found = self_test.run_test(case, named(interpreted.load(kernel)))
    assert found.passed, found


@pytest.mark.slow
def test_every_view_of_a_prompt_is_read(named):
    """A kernel that is wrong for one kind of view alone."""
    config = CacheConfig(n_ctx=64, block_size=16, n_ubatch=160)
    sizes = {"decode": 1, "decode of several": 4, "prefill": 144}
    for name, size in sizes.items():

        def attend(qkv, kv, view, how, size=size):
            wrong = of_group(scale=0.5) if view.n_tokens == size else xla.attend
            return wrong(qkv, kv, view, how)

        found = self_test.run_test(made(config), named(attend))
        assert f"f32, {name}: largest" in found.why


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "platform"), [("pallas_gpu", "cuda"), ("pallas_tpu", "tpu")])
def test_it_is_lowered_for_the_devices_that_will_run_it(kernel, platform):
    config = CacheConfig(type_k="bf16", type_v="bf16", rope="read")
    case = made(config, head_dim=64, rope=RopeSpec(n_rot=64), mask=WINDOW, soft_cap=30.0)
    inputs = self_test._Inputs(case)
    both = jax.jit(functools.partial(self_test._both, case, kernel))
    traced = both.trace(inputs.views, inputs.tokens, inputs.cached)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    # A kernel for each view and for a prompt's own tokens; on GPUs a second one ends a decode step.
    assert text.count("custom_call @") == {"cuda": 6, "tpu": 4}[platform]
