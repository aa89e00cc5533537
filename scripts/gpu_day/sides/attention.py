"""Attention alone, by kvrt's implementations and by peers in JAX, ready to be timed."""

import dataclasses
from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from kvrt.attention.pallas import tiles
from kvrt.config import GroupSpec
from kvrt.kv_types import FLOAT_DTYPES, FloatType
from kvrt.program import estimate
from scripts._lib import attention_alone, cases, grid, shapes
from scripts._lib.cases import Case
from scripts.gpu_day.plan import Cell
from scripts.gpu_day.sides.implementations import Implementations, sizes_in_force
from scripts.gpu_day.sides.ready import Ready

# Behind a side's name: its queries are bfloat16, as a peer's are. Our own models' are float32.
HALF_Q = " bf16 q"
_PAGE = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """A side that is to be made ready.

    Attributes:
      cell: what is measured.
      side: by whom.
      n_sides: so many share the memory.
      known: implementations of kvrt.
      table: tile sizes in force; None are those that kvrt comes with.
    """

    cell: Cell
    side: str
    n_sides: int
    known: Implementations
    table: tiles.Table | None = None

    @property
    def name(self) -> str:
        """The implementation, where the side is one of kvrt's."""
        return self.side.removesuffix(HALF_Q)

    @property
    def type_q(self) -> FloatType:
        """Float type of the queries."""
        return "bf16" if self.side.endswith(HALF_Q) else "f32"

    def case(self) -> Case:
        """The cell as a case, by the side's implementation."""
        cell: Any = self.cell
        ours = self.name in self.known.kernels or self.name in self.known.others
        attention: Any = self.known.registered(self.name, self.table) if ours else "chunked"
        return Case(
            spec=shapes.SHAPES[cell.shape],
            dtype="f32" if cell.type_kv == "f32" else "bf16",
            n_batch=cell.batch,
            context=cell.context,
            n_new=cell.n_new,
            type_k=cell.type_kv,
            type_v=cell.type_kv,
            attention=attention,
            block_size=cell.block_size,
        )

    def key(self, group: GroupSpec) -> tiles.Key | None:
        """What the side's tile sizes are looked up as; None where it has none."""
        module = self.known.kernels.get(self.name)
        if module is None:
            return None
        several = self.cell.n_new > 1
        return tiles.Key(
            kernel=module,
            device=tiles.device_kind(),
            type_q=self.type_q,
            type_k=self.cell.type_kv,
            type_v=self.cell.type_kv,
            head_dim=group.head_dim,
            block_size=self.cell.block_size,
            step="prefill" if several else "decode",
        )


def ready(of: Asked) -> Ready:
    """A side of attention alone.

    Raises:
      MemoryError: there is no room for one layer.
    """
    peer = PEERS.get(of.side)
    case = of.case()
    group = case.spec.groups[of.cell.group]
    if peer is not None:
        return peer(case, group, of.n_sides)
    one = case.of_group(group, 1)
    n_bytes = estimate.of_cells(one.spec.groups, None, one.config).n_bytes
    n_layers = most_layers(group, n_bytes, of.n_sides)
    chain = attention_alone.prepare(case.of_group(group, n_layers), FLOAT_DTYPES[of.type_q])
    return of_chain(chain, sizes=dict(sizes_in_force(of.key(group), of.table)))


def of_chain(chain: attention_alone.Chain, **figures: Any) -> Ready:
    """Layers that follow each other, ready."""
    return Ready(
        run=chain.run,
        parts=chain.n_layers,
        figures={
            "n_bytes": chain.layer_bytes,
            "n_layers": chain.n_layers,
            "compile_s": chain.compile_s,
            "temp_bytes": chain.temp_bytes,
            **figures,
        },
    )


def most_layers(group: GroupSpec, layer_bytes: int, n_sides: int) -> int:
    """Layers that follow each other, so that as many sides fit beside each other.

    Raises:
      MemoryError: there is no room for one.
    """
    n = min(attention_alone.N_CHAIN, len(group.layers))
    lacking = grid.no_room(layer_bytes)
    if lacking:
        raise MemoryError(f"a layer {lacking}")
    return next(
        i for i in range(n, 0, -1) if i == 1 or grid.no_room(i * layer_bytes * n_sides) is None
    )


def _static(name: str) -> Callable[[Case, GroupSpec, int], Ready]:
    """`jax.nn.dot_product_attention` over a static cache."""

    def make(case: Case, group: GroupSpec, n_sides: int) -> Ready:
        cache = attention_alone.static_cache(case, group, _peer_dtype(case))
        n_layers = most_layers(group, cache.layer_bytes(group), n_sides)
        return of_chain(attention_alone.prepare_jax(case, group, cache, name, n_layers))

    return make


def _peer_dtype(case: Case) -> Any:
    """A float cache as ours is; bfloat16 beside a quantized one."""
    dtype = case.type_k if case.type_k in get_args(FloatType) else "bf16"
    return jnp.dtype(FLOAT_DTYPES[dtype])


def _paged(case: Case, group: GroupSpec, n_sides: int) -> Ready:
    """JAX's paged attention for GPUs: pages of 16 tokens, anywhere."""
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    on_cpu = jax.default_backend() == "cpu"
    # Its splits have to divide the pages of a sequence.
    n_splits = 1 if on_cpu else 16
    n_pages = -(-case.context // (_PAGE * 8 * n_splits)) * 8 * n_splits
    size = (group.n_kv_heads, case.n_batch * n_pages, _PAGE, group.head_dim)
    tables = _tables(case.n_batch, n_pages)
    lengths = jnp.full(case.n_batch, cases.n_seen(case, group), jnp.int32)

    def one(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scaled = q * jnp.asarray(group.score_scale, q.dtype)
        return paged_attention(
            scaled,
            k,
            v,
            tables,
            lengths,
            k_splits=n_splits,
            attn_logits_soft_cap=group.soft_cap,
            interpret=on_cpu,
        )

    return _peer_chain(case, group, n_sides, [size, size], one)


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

    return _peer_chain(case, group, n_sides, [size], one)


def _tables(n_batch: int, n_pages: int) -> jax.Array:
    ids = np.random.default_rng(0).permutation(n_batch * n_pages)
    return jnp.asarray(ids.reshape(n_batch, n_pages), jnp.int32)


def _peer_chain(
    case: Case,
    group: GroupSpec,
    n_sides: int,
    sizes: list[tuple[int, ...]],
    one: Callable[..., jax.Array],
) -> Ready:
    """Layers of a peer that follow each other, each with arrays of the sizes."""
    dtype = _peer_dtype(case)
    n_bytes = sum(int(np.prod(size)) for size in sizes) * dtype.itemsize
    n_layers = most_layers(group, n_bytes, n_sides)
    draw = jax.jit(lambda key, size: jax.random.normal(key, size, dtype), static_argnums=1)
    keys = iter(jax.random.split(jax.random.key(4), 1 + n_layers * len(sizes)))
    q = draw(next(keys), (case.n_batch * case.n_new, case.spec.n_heads, group.head_dim))
    held = [[draw(next(keys), size) for size in sizes] for _ in range(n_layers)]

    def chain(q: jax.Array, held: list[list[jax.Array]]) -> jax.Array:
        for arrays in held:
            q = q + one(q, *arrays).astype(q.dtype)
        return q

    program, compile_s = attention_alone.compiled(chain, q, held)
    width = 2 * group.n_kv_heads * group.head_dim * dtype.itemsize
    return of_chain(
        attention_alone.Chain(
            run=lambda: program(q, held),
            n_layers=n_layers,
            layer_bytes=case.n_batch * cases.n_seen(case, group) * width,
            compile_s=compile_s,
            temp_bytes=attention_alone.temp_bytes(program),
        )
    )


PEERS: dict[str, Callable[[Case, GroupSpec, int], Ready]] = {
    "jax.nn xla": _static("xla"),
    "jax.nn cudnn": _static("cudnn"),
    "jax paged_attention": _paged,
    "jax ragged_paged_attention": _ragged,
}


def for_torch(of: Asked) -> dict[str, Any]:
    """What PyTorch is to do for a cell: its attention, and the sizes of a whole step."""
    case = of.case()
    group = case.spec.groups[of.cell.group]
    asked = attention_alone.asked_of_torch(case, group, 0)
    spec = case.spec
    return {
        "asked": dataclasses.asdict(asked),
        "scale": group.score_scale,
        "cap": group.soft_cap,
        "n_sides": of.n_sides,
        "step": {
            "n_layers": spec.n_layers,
            "n_embd": spec.n_embd,
            "n_ff": spec.n_ff,
            "n_vocab": spec.n_vocab,
            "tied": spec.tied,
        },
        "weight_bytes": shapes.weight_bytes(spec, case.dtype)[1],
    }
