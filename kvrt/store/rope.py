"""Rotary embedding: frequencies of every scaling rule, rotation of tokens and of key blocks.

Frequencies are made on the host in float64 and rounded once. On the device an angle is the float32
product of position and frequency, as in llama.cpp: its error is at most 2^-23 of the angle (0.008
radians at 65,536 radians), and positions beyond 2^24 lose their last bits before they are
multiplied. This limits how far positions may usefully grow, whatever the cache holds.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from kvrt.arrays import AnyArray, Array, Float, Int32
from kvrt.config import RopeSpec
from kvrt.errors import BadConfig


def frequencies(spec: RopeSpec, n_ctx: int) -> Float[np.ndarray, " R"]:
    """Frequency of each rotated pair after the scaling rule.

    `dynamic_ntk` and `longrope` depend on the length of the context. All cached keys must share one
    set of frequencies, so they take the cache's n_ctx, not the number of tokens seen so far: a
    model that follows its sequence's length agrees where that length and n_ctx pick the same set.

    Args:
      spec: rotation of a group.
      n_ctx: cells of the cache, in tokens; what the length-dependent rules are fixed at.

    Returns:
      Radians per position, float32, fastest pair first. `[n_rot / 2]`

    Raises:
      BadConfig: the rule is unknown or its parameters contradict each other.

    Source: arXiv:2104.09864; arXiv:2309.00071 (ntk, dynamic_ntk, yarn); arXiv:2402.13753
    (longrope); transformers `modeling_rope_utils` (llama3); llama.cpp `ggml_rope_ext`.
    """
    freqs = _by_rule(spec, n_ctx)
    if spec.freq_factors:
        freqs = freqs / np.asarray(spec.freq_factors, np.float64)
    return freqs.astype(np.float32)


def magnitude(spec: RopeSpec, n_ctx: int) -> float:
    """Factor of cos and sin, applied once when q and k are rotated to their positions.

    A K-shift leaves it out, or each shift would scale the keys again. LongRoPE's factor belongs to
    the model, not to the length in use: it holds for short factors as for long ones.

    Args:
      spec: rotation of a group; its own magnitude wins over the rule's.
      n_ctx: cells of the cache; no rule needs it today, callers pass what `frequencies` gets.

    Returns:
      YaRN 0.1 ln(factor) + 1, LongRoPE sqrt(1 + ln(factor) / ln(n_ctx_orig)), else 1.

    Raises:
      BadConfig: longrope with a factor but an n_ctx_orig of 1, whose logarithm is 0.

    Source: arXiv:2309.00071, sec. 3.4; arXiv:2402.13753; transformers `modeling_rope_utils`.
    """
    del n_ctx
    if spec.magnitude is not None:
        return spec.magnitude
    if spec.factor <= 1.0:
        return 1.0
    if spec.scaling == "yarn":
        return 0.1 * math.log(spec.factor) + 1.0
    if spec.scaling == "longrope":
        if spec.n_ctx_orig < 2:
            raise BadConfig(f"longrope needs n_ctx_orig of 2 or more, found {spec.n_ctx_orig}")
        return math.sqrt(1.0 + math.log(spec.factor) / math.log(spec.n_ctx_orig))
    return 1.0


def angles(
    freqs: Float[Array, " R"], pos: Int32[AnyArray, " T"]
) -> tuple[Float[Array, "T R"], Float[Array, "T R"]]:
    """Cosine and sine of pos * freq, float32; of a position, or of a change of position."""
    theta = pos.astype(jnp.float32)[:, None] * freqs[None, :]
    return jnp.cos(theta), jnp.sin(theta)


def block_tables(
    freqs: Float[Array, " R"],
    pos: Int32[AnyArray, "N B"],
    blocks: Int32[AnyArray, " M"],
    n_blocks: Int32[AnyArray, ""],
) -> tuple[Float[Array, "N R B"], Float[Array, "N R B"]]:
    """Cosines and sines of the cells of the first n_blocks of `blocks`; zeros elsewhere.

    A table of its own and not an expression, because XLA would repeat an expression in the kernel
    of every layer: that made the K-shift eight times as slow.
    """
    zeros = jnp.zeros((pos.shape[0], freqs.shape[0], pos.shape[1]), jnp.float32)

    def fill(i: Array, tables: tuple[Array, Array]) -> tuple[Array, Array]:
        block = blocks[i]
        cos, sin = angles(freqs, pos[block])
        return tuple(
            lax.dynamic_update_index_in_dim(table, x.T, block, 0)
            for table, x in zip(tables, (cos, sin), strict=True)
        )

    return lax.fori_loop(0, n_blocks, fill, (zeros, zeros))


def seq_tables(
    freqs: Float[Array, " R"],
    pos: Int32[AnyArray, "N B"],
    tables: Int32[AnyArray, "S M"],
    n_blocks: Int32[AnyArray, " S"],
) -> tuple[Float[Array, "N R B"], Float[Array, "N R B"]]:
    """As `block_tables`, of the first n_blocks[i] blocks of every block list i of `tables`."""
    zeros = jnp.zeros((pos.shape[0], freqs.shape[0], pos.shape[1]), jnp.float32)

    def fill(i: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
        blocks = lax.dynamic_index_in_dim(tables, i, 1, keepdims=False)
        by_cell = [
            x.reshape(-1, pos.shape[1], x.shape[1]) for x in angles(freqs, pos[blocks].reshape(-1))
        ]
        cos, sin = (
            table.at[blocks].set(jnp.swapaxes(x, 1, 2))
            for table, x in zip(found, by_cell, strict=True)
        )
        return cos, sin

    return lax.fori_loop(0, jnp.max(n_blocks), fill, (zeros, zeros))


def add_block(
    freqs: Float[Array, " R"],
    pos: Int32[AnyArray, "N B"],
    block: Int32[Array, ""],
    tables: tuple[Float[Array, "N R B"], Float[Array, "N R B"]],
) -> tuple[Float[Array, "N R B"], Float[Array, "N R B"]]:
    """`tables` with the cosines and sines of one more block."""
    cos, sin = (
        lax.dynamic_update_index_in_dim(table, x.T, block, 0)
        for table, x in zip(tables, angles(freqs, pos[block]), strict=True)
    )
    return cos, sin


def rotate(
    x: Float[Array, "T H D"], cos: Float[Array, "T R"], sin: Float[Array, "T R"], layout: str
) -> Float[Array, "T H D"]:
    """Rotates the first 2R channels of each head in float32; the others keep their bits.

    With cos 1 and sin 0 finite values keep theirs too, but for the sign of a zero.

    Args:
      x: queries or keys in any float dtype, which the result keeps.
      cos: cosines of each token's angles, times the magnitude if any. `[T, R]`
      sin: sines likewise. `[T, R]`
      layout: "norm" pairs channels (2i, 2i+1), "neox" pairs (i, i+R).

    Source: arXiv:2104.09864, sec. 3.4; GPT-NeoX and llama.cpp for the two layouts.
    """
    return rotate_by(x, by_channel(cos, sin, layout), layout)


def by_channel(
    cos: Float[Array, "T R"], sin: Float[Array, "T R"], layout: str
) -> Float[Array, "2 T C"]:
    """What each of C = 2R channels is multiplied with, and what its partner is."""
    if layout == "norm":
        both = [jnp.stack(pair, axis=2) for pair in ((cos, cos), (-sin, sin))]
    elif layout == "neox":
        both = [jnp.stack(pair, axis=1) for pair in ((cos, cos), (-sin, sin))]
    else:
        raise _unknown(layout)
    return jnp.stack([x.reshape(cos.shape[0], -1) for x in both])


def rotate_by(
    x: Float[Array, "T H D"], table: Float[Array, "2 T C"], layout: str
) -> Float[Array, "T H D"]:
    """As `rotate`, by a table of `by_channel`: for many layers that share one."""
    n = table.shape[2]
    rotary, tail = jnp.split(x, [n], axis=2)
    rotary = rotary.astype(jnp.float32)
    shape, axis = ((n // 2, 2), 3) if layout == "norm" else ((2, n // 2), 2)
    partners = jnp.flip(rotary.reshape(*x.shape[:2], *shape), axis).reshape(rotary.shape)
    rotated = rotary * table[0][:, None] + partners * table[1][:, None]
    rotated = rotated.astype(x.dtype)
    return jnp.concatenate([rotated, tail], axis=2) if tail.shape[2] else rotated


def rotate_block(
    k: Float[Array, "H D B"], cos: Float[Array, "R B"], sin: Float[Array, "R B"], layout: str
) -> Float[Array, "H D B"]:
    """Rotates one block of stored keys, channels before cells, as `rotate` does tokens.

    Every channel takes itself times a cosine and its partner times a signed sine: joining two
    halves that were computed apart takes XLA's CPU backend five times as long.
    """
    n_kv, d, b = k.shape
    n_pairs = cos.shape[0]
    rotary, tail = jnp.split(k, [2 * n_pairs], axis=1)
    rotary = rotary.astype(jnp.float32)
    if layout == "norm":
        pairs, axis = rotary.reshape(n_kv, n_pairs, 2, b), 2
    elif layout == "neox":
        pairs, axis = rotary.reshape(n_kv, 2, n_pairs, b), 1
    else:
        raise _unknown(layout)
    sign = jnp.expand_dims(jnp.array([-1.0, 1.0]), [i for i in range(4) if i != axis])
    cos, sin = (jnp.expand_dims(x, (0, axis)) for x in (cos, sin))
    rotated = pairs * cos + jnp.flip(pairs, axis) * (sin * sign)
    rotated = rotated.reshape(rotary.shape).astype(k.dtype)
    return rotated if d == 2 * n_pairs else jnp.concatenate([rotated, tail], axis=1)


def rope_partners(
    channels: Int32[np.ndarray, "*S"], n_rot: int, layout: str
) -> tuple[Int32[np.ndarray, "*S"], Int32[np.ndarray, "*S"], Float[np.ndarray, "*S"]]:
    """Of some channels their partners, their pairs, and the sign of the partner's sine.

    Channels from n_rot on are not rotated: they are their own partners, and of pair n_rot // 2.
    """
    n = n_rot // 2
    partner, pair, second = channels ^ 1, channels // 2, channels % 2
    if layout == "neox":
        partner, pair, second = (channels + n) % n_rot, channels % n, channels // n
    rotated = channels < n_rot
    partner, pair = np.where(rotated, partner, channels), np.where(rotated, pair, n)
    return partner, pair, np.where(second > 0, 1.0, -1.0).astype(np.float32)


def _unknown(layout: str) -> BadConfig:
    return BadConfig(f"rope layout is {layout!r}; 'norm' or 'neox'")


def _plain(spec: RopeSpec, base: float) -> np.ndarray:
    return base ** -(np.arange(0, spec.n_rot, 2, dtype=np.float64) / spec.n_rot)


def _by_rule(spec: RopeSpec, n_ctx: int) -> np.ndarray:
    match spec.scaling:
        case "none":
            return _plain(spec, spec.base)
        case "linear":
            return _plain(spec, spec.base) / spec.factor
        case "llama3":
            return _llama3(spec)
        case "ntk":
            return _stretched_base(spec, spec.factor)
        case "dynamic_ntk":
            ratio = max(n_ctx, spec.n_ctx_orig) / spec.n_ctx_orig
            return _stretched_base(spec, spec.factor * ratio - (spec.factor - 1.0))
        case "yarn":
            return _yarn(spec)
        case "longrope":
            short = n_ctx <= spec.n_ctx_orig
            factors = spec.short_factors if short else spec.long_factors
            return _plain(spec, spec.base) / np.asarray(factors, np.float64)
        case _:
            raise BadConfig(f"rope scaling {spec.scaling!r} is unknown; see RopeSpec.scaling")


def _stretched_base(spec: RopeSpec, stretch: float) -> np.ndarray:
    """NTK-aware: the slowest pair stretches by `stretch`, the fastest by nothing."""
    if spec.n_rot == 2:  # the only pair is the fastest
        return _plain(spec, spec.base)
    return _plain(spec, spec.base * stretch ** (spec.n_rot / (spec.n_rot - 2)))


def _llama3(spec: RopeSpec) -> np.ndarray:
    """Divides slow pairs by the factor, keeps fast ones and blends between."""
    low, high = spec.low_freq_factor, spec.high_freq_factor
    if high <= low:
        raise BadConfig(f"llama3 high_freq_factor {high} must be above low_freq_factor {low}")
    freqs = _plain(spec, spec.base)
    n_rotations = spec.n_ctx_orig * freqs / (2.0 * math.pi)
    keep = np.clip((n_rotations - low) / (high - low), 0.0, 1.0)
    return keep * freqs + (1.0 - keep) * freqs / spec.factor


def _yarn(spec: RopeSpec) -> np.ndarray:
    """Keeps pairs that rotate often, divides those that rotate rarely, ramps between."""
    if spec.base <= 1.0:
        raise BadConfig(f"yarn needs a rope base above 1, found {spec.base}")

    def pair_of(n_rotations: float) -> float:
        """Pair, as a fraction, that makes this many rotations within the trained length."""
        longest = spec.n_ctx_orig / (n_rotations * 2.0 * math.pi)
        return spec.n_rot * math.log(longest) / (2.0 * math.log(spec.base))

    low, high = pair_of(spec.beta_fast), pair_of(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.n_rot - 1)
    span = max(high - low, 0.001)  # a step where the ramp has no width
    stretch = np.clip((np.arange(spec.n_rot // 2) - low) / span, 0.0, 1.0)
    freqs = _plain(spec, spec.base)
    return (1.0 - stretch) * freqs + stretch * freqs / spec.factor
