"""Attention alone over random cells, beside the peers' attention over caches of their own.

A few layers with cells of their own follow each other in one program, as in a step of a model: so
no layer finds its keys in a processor's cache, and what it costs to start a program is shared.
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvrt.attention import LayerAttention, LayerKV, TokenQKV, attend, rope
from kvrt.attention.pallas import tiles
from kvrt.config import GroupSpec
from kvrt.kv_types import FLOAT_DTYPES, FloatType
from kvrt.program import estimate
from kvrt.program.step import Cache
from scripts._lib import cases, grid, implementations, measure, rounds, torch_peer
from scripts._lib.cases import Case
from scripts._lib.rounds import Ready

# Layers that follow each other, at most.
_N_CHAIN = 8
# Tokens of a peer's page.
_PAGE = 16


def lines(asked: Sequence[list[Case]], peers: str) -> Iterator[dict[str, Any]]:
    """A line a side of each size and kind of layers, sides interleaved.

    PyTorch's come first, in a process of its own, for JAX keeps the memory that it once had.

    Args:
      asked: cases that differ by their implementation, for each size.
      peers: "none", "quick" ones, which compile in seconds, or "all".
    """
    kinds = [(of, group) for of in asked for group in of[0].spec.groups]
    theirs = torch_sides(kinds) if peers == "all" else [{}] * len(kinds)
    measure.copy_gb_s()  # first, for it takes memory of its own
    for (of, group), told in zip(kinds, theirs, strict=True):
        common = {**grid.named(of[0]), **_of_group(of[0], group)}
        makers = _makers(of, group, peers)
        found = {**rounds.compared(makers, grid.n_runs()), **told}
        for side, timed in found.items():
            yield {"side": side, **common, **_said(of, side), **figures(timed)}


def _makers(of: list[Case], group: GroupSpec, peers: str) -> dict[str, Callable[[], Ready]]:
    """What makes each side ready, by its name."""
    ours: dict[str, Callable[[int], Ready]] = {}
    for case in of:
        name = f"kvrt {implementations.plain_name(case.attention)}"
        ours[name] = functools.partial(prepare, case, group)
        if (
            peers != "none"
            and case.type_k != "f32"
            and implementations.kernel_module(case.attention)
        ):
            # As peers have them; kvrt's models have float32 ones.
            ours[f"{name} bf16 q"] = functools.partial(prepare, case, group, type_q="bf16")
    others = _peers(of[0], group) if peers != "none" else {}
    sides = {x: make for x, make in {**ours, **others}.items() if grid.wanted(x)}
    return {x: functools.partial(make, len(sides)) for x, make in sides.items()}


def _said(of: list[Case], side: str) -> dict[str, Any]:
    """The implementation and types of a side."""
    if side.startswith("kvrt"):
        return {"attention": side.removeprefix("kvrt ")}
    types = dict.fromkeys(("type_k", "type_v"), grid.peer_dtype(of[0], "bf16"))
    return {"attention": side, **types}


def figures(timed: rounds.Timed) -> dict[str, Any]:
    """Microseconds of a layer, and its bytes beside a copy's."""
    if not timed.samples:
        return dict(timed.figures)
    return {
        "layer_us": measure.quartiles(timed.samples, scale=1e6, digits=1),
        "layer_bytes": timed.n_bytes,
        **measure.beside_copy(timed.samples, timed.n_bytes),
        **timed.figures,
    }


def _of_group(case: Case, group: GroupSpec) -> dict[str, Any]:
    heads = {"n_heads": case.spec.n_heads, "n_kv_heads": group.n_kv_heads}
    return heads | {"head_dim": group.head_dim, "mask": group.mask.kind, "window": group.mask.size}


# --- ours -----------------------------------------------------------------------------------------


def prepare(
    case: Case, group: GroupSpec, n_sides: int, *, type_q: FloatType = "f32", n_most: int = _N_CHAIN
) -> Ready:
    """Our attention of one kind of layers, ready to be timed beside other sides.

    Raises:
      NoKernel: the implementation cannot.
      MemoryError: there is no room for one layer.
    """
    grid.check_kernel(case)
    one = case.of_group(group, 1)
    n_bytes = estimate.of_cells(one.spec.groups, None, one.config).n_bytes
    of = case.of_group(group, min(n_most, _most(group, n_bytes, n_sides)))
    (alone,), (spec,) = of.layout.groups, of.layout.stores
    cache, step = cases.cache(of), cases.batch(of)
    heads = (of.spec.n_heads, group.n_kv_heads, group.n_kv_heads)
    keys, n = jax.random.split(jax.random.key(2), 3), of.n_batch * of.n_new
    new = [
        jax.random.normal(k, (n, h, group.head_dim), FLOAT_DTYPES[type_q])
        for k, h in zip(keys, heads, strict=True)
    ]

    def chain(new: list[jax.Array], cache: Cache, step: Any) -> jax.Array:
        (store,), (held,) = cache.stores, cache.cells
        view = cases.view(of, held, step, spec.extent)
        tables = None
        if of.rope == "read" and alone.rope:
            tables = rope.make(alone.rope, view, of.config.n_ctx, unrotated=True)
        how = LayerAttention(group=alone, rope=tables, implementation=of.attention)
        q, k, v = new
        for keys, values in zip(store.k, store.v, strict=True):
            # The next layer waits for this one.
            q = q + attend(TokenQKV(q=q, k=k, v=v), LayerKV(k=keys, v=values), view, how)[0]
        return q

    n_layers = len(alone.layers)
    layer_bytes = cases.read_bytes(of, cache.stores) // n_layers
    sizes = tile_sizes(key(case, group, type_q))
    return _chained(chain, (new, cache, step), n_layers, layer_bytes, tiles=sizes)


def key(case: Case, group: GroupSpec, type_q: FloatType) -> tiles.Key | None:
    """What the tile sizes of a case are looked up as; None where it has none."""
    module = implementations.kernel_module(case.attention)
    if module is None:
        return None
    return tiles.Key(
        kernel=module,
        device=tiles.device_kind(),
        type_q=type_q,
        type_k=case.type_k,
        type_v=case.type_v,
        head_dim=group.head_dim,
        block_size=case.block_size,
        step="prefill" if case.n_new > 1 else "decode",
    )


def tile_sizes(key: tiles.Key | None) -> dict[str, int]:
    """Measured sizes that a kernel takes from the table in force."""
    table = grid.table()
    table = tiles.packaged_table() if table is None else table
    return dict(table.get(key, {})) if key else {}


def _most(group: GroupSpec, layer_bytes: int, n_sides: int) -> int:
    """Layers that follow each other, so that as many sides fit beside each other.

    Raises:
      MemoryError: there is no room for one.
    """
    lacking = grid.no_room(layer_bytes)
    if lacking:
        raise MemoryError(f"a layer {lacking}")
    most = min(_N_CHAIN, len(group.layers))
    return next(
        n for n in range(most, 0, -1) if n == 1 or not grid.no_room(n * layer_bytes * n_sides)
    )


def _chained(
    chain: Callable[..., jax.Array], args: tuple, n_layers: int, layer_bytes: int, **more: Any
) -> Ready:
    """A program of layers that follow each other, compiled."""
    program, compile_s = compiled(chain, *args)
    figures = {"n_chained": n_layers, "compile_s": compile_s, "temp_bytes": temp_bytes(program)}
    return Ready(
        run=lambda: program(*args),
        parts=n_layers,
        n_bytes=layer_bytes,
        figures={**figures, **{name: x for name, x in more.items() if x}},
    )


def compiled(run: Any, *args: Any) -> tuple[Any, float]:
    """A program for these arguments, and the seconds that it took to compile."""
    start = time.perf_counter()
    program = jax.jit(run).lower(*args).compile()
    return program, round(time.perf_counter() - start, 2)


def temp_bytes(program: Any) -> int | None:
    """What a program takes beside its arguments, where it says so."""
    analysis = program.memory_analysis()
    return None if analysis is None else analysis.temp_size_in_bytes


# --- peers in JAX ---------------------------------------------------------------------------------


def _peers(case: Case, group: GroupSpec) -> dict[str, Callable[[int], Ready]]:
    """Peers of the platform."""
    if _is_band(case, group):
        return {}
    platform = jax.default_backend()
    found: dict[str, Callable[..., Ready]] = {"jax.nn xla": _static}
    if platform == "gpu" and grid.peer_dtype(case, "bf16") != "float32":
        found["jax.nn cudnn"] = functools.partial(_static, name="cudnn")
    if platform == "gpu" and case.n_new == 1:
        found["jax paged_attention"] = _paged
    if platform == "tpu":
        found["jax ragged_paged_attention"] = _ragged
    return {name: functools.partial(make, case, group) for name, make in found.items()}


def _is_band(case: Case, group: GroupSpec) -> bool:
    """A peer's cache of a window is the window; for a prompt it would be a band of a matrix."""
    return case.n_new > 1 and bool(group.mask.size)


def _static(case: Case, group: GroupSpec, n_sides: int, name: Any = "xla") -> Ready:
    """`jax.nn.dot_product_attention` over a static cache, as long for each sequence."""
    context, t = cases.n_seen(case, group), case.n_new
    size = (case.n_batch, _static_cells(case, context), group.n_kv_heads, group.head_dim)
    hidden: dict[str, Any] = {
        "key_value_seq_lengths": jnp.full(case.n_batch, context + 1, jnp.int32)
    }
    if t > 1:
        # A step of many tokens has them at the end of what it sees.
        reach = context + jnp.arange(t)
        hidden = {"mask": (jnp.arange(size[1])[None] <= reach[:, None])[None, None]}

    def one(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        q = q.reshape(case.n_batch, t, *q.shape[1:])
        how = {"scale": group.scale, "implementation": name, **hidden}
        return jax.nn.dot_product_attention(q, k, v, **how).reshape(-1, *q.shape[2:])

    return _peer(case, group, n_sides, [size, size], one)


def _static_cells(case: Case, context: int) -> int:
    """Cells of a static cache that is no longer than whole blocks make it."""
    return -(-(context + case.n_new) // case.block_size) * case.block_size


def _paged(case: Case, group: GroupSpec, n_sides: int) -> Ready:
    """JAX's paged attention for GPUs: pages of 16 tokens, anywhere."""
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    n_splits = 16  # they have to divide the pages of a sequence
    n_pages = -(-case.context // (_PAGE * 8 * n_splits)) * 8 * n_splits
    size = (group.n_kv_heads, case.n_batch * n_pages, _PAGE, group.head_dim)
    tables = _tables(case.n_batch, n_pages)
    lengths = jnp.full(case.n_batch, cases.n_seen(case, group), jnp.int32)

    def one(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scaled = q * jnp.asarray(group.score_scale, q.dtype)
        how = {"k_splits": n_splits, "attn_logits_soft_cap": group.soft_cap}
        return paged_attention(scaled, k, v, tables, lengths, **how)

    return _peer(case, group, n_sides, [size, size], one)


def _ragged(case: Case, group: GroupSpec, n_sides: int) -> Ready:
    """JAX's ragged paged attention for TPUs, version 1, with the pages that it asks for."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    n_seen = cases.n_seen(case, group) + case.n_new
    n_pages = -(-n_seen // _PAGE)
    size = (case.n_batch * n_pages, _PAGE, 2 * group.n_kv_heads, group.head_dim)
    tables = _tables(case.n_batch, n_pages)
    lengths = jnp.full(case.n_batch, n_seen, jnp.int32)
    first = jnp.arange(case.n_batch + 1, dtype=jnp.int32) * case.n_new
    n_seqs = jnp.full(1, case.n_batch, jnp.int32)

    def one(q: jax.Array, pages: jax.Array) -> jax.Array:
        return ragged_paged_attention(
            q, pages, lengths, tables, first, n_seqs, sm_scale=group.score_scale
        )

    return _peer(case, group, n_sides, [size], one)


def _tables(n_batch: int, n_pages: int) -> jax.Array:
    ids = np.random.default_rng(0).permutation(n_batch * n_pages)
    return jnp.asarray(ids.reshape(n_batch, n_pages), jnp.int32)


def _peer(
    case: Case,
    group: GroupSpec,
    n_sides: int,
    sizes: list[tuple[int, ...]],
    one: Callable[..., jax.Array],
) -> Ready:
    """Layers of a peer that follow each other, each with arrays of the sizes."""
    usual = "f32" if jax.default_backend() == "cpu" else "bf16"
    dtype = jnp.dtype(grid.peer_dtype(case, usual))
    n_bytes = sum(int(np.prod(size)) for size in sizes) * dtype.itemsize
    n_layers = _most(group, n_bytes, n_sides)
    draw = jax.jit(lambda key, size: jax.random.normal(key, size, dtype), static_argnums=1)
    keys = iter(jax.random.split(jax.random.key(4), 1 + n_layers * len(sizes)))
    q = draw(next(keys), (case.n_batch * case.n_new, case.spec.n_heads, group.head_dim))
    held = [[draw(next(keys), size) for size in sizes] for _ in range(n_layers)]

    def chain(q: jax.Array, held: list[list[jax.Array]]) -> jax.Array:
        for arrays in held:
            q = q + one(q, *arrays).astype(q.dtype)
        return q

    width = 2 * group.n_kv_heads * group.head_dim * dtype.itemsize
    layer_bytes = case.n_batch * cases.n_seen(case, group) * width
    return _chained(chain, (q, held), n_layers, layer_bytes)


# --- PyTorch --------------------------------------------------------------------------------------


def torch_sides(kinds: Sequence[tuple[list[Case], GroupSpec]]) -> list[dict[str, rounds.Timed]]:
    """What PyTorch's attention and FlashInfer take for each kind of layers of each size."""
    asked = {
        (i, side): asked_of_torch(of[0], group, side)
        for i, (of, group) in enumerate(kinds)
        for side in ("torch sdpa", "flashinfer")
        if grid.wanted(side) and not _is_band(of[0], group)
    }
    told = dict(zip(asked, torch_peer.run([*asked.values()]), strict=True))
    return [
        {side: rounds.Timed(**x) for (at, side), x in told.items() if at == i}
        for i in range(len(kinds))
    ]


def asked_of_torch(case: Case, group: GroupSpec, side: str, **step: Any) -> torch_peer.Asked:
    """What PyTorch is to do for a case."""
    context = cases.n_seen(case, group)
    return torch_peer.Asked(
        side=side,
        n_batch=case.n_batch,
        n_new=case.n_new,
        context=context,
        n_cells=_static_cells(case, context),
        n_heads=case.spec.n_heads,
        n_kv_heads=group.n_kv_heads,
        head_dim=group.head_dim,
        dtype=grid.peer_dtype(case, "bf16"),
        n_layers=min(_N_CHAIN, len(group.layers)),
        n_runs=grid.n_runs(),
        scale=group.score_scale,
        cap=group.soft_cap or 0.0,
        step=step,
    )
