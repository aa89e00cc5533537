"""Attention alone over random cells, beside the peers' attention over static caches.

A few layers with cells of their own follow each other in one program, as in a step of a model: so
no layer finds its keys in a processor's cache, and what it costs to start a program is shared.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvrt.attention import LayerAttention, LayerKV, TokenQKV, attend, rope
from kvrt.config import GroupSpec
from kvrt.program import estimate
from kvrt.program.step import Cache
from scripts._lib import cases, grid, measure, torch_peer
from scripts._lib.cases import Case

# Layers that follow each other, at most.
N_CHAIN = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chain:
    """Attention of layers that follow each other, compiled and ready to be timed.

    Attributes:
      run: the program with its arguments.
      n_layers: in it.
      layer_bytes: cached keys and values that a layer has to read.
      compile_s: seconds that compiling took.
      temp_bytes: what the program takes beside its arguments, where it says so.
    """

    run: Callable[[], Any]
    n_layers: int
    layer_bytes: int
    compile_s: float
    temp_bytes: int | None

    def figures(self, n_runs: int) -> dict[str, Any]:
        """Microseconds of a layer in so many runs, and its bytes beside a copy's."""
        samples = [s / self.n_layers for s in measure.clock(self.run, n_runs + 1)[1:]]
        return _rates(samples, self.layer_bytes) | {
            "n_chained": self.n_layers,
            "compile_s": self.compile_s,
            "temp_bytes": self.temp_bytes,
        }


def lines(asked: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Figures of all cases by kind of layers, those of peers behind the first of each.

    PyTorch comes first, for JAX keeps the memory that it once had.
    """
    sizes = {(c.n_batch, c.context): c for c in reversed(asked)}
    peers = [(c, g) for c in sizes.values() for g in c.spec.groups if _has_peers(c, g)]
    told = torch_peer.attention([asked_of_torch(*peer, grid.n_runs()) for peer in peers])
    reasons = {found.get("skipped") for found in told}
    theirs = dict(zip(((c.n_batch, c.context, g) for c, g in peers), told, strict=True))
    if len(reasons) == 1 and None not in reasons:
        theirs = {}
        yield {"side": "torch", "skipped": reasons.pop()}
    for case in asked:
        for group in case.spec.groups:
            yield run(case, group)
            if not _has_peers(case, group) or sizes[case.n_batch, case.context] is not case:
                continue
            yield from of_jax(case, group)
            found = theirs.get((case.n_batch, case.context, group))
            if found is not None:
                yield of_torch(case, group, found)


def _has_peers(case: Case, group: GroupSpec) -> bool:
    """A peer's cache of a window is the window; for a prompt it would be a band of a matrix."""
    return case.n_new == 1 or not group.mask.size


def asked_of_torch(case: Case, group: GroupSpec, n_runs: int) -> torch_peer.Asked:
    """What PyTorch is to do for a case, in so many runs."""
    context = cases.n_seen(case, group)
    return torch_peer.Asked(
        n_batch=case.n_batch,
        n_new=case.n_new,
        context=context,
        n_cells=_static_cells(case, context),
        n_heads=case.spec.n_heads,
        n_kv_heads=group.n_kv_heads,
        head_dim=group.head_dim,
        dtype=grid.peer_dtype(case, "bf16"),
        n_layers=min(N_CHAIN, len(group.layers)),
        n_runs=n_runs,
    )


def run(case: Case, group: GroupSpec) -> dict[str, Any]:
    """Figures of one implementation over the cells of a group's layers."""
    measure.copy_gb_s()  # first, for it takes memory of its own
    figures = {"side": f"kvrt {case.attention}", **_of_group(case, group)}
    lacking = grid.no_kernel(case)
    if lacking:
        return figures | {"skipped": lacking}
    one = case.of_group(group, 1)
    n_bytes = estimate.of_cells(one.spec.groups, None, one.config).n_bytes
    lacking = grid.no_room(n_bytes)
    if lacking:
        return figures | {"skipped": lacking}
    n_layers = _most(group, n_bytes)
    chain = case.of_group(group, n_layers)
    try:
        return figures | prepare(chain).figures(grid.n_runs())
    except NotImplementedError as error:
        return figures | {"skipped": str(error)}


def prepare(case: Case, dtype: str = "float32") -> Chain:
    """Our attention of a case with one group; queries are of dtype.

    Raises:
      NoKernel: the implementation cannot.
    """
    (group,), (spec,) = case.layout.groups, case.layout.stores
    cache, step = cases.cache(case), cases.batch(case)
    keys = jax.random.split(jax.random.key(2), 3)
    n = case.n_batch * case.n_new
    heads = (case.spec.n_heads, group.n_kv_heads, group.n_kv_heads)
    new = [
        jax.random.normal(k, (n, h, group.head_dim), dtype)
        for k, h in zip(keys, heads, strict=True)
    ]

    def chain(new: list[jax.Array], cache: Cache, step: Any) -> jax.Array:
        (store,), (held,) = cache.stores, cache.cells
        view = cases.view(case, held, step, spec.extent)
        tables = None
        if case.rope == "read" and group.rope:
            tables = rope.make(group.rope, view, case.config.n_ctx, unrotated=True)
        how = LayerAttention(group=group, rope=tables, implementation=case.attention)
        q, k, v = new
        for keys, values in zip(store.k, store.v, strict=True):
            # The next layer waits for this one.
            q = q + attend(TokenQKV(q=q, k=k, v=v), LayerKV(k=keys, v=values), view, how)[0]
        return q

    program, compile_s = compiled(chain, new, cache, step)
    n_layers = len(group.layers)
    return Chain(
        run=lambda: program(new, cache, step),
        n_layers=n_layers,
        layer_bytes=cases.read_bytes(case, cache.stores) // n_layers,
        compile_s=compile_s,
        temp_bytes=temp_bytes(program),
    )


def of_jax(case: Case, group: GroupSpec) -> Iterator[dict[str, Any]]:
    """Figures of `jax.nn.dot_product_attention` over a static cache, by implementation."""
    usual = "f32" if jax.default_backend() == "cpu" else "bf16"
    dtype = jnp.dtype(grid.peer_dtype(case, usual))
    cache = static_cache(case, group, dtype)
    n_cells, layer_bytes = cache.n_cells, cache.layer_bytes(group)
    common = {**_of_group(case, group), "type_k": dtype.name, "type_v": dtype.name}
    on_gpu = jax.default_backend() == "gpu" and dtype != jnp.float32
    for name in ("xla", "cudnn") if on_gpu else ("xla",):
        figures = common | {"side": f"jax.nn {name}", "attention": name, "n_cells": n_cells}
        lacking = grid.no_room(layer_bytes)
        if lacking:
            yield figures | {"skipped": lacking}
            continue
        try:
            chain = prepare_jax(case, group, cache, name, _most(group, layer_bytes))
            yield figures | chain.figures(grid.n_runs())
        except (NotImplementedError, ValueError, jax.errors.JaxRuntimeError) as error:
            yield figures | {"skipped": " ".join(str(error).split())[:200]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StaticCache:
    """A peer's cache: as many cells for each sequence, of which the first `context` are read."""

    n_batch: int
    n_cells: int
    context: int
    dtype: jnp.dtype

    def size(self, group: GroupSpec) -> tuple[int, ...]:
        """Shape of the keys of a layer."""
        return self.n_batch, self.n_cells, group.n_kv_heads, group.head_dim

    def layer_bytes(self, group: GroupSpec) -> int:
        """Bytes of the keys and values of a layer."""
        return 2 * int(np.prod(self.size(group))) * self.dtype.itemsize


def static_cache(case: Case, group: GroupSpec, dtype: jnp.dtype) -> StaticCache:
    """The cache that a peer has of a case, no longer than whole blocks make it."""
    context = cases.n_seen(case, group)
    n_cells = _static_cells(case, context)
    return StaticCache(n_batch=case.n_batch, n_cells=n_cells, context=context, dtype=dtype)


def prepare_jax(
    case: Case, group: GroupSpec, cache: StaticCache, name: Any, n_layers: int
) -> Chain:
    """`jax.nn.dot_product_attention` over a static cache, by the implementation of that name."""
    size, dtype, context = cache.size(group), cache.dtype, cache.context
    draw = jax.jit(lambda key, size: jax.random.normal(key, size, dtype), static_argnums=1)
    keys = jax.random.split(jax.random.key(3), 2 * n_layers + 1)
    q = draw(keys[0], (case.n_batch, case.n_new, case.spec.n_heads, group.head_dim))
    caches = [draw(key, size) for key in keys[1:]]
    # A step of many tokens has them at the end of what it sees.
    reach = context + jnp.arange(case.n_new)
    mask = (jnp.arange(size[1])[None] <= reach[:, None])[None, None]
    lengths = jnp.full(case.n_batch, context + 1, jnp.int32)
    hidden: dict[str, Any] = (
        {"key_value_seq_lengths": lengths} if case.n_new == 1 else {"mask": mask}
    )

    def chain(q: jax.Array, caches: list[jax.Array], hidden: dict[str, Any]) -> jax.Array:
        for k, v in zip(caches[::2], caches[1::2], strict=True):
            q = q + jax.nn.dot_product_attention(
                q, k, v, scale=group.scale, implementation=name, **hidden
            )
        return q

    program, compile_s = compiled(chain, q, caches, hidden)
    return Chain(
        run=lambda: program(q, caches, hidden),
        n_layers=n_layers,
        layer_bytes=2 * case.n_batch * context * size[2] * size[3] * dtype.itemsize,
        compile_s=compile_s,
        temp_bytes=temp_bytes(program),
    )


def of_torch(case: Case, group: GroupSpec, found: dict[str, Any]) -> dict[str, Any]:
    """Figures of what PyTorch said."""
    dtype = grid.peer_dtype(case, "bf16")
    figures = {"side": "torch", **_of_group(case, group), "attention": "compiled"}
    figures |= {"type_k": dtype, "type_v": dtype}
    if "skipped" in found:
        return figures | {"skipped": found["skipped"]}
    context = cases.n_seen(case, group)
    width = group.n_kv_heads * group.head_dim * jnp.dtype(dtype).itemsize
    figures |= {"torch": found["version"], "n_chained": found["n_layers"]}
    figures |= _rates(found["samples"], 2 * case.n_batch * context * width)
    return figures | {"compile_s": round(found["compile_s"], 2)}


def _of_group(case: Case, group: GroupSpec) -> dict[str, Any]:
    heads = {"n_heads": case.spec.n_heads, "n_kv_heads": group.n_kv_heads}
    heads |= {"head_dim": group.head_dim, "mask": group.mask.kind, "window": group.mask.size}
    return grid.named(case) | heads


def _static_cells(case: Case, context: int) -> int:
    """Cells of a static cache that is no longer than whole blocks make it."""
    b = case.block_size
    return -(-(context + case.n_new) // b) * b


def _most(group: GroupSpec, layer_bytes: int) -> int:
    """Layers that follow each other: as many as there is room for."""
    n = min(N_CHAIN, len(group.layers))
    return next(i for i in range(n, 0, -1) if i == 1 or grid.no_room(i * layer_bytes) is None)


def compiled(run: Any, *args: Any, donate: tuple[int, ...] = ()) -> tuple[Any, float]:
    """A program for these arguments, and the seconds that it took to compile."""
    start = time.perf_counter()
    program = jax.jit(run, donate_argnums=donate).lower(*args).compile()
    return program, round(time.perf_counter() - start, 2)


def temp_bytes(program: Any) -> int | None:
    """What a program takes beside its arguments, where it says so."""
    analysis = program.memory_analysis()
    return None if analysis is None else analysis.temp_size_in_bytes


def _rates(samples: list[float], n_bytes: int) -> dict[str, Any]:
    """Microseconds of a layer, and its bytes beside a copy's."""
    return {
        "layer_us": measure.quartiles(samples, scale=1e6, digits=1),
        "layer_bytes": n_bytes,
        **measure.beside_copy(samples, n_bytes),
    }
