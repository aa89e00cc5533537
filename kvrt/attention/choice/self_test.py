"""One small step of attention by a kernel and by XLA, which have to agree.

Keys and values are random, in blocks with holes, of two sequences; what no token may see is NaN,
where its KV dtype has that. A token that decodes, several of different sequences and a prompt's
tokens read them, by the arguments that a model's step gives attention. Positions reach beyond any
window; queries are as long as it takes for scores of two or so, or for a soft cap to matter.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvrt.arrays import Array
from kvrt.attention.api import attend
from kvrt.attention.choice.cases import Case
from kvrt.attention.registry import ANYWHERE
from kvrt.attention.step_attention import step_attention
from kvrt.attention.view import AnyView, BlockView, SeqView
from kvrt.errors import NoKernel
from kvrt.kv_types import any_by_channel
from kvrt.options.cache import CacheConfig
from kvrt.sizes import Extent, StoreSpec, rounded_up
from kvrt.store import kv as kv_store
from kvrt.store.kv import KVStore

# By dtype of the queries, how far outputs and log-sum-exps may lie apart where keys and values are
# about 1: kernels round weights and outputs to a half type, and nothing below float32 otherwise.
LIMITS = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 1e-2}
_MIN_CELLS, _MIN_BLOCKS = 96, 4
_SCORES, _MOST_SCORES = 2.0, 16.0
_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What came of a self-test.

    Attributes:
      passed: the kernel may be used.
      why: why not; of one that passed, how far it was off.
      lasting: it would be the same another time.
      kept: it was found on a disk.
    """

    passed: bool
    why: str
    lasting: bool = True
    kept: bool = False


def run_test(case: Case, kernel: str) -> Verdict:
    """Compares a kernel with XLA in a case, on this process's default device."""
    inputs = _Inputs(case)
    # A program for each case, compiled once: nothing else ever asks for it again.
    both = jax.jit(functools.partial(_both, case, kernel))
    try:
        found = jax.device_get(both(inputs.views, inputs.tokens, inputs.cached))
    except NoKernel as error:
        return Verdict(passed=False, why=f"does not serve {case}: {_first(error)}")
    except Exception as error:  # whatever a compiler or a driver says of it, XLA is left
        why = f"failed its self-test at {case}: {type(error).__name__}: {_first(error)}"
        return Verdict(passed=False, why=why, lasting=_OUT_OF_MEMORY not in str(error))
    return _compared(case, found)


def check_served(case: Case, kernel: str) -> None:
    """Refuses a kernel that cannot serve a case, which tracing it tells.

    Raises:
      NoKernel: it cannot.
    """
    inputs = _Inputs(case)
    both = functools.partial(_both, case, kernel)
    jax.eval_shape(both, inputs.views, inputs.tokens, inputs.cached)


def _compared(case: Case, found: dict[str, Any]) -> Verdict:
    """The verdict on outputs and log-sum-exps of a kernel and of XLA, by what was read."""
    limit = LIMITS[case.dtype]
    worst = {
        name: max(_difference(*pair) for pair in zip(*sides, strict=True))
        for name, sides in found.items()
    }
    name = max(worst, key=lambda x: worst[x])
    said = f"largest difference {worst[name]:.1g}, limit {limit:g}"
    if worst[name] <= limit:
        return Verdict(passed=True, why=said)
    return Verdict(passed=False, why=f"failed its self-test at {case}, {name}: {said}")


def _difference(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference; infinite where a value is not finite."""
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    return float(np.max(np.abs(a - b))) if np.isfinite(a).all() and np.isfinite(b).all() else np.inf


def _first(error: Exception) -> str:
    """What an error says, without its remedy: nobody has asked for the kernel."""
    return str(error).partition("\n")[0].partition("; ")[0]


def _both(
    case: Case, kernel: str, views: dict[str, AnyView], tokens: dict[str, tuple], cached: tuple
) -> dict[str, Any]:
    """Output and log-sum-exp of the kernel and of XLA, by view."""
    store, found = _store(case, *cached), {}
    for name, view in views.items():
        by_kernel = _attended(case, kernel, store, view, tokens[name])
        # What XLA would round to bfloat16 or TF32 on its own stays float32 here.
        with jax.default_matmul_precision("highest"):
            found[name] = by_kernel, _attended(case, ANYWHERE, store, view, tokens[name])
    return found


def _store(case: Case, keys: Array, values: Array) -> KVStore:
    """The keys and values of one layer, in their KV dtypes."""
    n_cells = keys.shape[0]
    spec = StoreSpec(
        n_buffers=1,
        n_kv_heads=case.group.n_kv_heads,
        head_dim=case.group.dim_k,
        head_dim_v=case.group.dim_v,
        extent=Extent(n_cells=n_cells, block_size=case.block_size),
        type_k=case.type_k,
        type_v=case.type_v,
    )
    slots = jnp.arange(n_cells, dtype=jnp.int32)
    return kv_store.write_kv(kv_store.create(spec), slots, [keys], [values])


def _attended(
    case: Case, implementation: str, store: KVStore, view: AnyView, tokens: tuple
) -> tuple[Array, Array]:
    """Attention as a layer of a model's step has it."""
    config = CacheConfig(
        n_ctx=view.cell_pos.size,
        block_size=case.block_size,
        type_k=case.type_k,
        type_v=case.type_v,
        hadamard=case.hadamard,
        rope=case.rope,
        attention=implementation,
        self_extend=case.self_extend,
    )
    attention = step_attention([store], [[view]], [case.group], config, {}, None)
    here = attention.layers[0]
    return attend(*attention.arguments(here, here.parts[0], *tokens))


class _Inputs:
    """What a case's step reads: views by what they stand for, tokens for each, cached values."""

    def __init__(self, case: Case):
        """The same numbers for a case every time."""
        self._case, self._rng = case, np.random.default_rng(0)
        b = case.block_size
        self._n_blocks = rounded_up(max(_MIN_BLOCKS, -(-_MIN_CELLS // b)))
        self._cells()
        self.views = self._views()
        self.tokens = {name: self._tokens(view.n_tokens) for name, view in self.views.items()}
        shape, group = (self._pos.size, case.group.n_kv_heads), case.group
        empty = (self._pos < 0).reshape(-1, 1, 1)
        # Keys by channel share scales with the empty cells beside them, which hold what was there.
        nothing = (0 if any_by_channel(case.type_k) else np.nan), np.nan
        self.cached = tuple(
            np.where(empty, np.float32(fill), self._normal((*shape, dim)))
            for dim, fill in zip((group.dim_k, group.dim_v), nothing, strict=True)
        )

    def _cells(self) -> None:
        """Positions in any order, a fifth of the cells empty; cells of one sequence, or of two."""
        case, n, rng = self._case, self._n_blocks * self._case.block_size, self._rng
        reach = max(case.group.mask.size, case.self_extend.ga_w if case.self_extend else 0)
        stride = max(1, -(-3 * reach // n))
        pos = rng.permutation(n) * stride
        sinks = pos < case.group.mask.n_sink
        used = sinks | (rng.random(n) < 0.8)
        pos = np.where(used, pos, -1).astype(np.int32)
        seqs = np.zeros((n, case.n_words), np.uint32)
        seqs[:, -1] = np.where(used, np.where(sinks, 3, rng.integers(1, 4, n)), 0)
        shape = (self._n_blocks, case.block_size)
        self._pos, self._seqs = pos.reshape(shape), seqs.reshape(*shape, case.n_words)
        self._end = n * stride

    def _views(self) -> dict[str, AnyView]:
        end, n, rng = self._end, self._n_blocks, self._rng
        one, each = np.array([end], np.int32), np.array([end, end // 2, end, -1], np.int32)
        lists = np.stack([rng.permutation(n) for _ in each]).astype(np.int32)
        listed = rng.permutation(n).astype(np.int32)
        every = np.asarray(n, np.int32)
        lengths = np.array([n, n - 1, 1, 0], np.int32)
        found: dict[str, AnyView] = {
            "decode": BlockView(blocks=listed, n_blocks=every, **self._seen(one)),
            "decode of several": SeqView(blocks=lists, n_blocks=lengths, **self._seen(each)),
        }
        if (n_prompt := self._case.n_prompt) > 1:
            pos = np.arange(end, end + n_prompt, dtype=np.int32)
            pos[-1] = -1
            found["prefill"] = BlockView(blocks=listed, n_blocks=every, **self._seen(pos))
        return found

    def _seen(self, pos: np.ndarray) -> dict[str, Any]:
        """What all kinds of view have; tokens of padding have no owner."""
        bits = np.zeros((len(pos), self._case.n_words), np.uint32)
        # A prompt is of one sequence; tokens that decode together are of both.
        owners = 1 + np.arange(len(pos)) % 2 if len(pos) == 4 else np.ones(len(pos))
        bits[:, -1] = np.where(pos < 0, 0, owners)
        own = np.asarray(True) if self._case.divided else None
        return dict(pos=pos, bits=bits, cell_pos=self._pos, cell_seqs=self._seqs, own=own)

    def _tokens(self, n: int) -> tuple[Array, Array, Array, Array | None]:
        """Queries, keys, values and sinks."""
        case = self._case
        group, dtype = case.group, jnp.dtype(case.dtype)
        cap = group.soft_cap
        wanted = _SCORES if cap is None else min(max(_SCORES, cap / 4), _MOST_SCORES)
        length = wanted / (math.sqrt(group.head_dim) * abs(group.score_scale) or 1.0)
        q = self._normal((n, case.n_q_heads, group.head_dim)) * np.float32(length)
        k, v = (self._normal((n, group.n_kv_heads, group.head_dim)) for _ in "kv")
        v = k[:, :, : group.latent_rank] if group.latent_rank else v
        sinks = jnp.asarray(self._normal((case.n_q_heads,))) if case.sinks else None
        q, k, v = (jnp.asarray(x).astype(dtype) for x in (q, k, v))
        return q, k, v, sinks

    def _normal(self, shape: tuple[int, ...]) -> np.ndarray:
        return self._rng.standard_normal(shape, np.float32)
