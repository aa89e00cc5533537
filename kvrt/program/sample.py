"""Sampling on the device: repeat penalty, top-k, top-p, min-p, temperature, in llama.cpp's order.

The limits are runtime values, so one program serves them all. Nothing is sorted: the k-th logit
and the edge of the nucleus are found exactly by a search over the 32 bits of the logits. Equal
logits at an edge are kept together.

Source: top-p arXiv:1904.09751, sec. 3.1; min-p arXiv:2407.01082; repeat penalty
arXiv:1909.05858, sec. 4.1.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvrt.arrays import AnyArray, Array, Bool, Float, Int32, UInt32, state
from kvrt.options.sampling import Sampling
from kvrt.program.programs import Program

# In place of a token where logits have NaN, +inf or no finite value: it travels with the tokens.
NO_TOKEN = -1


@state
class Sampler:
    """Runtime values of S sequences' `Sampling` and their state, P recent tokens each.

    `n_sampled` is modulo 2^32: after so many tokens a sequence's random numbers begin again.
    """

    temp: Float[AnyArray, " S"]
    top_k: Int32[AnyArray, " S"]
    top_p: Float[AnyArray, " S"]
    min_p: Float[AnyArray, " S"]
    repeat_penalty: Float[AnyArray, " S"]
    seed: UInt32[AnyArray, " S"]
    n_sampled: UInt32[AnyArray, " S"]
    recent: Int32[AnyArray, "S P"]


def create(sampling: Sampling, recent: list[list[int]], *, n_sampled: int = 0) -> Sampler:
    """A sampler for len(recent) sequences; the last repeat_last_n tokens of each list count.

    It resumes with the random numbers that follow n_sampled tokens sampled elsewhere.
    """
    n = len(recent)
    sampler = create_many([sampling] * n, max(sampling.repeat_last_n, 1))
    for held, tokens in zip(sampler.recent, recent, strict=True):
        tail = tokens[-sampling.repeat_last_n :] if sampling.repeat_last_n else []
        if tail:
            held[-len(tail) :] = tail
    return dataclasses.replace(sampler, n_sampled=np.full(n, n_sampled % 2**32, np.uint32))


def create_many(samplings: Sequence[Sampling], n_recent: int) -> Sampler:
    """A sampler on the host for one sequence of each of `samplings`, with no recent tokens yet."""

    def column(name: str, dtype: type) -> np.ndarray:
        return np.array([getattr(s, name) for s in samplings], dtype)

    return Sampler(
        temp=column("temp", np.float32),
        top_k=column("top_k", np.int32),
        top_p=column("top_p", np.float32),
        min_p=column("min_p", np.float32),
        repeat_penalty=column("repeat_penalty", np.float32),
        seed=column("seed", np.uint32),
        n_sampled=np.zeros(len(samplings), np.uint32),
        recent=np.full((len(samplings), n_recent), -1, np.int32),
    )


def sample_tokens(
    logits: Float[Array, "S V"], sampler: Sampler
) -> tuple[Int32[Array, " S"], Sampler]:
    """The next token of each sequence, and the sampler that has seen it.

    A sequence whose logits have NaN, +inf or no finite value gets `NO_TOKEN`.
    """
    logits = logits.astype(jnp.float32)
    warm, changes = jnp.asarray(sampler.temp) > 0, jnp.asarray(sampler.repeat_penalty) != 1
    plain = ~(jnp.any(warm) | jnp.any(changes))
    tokens = lax.cond(plain, lambda: _greedy(logits), lambda: _limited(logits, warm, sampler))
    recent = jnp.concatenate([sampler.recent[:, 1:], tokens[:, None]], axis=1)
    n_sampled = sampler.n_sampled + np.uint32(1)
    return tokens, dataclasses.replace(sampler, recent=recent, n_sampled=n_sampled)


def can_sample(logits: Float[AnyArray, " V"]) -> bool:
    """On the host, whether a token can be sampled: no NaN, no +inf, and some finite value."""
    x = np.asarray(logits, np.float32)  # sync: what is saved or reported must be sound
    return bool(np.all(x < np.inf) and np.any(np.isfinite(x)))


def log_probs(
    logits: Float[Array, "S V"], n_best: int
) -> tuple[Int32[Array, "S K"], Float[Array, "S K"]]:
    """The n_best most probable tokens and their log-probabilities, before any limit."""
    values, ids = lax.top_k(jax.nn.log_softmax(logits.astype(jnp.float32), axis=1), n_best)
    return ids.astype(jnp.int32), values


def kept(logits: Float[Array, "S V"], sampler: Sampler) -> Bool[Array, "S V"]:
    """Which tokens top-k, then top-p, then min-p leave."""
    keys, every = _sortable(logits), jnp.ones(logits.shape, bool)
    # Each limit is a search over all logits, left out where no sequence has it.
    keep = lax.cond(jnp.any(sampler.top_k > 0), lambda: _top_k(keys, sampler), lambda: every)
    probs = jax.nn.softmax(jnp.where(keep, logits, -jnp.inf), axis=1)
    has_top_p = jnp.any(sampler.top_p < 1)
    keep &= lax.cond(has_top_p, lambda: _top_p(keys, probs, sampler), lambda: every)
    least = sampler.min_p[:, None]
    top = jnp.max(probs, axis=1, keepdims=True)
    return keep & ((probs >= least * top) | (least <= 0))


def _greedy(logits: Array) -> Array:
    """The first greatest logit's token of each sequence, `NO_TOKEN` where there is none."""
    # An argmax with its index is one scalar loop on CPU, ten times as long as these two passes.
    top = jnp.max(logits, axis=1, keepdims=True)
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    # NaN is not at most anything, whether or not the maximum has seen it.
    others = jnp.where(logits <= top, logits.shape[1], NO_TOKEN)
    first = jnp.min(jnp.where(logits == top, ids, others), axis=1)
    return jnp.where(jnp.isfinite(top[:, 0]), first, NO_TOKEN)


def _limited(logits: Array, warm: Array, sampler: Sampler) -> Array:
    """Tokens of sequences of which some have a temperature or a penalty."""
    logits = _penalise(logits, sampler)
    best = _greedy(logits)
    tokens = lax.cond(
        jnp.any(warm), lambda: jnp.where(warm, _random(logits, sampler), best), lambda: best
    )
    return jnp.where(best == NO_TOKEN, NO_TOKEN, tokens)


def _random(logits: Array, sampler: Sampler) -> Array:
    # Random numbers of a sequence follow from its seed and count, not from what is beside it.
    keys = jax.vmap(_key)(sampler.seed, sampler.n_sampled)
    temp = jnp.where(sampler.temp > 0, sampler.temp, 1.0)[:, None]
    left = jnp.where(kept(logits, sampler), logits / temp, -jnp.inf)
    tokens = jax.vmap(lambda k, x: jax.random.categorical(k, x, mode="low"))(keys, left)
    return tokens.astype(jnp.int32)


def _key(seed: AnyArray, n_sampled: AnyArray) -> Array:
    """The key of a token.

    What the process sets for random numbers (JAX_DEFAULT_PRNG_IMPL, JAX_RANDOM_SEED_OFFSET) and
    JAX_HIGH_DYNAMIC_RANGE_GUMBEL above change no token: generator and mode are named, and the words
    are those of `jax.random.key(seed)`.
    """
    words = jnp.stack([jnp.zeros_like(seed), seed])
    return jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), n_sampled)


def _penalise(logits: Array, sampler: Sampler) -> Array:
    n_vocab = logits.shape[1]
    # Unused entries hold -1, which as an index would be the last token: sent out of range instead.
    recent = jnp.where(sampler.recent < 0, n_vocab, sampler.recent)
    seqs = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    seen = jnp.zeros(logits.shape, bool).at[seqs, recent].set(True, mode="drop")
    penalty = sampler.repeat_penalty[:, None]
    lower = jnp.where(logits > 0, logits / penalty, logits * penalty)
    return jnp.where(seen, lower, logits)


def _top_k(keys: Array, sampler: Sampler) -> Array:
    n_vocab = keys.shape[1]
    k = jnp.where(sampler.top_k > 0, sampler.top_k, n_vocab).astype(jnp.float32)
    return keys >= _edge(keys, jnp.ones(keys.shape, jnp.float32), k)[:, None]


def _top_p(keys: Array, probs: Array, sampler: Sampler) -> Array:
    # A nucleus of mass 0 still holds the most probable token.
    mass = jnp.maximum(sampler.top_p, jnp.finfo(jnp.float32).tiny)
    return (keys >= _edge(keys, probs, mass)[:, None]) | (sampler.top_p[:, None] >= 1)


def _sortable(x: Float[Array, "S V"]) -> UInt32[Array, "S V"]:
    """Unsigned integers in the order of the floats."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    top = jnp.uint32(1 << 31)
    return jnp.where(bits >= top, ~bits, bits | top)


def _edge(
    keys: UInt32[Array, "S V"], weights: Float[Array, "S V"], target: Float[Array, " S"]
) -> UInt32[Array, " S"]:
    """The greatest edge such that the weights at or above it reach `target`."""

    def bit(i: Array, edge: Array) -> Array:
        higher = edge | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        mass = jnp.sum(jnp.where(keys >= higher[:, None], weights, 0.0), axis=1)
        return jnp.where(mass >= target, higher, edge)

    return lax.fori_loop(0, 32, bit, jnp.zeros(keys.shape[0], jnp.uint32))


def best_tokens_program(logits: Any, rows: Any, n_best: int) -> Program:
    """The program that gives the n_best most probable tokens of some rows of logits [S, V]."""
    return Program(best_tokens, (min(n_best, logits.shape[1]),), (logits, rows))


def best_tokens(n_best: int, logits: Float[Array, "S V"], rows: Int32[Array, " R"]) -> tuple:
    """Ids and log-probabilities of the n_best most probable tokens of some rows."""
    return log_probs(logits[rows], n_best)
