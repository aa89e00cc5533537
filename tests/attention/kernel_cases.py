"""Caches and queries for the kernels' tests: a form fixes a program, values are drawn."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from kvrt import GroupSpec, MaskSpec, RopeSpec, SelfExtend
from kvrt.attention import (
    BlockView,
    LayerAttention,
    LayerKV,
    SeqView,
    TokenQKV,
    grouped,
    rope,
    softmax,
)
from kvrt.attention import reference as judge
from kvrt.attention.pallas import attend as pallas_attend
from kvrt.store import codec

FULL = MaskSpec()


@dataclasses.dataclass(frozen=True)
class Form:
    """What changes the program. The last token is padding where there are several.

    Keys are stored unrotated where there is RoPE, but for `write`, where they are rotated from
    their exact positions to grouped ones.
    """

    tokens: int = 1
    heads: int = 1
    kv_heads: int = 2
    d: int = 16
    block: int = 16
    blocks: int = 6
    words: int = 1
    k: str = "f32"
    v: str = "f32"
    mask: MaskSpec = FULL
    cap: float | None = None
    scale: float | None = None
    sinks: bool = False
    rows: bool = False
    raw: RopeSpec | None = None
    extend: SelfExtend | None = None
    write: bool = False
    dtype: str = "float32"
    in_order: bool = False

    @property
    def group(self):
        return GroupSpec(
            layers=(0,),
            n_kv_heads=self.kv_heads,
            head_dim=self.d,
            rope=self.raw,
            mask=self.mask,
            soft_cap=self.cap,
            scale=self.scale,
        )


# More tokens than one product serves: the kernel reads them as three blocks, of which the last
# tokens' window has two.
MANY_OWN = Form(
    tokens=2 * pallas_attend.OWN + 9,
    heads=2,
    kv_heads=1,
    blocks=2,
    mask=MaskSpec(kind="window", size=40),
    cap=3.0,
    sinks=True,
    in_order=True,
)


# What every kernel is compared in; `sized` makes them as large as a kernel's tiles want.
FORMS = {
    "window": Form(
        tokens=3,
        heads=3,
        mask=MaskSpec(kind="window", size=9, n_sink=2),
        cap=2.0,
        scale=0.5,
        sinks=True,
    ),
    "rows-int8": Form(tokens=4, heads=4, rows=True, k="int8", v="int8"),
    "chunked-2-words": Form(
        tokens=20, words=2, block=32, k="bf16", v="f16", mask=MaskSpec(kind="chunked", size=16)
    ),
    "symmetric": Form(tokens=2, heads=3, mask=MaskSpec(kind="symmetric", size=20)),
    "bf16": Form(tokens=2, heads=4, d=32, k="bf16", v="bf16", dtype="bfloat16"),
    "f16": Form(tokens=2, heads=4, d=32, k="f16", v="f16", dtype="float16"),
    "int8-bf16": Form(tokens=2, heads=4, d=32, rows=True, k="int8", v="int8", dtype="bfloat16"),
}
# SelfExtend as in the paper: exact positions near a query, grouped ones beyond.
GROUPED = Form(
    heads=2,
    raw=RopeSpec(n_rot=16),
    extend=SelfExtend(ga_n=4, ga_w=8, kind="paper"),
    sinks=True,
)


def sized(name, size=None, **sizes):
    """A form of FORMS of other sizes; `size` is the mask's."""
    form = FORMS[name]
    mask = form.mask if size is None else dataclasses.replace(form.mask, size=size)
    return dataclasses.replace(form, mask=mask, **sizes)


@dataclasses.dataclass(frozen=True)
class Values:
    """What does not: how full a cache is, with or without holes, and a seed for the rest."""

    seed: int
    n_used: int
    holes: bool
    n_listed: int


@st.composite
def values(draw, form):
    """Cells in use end at or beside the edge of a block; any number of blocks is listed."""
    edge = draw(st.integers(0, form.blocks)) * form.block + draw(st.integers(-1, 1))
    return Values(
        seed=draw(st.integers(0, 2**32 - 1)),
        n_used=min(max(edge, 0), form.blocks * form.block),
        holes=draw(st.booleans()),
        n_listed=draw(st.integers(0, form.blocks)),
    )


def arguments(form, drawn):
    """Arguments of a kernel, and rows in which what no token sees is NaN."""
    rng = np.random.default_rng(drawn.seed)
    view = _view(form, drawn, rng)
    q, k, v = (
        jnp.asarray(rng.standard_normal((form.tokens, n, form.d)), form.dtype)
        for n in (form.heads * form.kv_heads, form.kv_heads, form.kv_heads)
    )
    cells = (form.blocks, form.kv_heads, form.block)
    seen = _seen(form, view)
    clean, poisoned = [], []
    for kind, axis in ((form.k, -2), (form.v, -1)):
        shape = (*cells[:2], form.d, cells[2]) if axis == -2 else (*cells, form.d)
        values = jnp.asarray(rng.standard_normal(shape), jnp.float32)
        rows = codec.encode(values, codec.zeros(kind, shape, axis), axis)
        clean.append(rows)
        poisoned.append(_poisoned(rows, seen, axis))
    n_q = form.heads * form.kv_heads
    sinks = jnp.asarray(rng.standard_normal(n_q), jnp.float32) if form.sinks else None
    return (q, k, v), clean, poisoned, view, sinks


def shapes(form):
    """What a kernel is traced for: tokens, rows, view and sinks as shapes."""

    def arrays():
        cells = (form.blocks, form.kv_heads, form.block)
        ints = functools.partial(jnp.zeros, dtype=jnp.int32)
        bits = functools.partial(jnp.zeros, dtype=jnp.uint32)
        n_q = form.heads * form.kv_heads
        tokens = [jnp.zeros((form.tokens, n, form.d), form.dtype) for n in (n_q, *2 * cells[1:2])]
        rows = [
            codec.zeros(form.k, (*cells[:2], form.d, cells[2]), -2),
            codec.zeros(form.v, (*cells, form.d), -1),
        ]
        common = dict(
            pos=ints(form.tokens),
            bits=bits((form.tokens, form.words)),
            cell_pos=ints((form.blocks, form.block)),
            cell_seqs=bits((form.blocks, form.block, form.words)),
        )
        if form.rows:
            tables = ints((form.tokens, form.blocks))
            view = SeqView(blocks=tables, n_blocks=ints(form.tokens), **common)
        else:
            view = BlockView(blocks=ints(form.blocks), n_blocks=ints(()), **common)
        return tokens, rows, view, jnp.zeros(n_q) if form.sinks else None

    return jax.eval_shape(arrays)


def _view(form, drawn, rng):
    n = form.blocks * form.block
    used = np.arange(n) < drawn.n_used
    if drawn.holes:
        used &= rng.random(n) < 0.6
    # Two sequences, some cells of both, positions in any order but for a full cache of one.
    pos = np.where(used, rng.permutation(n) if drawn.holes else np.arange(n), -1)
    seqs = np.zeros((n, form.words), np.uint32)
    seqs[:, -1] = np.where(used, rng.integers(1, 4, n) << 30, 0)
    bits = np.zeros((form.tokens, form.words), np.uint32)
    bits[:, -1] = rng.integers(1, 3, form.tokens) << 30
    at = rng.integers(0, n + 4, form.tokens)
    if form.in_order:
        at = at[0] + np.arange(form.tokens)
    if form.tokens > 1:
        at[-1], bits[-1] = -1, 0
    cells = dict(
        cell_pos=jnp.asarray(pos.reshape(form.blocks, form.block), jnp.int32),
        cell_seqs=jnp.asarray(seqs.reshape(form.blocks, form.block, form.words)),
    )
    tokens = dict(pos=jnp.asarray(at, jnp.int32), bits=jnp.asarray(bits))
    if not form.rows:
        listed = jnp.asarray(rng.permutation(form.blocks), jnp.int32)
        return BlockView(blocks=listed, n_blocks=jnp.int32(drawn.n_listed), **tokens, **cells)
    tables = np.stack([rng.permutation(form.blocks) for _ in at]).astype(np.int32)
    n_blocks = np.where(at < 0, 0, rng.integers(0, drawn.n_listed + 1, form.tokens))
    n_blocks[0] = drawn.n_listed
    return SeqView(
        blocks=jnp.asarray(tables), n_blocks=jnp.asarray(n_blocks, jnp.int32), **tokens, **cells
    )


def _seen(form, view):
    """Cells that some token's position and owner let it see, listed or not; from NumPy alone."""
    pos, seqs = np.asarray(view.cell_pos), np.asarray(view.cell_seqs)
    seen = np.zeros(pos.shape, bool)
    for at, bits in zip(np.asarray(view.pos), np.asarray(view.bits), strict=True):
        rule = form.mask
        past = pos <= at
        match rule.kind:
            case "full":
                near = past
            case "window":
                near = past & (pos > at - rule.size)
            case "chunked":
                near = past & (pos >= at // rule.size * rule.size)
            case "symmetric":
                near = abs(pos - at) <= rule.size // 2
        near |= past & (pos < rule.n_sink)
        seen |= near & (pos >= 0) & ((seqs & bits) != 0).any(axis=2)
    return seen


def _poisoned(rows, seen, axis):
    shape = (seen.shape[0], 1, 1, seen.shape[1]) if axis == -2 else (seen.shape[0], 1, -1, 1)
    keep = jnp.asarray(seen).reshape(shape)

    def bad(x):
        if x.dtype == jnp.uint16:
            return jnp.where(keep, x, jnp.uint16(0x7FC0))
        return jnp.where(keep, x, jnp.asarray(jnp.nan, x.dtype))

    if not isinstance(rows, codec.Quantized):
        return bad(rows)
    low = None if rows.zero_point is None else bad(rows.zero_point)
    return dataclasses.replace(rows, scale=bad(rows.scale), zero_point=low)


def calls(form, kernel):
    """A kernel and the reference, compiled: functions of what `arguments` gives."""

    def by_kernel(tokens, rows, view, sinks):
        return pallas_attend.attend(kernel, *bundled(form, tokens, rows, view, sinks))

    return jax.jit(by_kernel), reference(form)


def bundled(form, tokens, rows, view, sinks, **how):
    """The four arguments of attention."""
    raw = not form.write
    tables = rope.make(form.raw, view, 64, unrotated=True) if form.raw and raw else None
    (q, k, v), (keys, values) = tokens, rows
    far = form.extend and grouped.grouped_tables(form.raw, view, 64, form.extend, unrotated=raw)
    how = LayerAttention(
        group=form.group, rope=tables, grouped=far and far.cells, sinks=sinks, **how
    )
    qkv = TokenQKV(q=q, k=k, v=v, grouped=far and far.tokens(q, k))
    return qkv, LayerKV(k=keys, v=values), view, how


@functools.cache
def reference(form):
    @jax.default_matmul_precision("highest")
    def run(tokens, rows, view, sinks):
        return judge.attend(*bundled(form, tokens, rows, view, sinks))

    return jax.jit(run)


def check(form, both, drawn, atol=2e-5):
    """The kernel on poisoned rows gives what the reference gives on clean ones."""
    kernel, reference = both
    tokens, clean, poisoned, view, sinks = arguments(form, drawn)
    wanted = reference(tokens, clean, view, sinks)
    found = kernel(tokens, poisoned, view, sinks)
    for a, b in zip(found, wanted, strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        np.testing.assert_allclose(a, b, atol=atol)
    if form.tokens > 1:
        if not form.sinks:
            assert np.all(np.asarray(found[1][-1]) == softmax.MASKED)
        np.testing.assert_array_equal(np.asarray(found[0][-1], np.float32), 0)
