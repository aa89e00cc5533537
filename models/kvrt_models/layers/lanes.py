"""Products of few tokens whose neighbouring outputs are the lanes of a register.

A sum over inputs is written out, term by term, as one expression of each output. XLA's CPU backend
makes one elementwise loop of it, divides that between cores and reads each weight once, where it
lies; LLVM vectorizes the loop over outputs, for no sum goes across it. Nothing is as large as the
weights, an activation is not rounded, and any processor with vectors of floats runs it fast.
"""

import functools
import operator
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax

from kvrt.arrays import Array, Float, Int, Shaped

# Outputs side by side: the floats of the widest register, and all that a cache line has of them
# is used by the next inputs.
LANES = 16
# Terms of an expression, and sums that it adds up side by side, or each would wait for the last.
_MOST_TERMS, _CHAINS = 64, 4
# Sums of expressions that are in memory at a time: 2 MB.
_MOST_SUMS = 1 << 19


def in_lanes(values: Int[np.ndarray, "*N G O g"]) -> Int[np.ndarray, "*N P G g L"]:
    """Weights as the products take them: P times L outputs, the last of which may be zeros."""
    *outer, n_groups, n_outputs, g = values.shape
    n_parts = -(-n_outputs // LANES)
    if n_parts * LANES != n_outputs:
        none = [(0, 0)] * (values.ndim - 2)
        values = np.pad(values, [*none, (0, n_parts * LANES - n_outputs), (0, 0)])
    parts = values.reshape(*outer, n_groups, n_parts, LANES, g)
    return np.ascontiguousarray(np.moveaxis(parts, (-4, -3, -2, -1), (-3, -4, -1, -2)))


def in_rows(values: Int[Array, "P G g L"], n_outputs: int) -> Int[Array, "G O g"]:
    """The inverse of `in_lanes`, of one matrix."""
    n_parts, n_groups, g, _ = values.shape
    rows = values.transpose(1, 0, 3, 2).reshape(n_groups, n_parts * LANES, g)
    return rows[:, :n_outputs]


def lane_product(
    x: Float[Array, "T I"],
    values: Int[Array, "P G g L"],
    scale: Float[Array, "G O"],
    first: int | Int[Array, ""] = 0,
) -> Float[Array, "T O"]:
    """X times the transpose of a matrix, in float32.

    A token has the same bits alone and among others. One with a NaN or an infinity has no finite
    output; the others do not change.

    Args:
      x: the tokens' activations.
      values: integers, by `in_lanes`, the matrix among them.
      scale: of each output of the matrix in each group; O is a multiple of L.
      first: part of the values that the matrix begins with.
    """
    n_tokens = x.shape[0]
    if n_tokens > 1 and n_tokens % 2:
        x = jnp.concatenate([x, jnp.zeros_like(x[:1])])
    size = x.shape[0], scale.shape[1]
    return _of_sums(_added_up, _sums(x, values, scale, first), size, x)[:n_tokens]


def row_product(x: Float[Array, "1 I"], weight: Float[Array, "O I"]) -> Float[Array, "1 O"] | None:
    """One token's product with a float16 matrix [O, I] as it is, neighbouring inputs in lanes.

    None where the inputs fill no registers. YNNPACK sums no float16, and XLA would write the whole
    matrix in float32 first.
    """
    n_outputs, n_inputs = weight.shape
    k = _terms(n_inputs // LANES)
    if n_inputs % LANES or k > _MOST_TERMS:
        return None
    v, each = weight.reshape(n_outputs, -1, k, LANES), x.reshape(1, -1, k, LANES)
    terms = [v[:, :, j].astype(jnp.float32) * each[:, :, j] for j in range(k)]

    def added_up(sums: Array) -> Array:
        y, n = _added([sums[:, c] for c in range(sums.shape[1])]), LANES
        while n > 1:
            n //= 2
            y = y[:, :n] + y[:, n:]
        return y.T

    return _of_sums(added_up, _in_chains(terms), (1, n_outputs), x)


def n_pieces(n_parts: int, n_tokens: int, n_inputs: int, g: int) -> int:
    """Into how many a product is cut, so that its sums stay in a core's cache."""
    n = -(-n_parts * LANES * n_tokens * (n_inputs // _terms(g)) // _MOST_SUMS)
    return next((k for k in range(n, n_parts) if n_parts % k == 0), n_parts) if n > 1 else 1


def _of_sums(
    added_up: Callable[[Array], Array], sums: Array, size: tuple[int, int], x: Array
) -> Float[Array, "T O"]:
    """The product from its sums in memory: else each of its readers would compute them again.

    XLA puts nothing into a branch.
    """
    known = zero_after(x) <= 0
    return lax.cond(known, added_up, lambda _: jnp.zeros(size, jnp.float32), sums)


def zero_after(x: Float[Array, "T I"]) -> Float[Array, ""]:
    """Zero, known only once x is, and never to XLA."""
    bits = lax.bitcast_convert_type(x[0, 0], jnp.int32)
    return lax.clamp(jnp.int32(0), bits, jnp.int32(0)).astype(jnp.float32)


def _sums(x: Array, values: Array, scale: Array, first: int | Array) -> Shaped[Array, "P T C L"]:
    """The sums over chunks of inputs; those of two tokens are the parts of a complex number.

    A loop has one result, and what two tokens have in common is computed once: a weight in float32.
    """
    (n_all, n_groups, g, _), n_tokens = values.shape, x.shape[0]
    both, k, n_parts = min(n_tokens, 2), _terms(g), scale.shape[1] // LANES
    v = values.reshape(n_all, 1, -1, k, LANES)
    n_chunks = v.shape[2]
    each = x.reshape(1, -1, both, n_chunks, k, 1)
    s = scale.astype(jnp.float32).reshape(n_groups, 1, n_parts, LANES)
    s = jnp.broadcast_to(s, (n_groups, g // k, n_parts, LANES)).reshape(-1, n_parts, LANES)
    s = s.swapaxes(0, 1)[:, None]
    at, zero = jnp.asarray(first, jnp.int32), jnp.int32(0)
    size = (n_parts, 1, n_chunks, 1, LANES)

    def wide(j: int) -> Array:
        # One cut for each term: XLA would copy what all of them are cut from.
        cut = lax.dynamic_slice(v, (at, zero, zero, jnp.int32(j), zero), size)
        return cut[:, :, :, 0].astype(jnp.float32)

    weights = [wide(j) for j in range(k)]

    def of_token(t: int) -> Array:
        terms = [weights[j] * each[:, :, t, :, j] for j in range(k)]
        return _in_chains(terms) * s

    return of_token(0) if both == 1 else lax.complex(of_token(0), of_token(1))


def _added_up(sums: Shaped[Array, "P T C L"]) -> Float[Array, "T O"]:
    """The sum over chunks, one after the other, of each token."""
    y = _added([sums[:, :, c] for c in range(sums.shape[2])])
    # Before it is added up XLA would compute each part of a complex number by itself.
    each = jnp.stack([y.real, y.imag] if jnp.iscomplexobj(y) else [y], axis=2)
    return each.transpose(1, 2, 0, 3).reshape(-1, y.shape[0] * LANES)


def _terms(g: int) -> int:
    """Terms of an expression: a group's inputs, or a part of them."""
    if g <= _MOST_TERMS:
        return g
    return max((k for k in range(_MOST_TERMS // 4, _MOST_TERMS) if g % k == 0), default=g)


def _in_chains(terms: list[Array]) -> Array:
    return _added([_added(terms[c::_CHAINS]) for c in range(min(_CHAINS, len(terms)))])


def _added(terms: list[Array]) -> Array:
    return functools.reduce(operator.add, terms)
