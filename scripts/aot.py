"""Compiles a decode step and the attention kernels for chips that this machine does not have.

    pip install 'kvrt[aot]'
    python -m scripts.aot --topology v5e,v6e --lower cuda,rocm
    pip install 'kvrt[aot-cuda]'
    python -m scripts.aot --topology h200

For TPUs `libtpu` compiles to machine code, for NVIDIA's GPUs JAX's package for CUDA does, and both
tell time, memory and cost: seconds to trace, lower and compile, arguments, temporaries, what of the
arguments is written in place (alias: the cache, or donation failed), operations and bytes. XLA
counts a kernel's work as nothing; `scripts/gpu_code.py` has that of GPU kernels. With --lower a
program for GPUs is lowered: the kernels to Triton's language, the rest to StableHLO; nothing says
what they will take.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from flax import nnx
from jax.experimental import topologies

from kvrt import CacheConfig, GroupSpec
from kvrt.attention import BlockView, LayerAttention, LayerKV, TokenQKV, attend
from kvrt.cells.slots import Places, SeqBlocks
from kvrt.errors import NoKernel
from kvrt.program import batch as batches
from kvrt.program import step
from kvrt.program.device import whole_step
from kvrt.program.layout import Layout, cell_layout
from kvrt.program.programs import layer_params, model_kind
from kvrt.store import codec
from kvrt_models.spec import DecoderSpec
from scripts._lib import chips, commands, measure, shapes

# A description of the smallest slice of each kind.
TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
GPUS = ("cuda", "rocm")
KERNEL_ROWS = ("f32", "bf16", "int8")
# Tokens of a prompt's step.
_N_PROMPT = 512

_TOPOLOGY = flags.DEFINE_list(
    "topology",
    list(TOPOLOGIES),
    f"TPUs: {', '.join(TOPOLOGIES)}; or GPUs: {', '.join(chips.GPUS)}.",
)
_LOWER = flags.DEFINE_list("lower", [], "GPU platforms to lower for: cuda, rocm.")
_SHAPE = flags.DEFINE_enum("shape", "smollm2-135m", sorted(shapes.SHAPES), "Model of these sizes.")
_LAYERS = flags.DEFINE_integer("layers", None, "Only its first layers.", lower_bound=1)
_N_CTX = flags.DEFINE_integer("n_ctx", 4096, "Cells.", lower_bound=256)
_TYPE = flags.DEFINE_enum("type_kv", "bf16", ["f32", "bf16", "int8"], "KV dtype.")
_N_SEQ = flags.DEFINE_integer("n_seq", 1, "Sequences that decode together.", lower_bound=1)
_KERNELS = flags.DEFINE_list(
    "kernels", ["64", "128", "256"], "Widths of heads for which the kernel is compiled alone."
)


@dataclasses.dataclass(frozen=True)
class Program:
    """A function with the shapes it is compiled for.

    `row_bytes` are those of the keys and values of one layer, `donated` the index of the cache.
    """

    name: str
    run: Callable[..., Any]
    args: tuple
    row_bytes: int
    donated: tuple[int, ...] = ()


def main() -> None:
    known = [*TOPOLOGIES, *chips.GPUS]
    unknown = [x for x in _TOPOLOGY.value if x not in known]
    unknown += [x for x in _LOWER.value if x not in GPUS]
    if unknown:
        raise app.UsageError(f"no such chip: {', '.join(unknown)}; {[*known, *GPUS]}")
    chips.only_gpu(_TOPOLOGY.value)
    # With libtpu installed JAX would look for a TPU first.
    jax.config.update("jax_platforms", "cpu")
    results = [
        x
        for name in _TOPOLOGY.value
        for x in (compile_for_gpu(name) if name in chips.GPUS else compile_for(name))
    ]
    results += [x for name in _LOWER.value for x in lower_for(name)]
    for figures in results:
        measure.emit("aot", **figures)


def compile_for(name: str) -> Iterator[dict[str, Any]]:
    """Memory and cost of every program on a TPU of this kind."""
    try:
        slice_ = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[name])
    # Without libtpu JAX raises it as it is; no class is narrower.
    except RuntimeError as error:
        raise app.UsageError(f"no compiler for {name}: {error}; pip install 'kvrt[aot]'") from error
    chip = slice_.devices[0]
    where = jax.sharding.SingleDeviceSharding(chip)
    # What kernels ask of the chip while they are traced.
    mesh = jax.sharding.Mesh(np.array([chip]), ("x",)).abstract_mesh
    for program in programs("pallas_tpu"):
        args = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), program.args
        )
        with jax.sharding.use_abstract_mesh(mesh):
            lowered = _lowered(program, args)
        yield _compiled(name, program, lowered)


def compile_for_gpu(name: str) -> Iterator[dict[str, Any]]:
    """The same on a GPU, for both ways of making its kernels."""
    device = chips.gpu_device(name)
    found = [*programs("mosaic_gpu"), *programs("pallas_gpu")]
    for program in {x.name: x for x in found}.values():
        try:
            with jax.default_device(device):
                lowered = _lowered(program, chips.shapes_on(device, program.args))
        except NoKernel as error:
            yield {"chip": name, "program": program.name, "refused": str(error)}
        else:
            yield _compiled(name, program, lowered)


class _Lowered(NamedTuple):
    """A program before it is compiled, and the seconds that it took so far."""

    lowered: jax.stages.Lowered
    times: dict[str, float]


def _lowered(program: Program, args: tuple) -> _Lowered:
    start = time.perf_counter()
    traced = jax.jit(program.run, donate_argnums=program.donated).trace(*args)
    middle = time.perf_counter()
    lowered = traced.lower()
    end = time.perf_counter()
    return _Lowered(
        lowered, {"trace_s": round(middle - start, 2), "lower_s": round(end - middle, 2)}
    )


def _compiled(chip: str, program: Program, made: _Lowered) -> dict[str, Any]:
    start = time.perf_counter()
    compiled = made.lowered.compile()
    return {
        "chip": chip,
        "program": program.name,
        **made.times,
        "compile_s": round(time.perf_counter() - start, 2),
        **_sizes(compiled),
        "cache_bytes": _bytes([program.args[i] for i in program.donated]),
        "row_bytes": program.row_bytes,
    }


def _sizes(compiled: jax.stages.Compiled) -> dict[str, int | None]:
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
    assert memory is not None, "compilers for chips that are not there tell memory"
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "flops": int(cost["flops"]) if "flops" in cost else None,
        "bytes_accessed": int(cost["bytes accessed"]) if "bytes accessed" in cost else None,
    }


def lower_for(platform: str) -> Iterator[dict[str, Any]]:
    """Sizes of every program lowered for a GPU platform."""
    for program in programs("pallas_gpu"):
        start = time.perf_counter()
        run = jax.jit(program.run, donate_argnums=program.donated)
        found = chips.lowered(run, program.args, platform)
        yield {
            "chip": platform,
            "program": program.name,
            "lower_s": round(time.perf_counter() - start, 2),
            "module_bytes": len(found.mlir_module_serialized),
            "n_kernel_calls": found.mlir_module().count(f"@{chips.GPU_CALL}"),
        }


def programs(kernel: str) -> Iterator[Program]:
    """The decode step by both implementations, and the kernel alone in several forms."""
    for attention in ("chunked", kernel):
        yield decode_step(shapes.shape(_SHAPE.value, _LAYERS.value), attention)
    for d in map(int, _KERNELS.value):
        for rows in KERNEL_ROWS:
            yield kernel_alone(kernel, d, rows)
        yield kernel_alone(kernel, d, "bf16", n_tokens=_N_PROMPT)


def decode_step(of: DecoderSpec, attention: str) -> Program:
    """One token of each sequence, whole; weights are bf16, the cache is donated."""
    config = CacheConfig(
        n_ctx=_N_CTX.value,
        n_seq_max=_N_SEQ.value,
        type_k=_TYPE.value,  # pyright: ignore[reportArgumentType]
        type_v=_TYPE.value,  # pyright: ignore[reportArgumentType]
        attention=attention,  # pyright: ignore[reportArgumentType]
    )
    model = nnx.eval_shape(functools.partial(shapes.random_decoder, of, "bf16"))
    graph, params = nnx.split(model)
    spec = step.StepSpec(config, cell_layout(of.groups, None, config))
    kind = model_kind(graph, params, spec, None, layer_params(model, params))
    cache = jax.eval_shape(lambda: step.create(spec))
    batch = jax.eval_shape(lambda: _batch(spec.layout, _N_SEQ.value))
    row_bytes = _bytes((cache.stores[0].k[0], cache.stores[0].v[0]))
    args = tuple(jax.tree.leaves(params)), cache, batch
    run = functools.partial(whole_step, kind)
    return Program(f"decode step, {attention}", run, args, row_bytes, donated=(1,))


def _batch(layout: Layout, n: int) -> batches.Batch:
    """A batch of n tokens: with more than one, each reads a list of its own."""

    def ints(*sizes: int) -> jax.Array:
        return jnp.zeros(sizes, jnp.int32)

    def places(store: int) -> Places:
        n_blocks = layout.stores[store].extent.n_blocks
        rows = SeqBlocks(tables=ints(n, n_blocks), n_blocks=ints(n)) if n > 1 else None
        return Places(slots=ints(n), blocks=ints(n_blocks), n_blocks=ints(), seq_blocks=rows)

    return batches.Batch(
        tokens=ints(n),
        pos=ints(n),
        seq_ids=ints(n),
        places=tuple(map(places, layout.store_of)),
        out_ids=ints(n),
    )


def kernel_alone(attention: str, d: int, rows: str, n_tokens: int = 1) -> Program:
    """Attention of one sequence's tokens over 8 kv heads with 4 query heads each."""
    n_kv, n, b = 8, _N_CTX.value // 256, 256
    group = GroupSpec(layers=(0,), n_kv_heads=n_kv, head_dim=d, rope=None)

    def arrays() -> tuple:
        dtype = jnp.float32 if rows == "f32" else jnp.bfloat16
        q, k, v = (jnp.zeros((n_tokens, h, d), dtype) for h in (4 * n_kv, n_kv, n_kv))
        keys = codec.zeros(rows, (n, n_kv, d, b), -2)  # pyright: ignore[reportArgumentType]
        values = codec.zeros(rows, (n, n_kv, b, d), -1)  # pyright: ignore[reportArgumentType]
        view = BlockView(
            pos=jnp.zeros(n_tokens, jnp.int32),
            bits=jnp.zeros((n_tokens, 1), jnp.uint32),
            blocks=jnp.zeros(n, jnp.int32),
            n_blocks=jnp.int32(0),
            cell_pos=jnp.zeros((n, b), jnp.int32),
            cell_seqs=jnp.zeros((n, b, 1), jnp.uint32),
        )
        return TokenQKV(q=q, k=k, v=v), LayerKV(k=keys, v=values), view

    def run(*args: Any) -> tuple:
        return attend(*args, LayerAttention(group=group, implementation=attention))

    args = jax.eval_shape(arrays)
    name = f"kernel, head of {d}, {rows}" + (f", {n_tokens} tokens" if n_tokens > 1 else "")
    name += ", mosaic_gpu" if attention == "mosaic_gpu" else ""
    return Program(name, run, args, _bytes(args[1]))


def _bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


if __name__ == "__main__":
    commands.run(main)
