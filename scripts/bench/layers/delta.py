"""The gated delta rule in a prompt: in chunks, as `attend.recur` runs it, against step by step.

    python -m scripts.bench.layers.delta
    python -m scripts.bench.layers.delta --n_tokens 256 --n_heads 8 --by_channel

One layer's recurrence over random tokens, in the sizes of Qwen3-Next by default; states and inputs
are on the device, nothing else of a model runs.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from kvrt.arrays import Array
from kvrt.program import StateIndex
from kvrt.store import recurrent
from kvrt_models.layers.delta.chunk import CHUNK, CHUNK_BY_CHANNEL, delta_chunk
from kvrt_models.layers.delta.step import delta_step
from scripts._lib import commands, measure, rounds

_N_TOKENS = flags.DEFINE_integer("n_tokens", 1024, "Tokens of the prompt.", lower_bound=1)
_N_HEADS = flags.DEFINE_integer("n_heads", 32, "Heads.", lower_bound=1)
_DIM = flags.DEFINE_integer("dim", 128, "Channels of keys and of values.", lower_bound=1)
_BY_CHANNEL = flags.DEFINE_bool("by_channel", False, "A decay for each channel of the keys.")
_CHUNK = flags.DEFINE_integer("chunk", None, "Tokens of a chunk; as models have it by default.")
_N_RUNS = flags.DEFINE_integer("n_runs", 31, "Timed runs of each form.", lower_bound=1)
_SEED = 0


def inputs(n: int, n_heads: int, dim: int, *, by_channel: bool) -> tuple[Array, ...]:
    """Queries, keys, values, logarithms of decays, and what is written, by token."""
    rng = np.random.default_rng(_SEED)
    q, k, v = rng.standard_normal((3, n, n_heads, dim), np.float32) / np.sqrt(dim)
    g = -np.exp(rng.uniform(-4, 1, (n, n_heads, dim) if by_channel else (n, n_heads)))
    beta = rng.uniform(0, 1, (n, n_heads))
    return tuple(jnp.asarray(x, jnp.float32) for x in (q, k, v, g, beta))


def step(state: tuple[Array, ...], row: tuple[Array, ...]) -> tuple[tuple[Array, ...], Array]:
    """The rule as `attend.recur` takes it."""
    q, k, v, g, beta = row
    s, out = delta_step(state[0], (q, k, v), g, beta)
    return (s,), out


def chunk(
    state: tuple[Array, ...], rows: tuple[Array, ...], n: Array
) -> tuple[tuple[Array, ...], Array]:
    """The same of many tokens."""
    q, k, v, g, beta = rows
    s, out = delta_chunk(state[0], (q, k, v), g, beta, n)
    return (s,), out


def main() -> None:
    n, n_heads, dim = _N_TOKENS.value, _N_HEADS.value, _DIM.value
    size = _CHUNK.value or (CHUNK_BY_CHANNEL if _BY_CHANNEL.value else CHUNK)
    given = inputs(n, n_heads, dim, by_channel=_BY_CHANNEL.value)
    at = StateIndex(src=np.zeros(n, np.int32), dst=np.zeros(n, np.int32))
    forms: dict[str, Callable] = {
        "steps": functools.partial(recurrent.advance, at=at, step=step),
        "chunks": functools.partial(recurrent.advance_chunks, at=at, step=step, form=(chunk, size)),
    }
    outputs: dict[str, Array] = {}

    def side(name: str, form: Callable) -> rounds.Side:
        run = jax.jit(lambda tables, rows: form(tables, inputs=rows), donate_argnums=0)
        tables = (jnp.zeros((1, n_heads, dim, dim)),)

        def once() -> Array:
            nonlocal tables
            tables, out = run(tables, given)
            outputs.setdefault(name, out)
            return out

        return rounds.timed(once)

    sides = {name: side(name, form) for name, form in forms.items()}
    times = rounds.interleaved(sides, _N_RUNS.value)
    for name in times:
        measure.emit("delta", form=name, n_tokens=n, ms=times.ms(name))
    worst = float(jnp.max(jnp.abs(outputs["steps"] - outputs["chunks"])))
    ratio = times.over("steps", "chunks", digits=2)
    measure.emit("delta", n_heads=n_heads, dim=dim, chunk=size, ratio=ratio, worst=worst)


if __name__ == "__main__":
    commands.run(main)
