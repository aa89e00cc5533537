"""What runtimes are put through before they are saved."""

import dataclasses

import numpy as np

from kvrt import CacheConfig, ContextShift, MaskSpec, Runtime, SelfExtend
from tests.toys import HybridLm, ToyLm

WINDOW = MaskSpec(kind="window", size=6)
MODELS = {
    "full": lambda: ToyLm(),
    "full, window": lambda: ToyLm(masks=(MaskSpec(), WINDOW)),
    "full, chunked": lambda: ToyLm(masks=(MaskSpec(), MaskSpec(kind="chunked", size=5))),
    "window": lambda: ToyLm(masks=(WINDOW, WINDOW)),
    "recurrent, full": lambda: HybridLm(),
    "recurrent, window": lambda: HybridLm(mask=WINDOW),
    "recurrent": lambda: HybridLm(attention=False),
}


def tokens(n, seed=0):
    return np.random.default_rng(seed).integers(0, 32, n).tolist()


def open_runtime(model, *, shifts=False, **options):
    sizes = {"n_ctx": 64, "n_seq_max": 3, "block_size": 16, "n_ubatch": 8}
    sizes |= {"type_k": "f32", "type_v": "f32"}
    config = CacheConfig(**{**sizes, **options})
    return Runtime(model, config, policy=ContextShift(n_keep=2) if shifts else None)


def plain(runtime):
    """Forty tokens in a row."""
    runtime.append(tokens(40))


def forked(runtime):
    runtime.append(tokens(20))
    runtime.seq_cp(0, 1)
    runtime.append(tokens(5, seed=1), 1)
    runtime.append(tokens(7, seed=2), 0)


def aged(runtime):
    """As `forked`, in a runtime that has seen almost 2^31 tokens."""
    runtime.append(tokens(20))
    host = runtime._cache.host
    host.history = dataclasses.replace(host.history, n_marks=2**31 - 4)
    runtime.seq_cp(0, 1)
    runtime.append(tokens(5, seed=1), 1)
    runtime.append(tokens(7, seed=2), 0)


def shift(runtime):
    """A hole, and keys whose turn is pending, where the frame has any."""
    runtime.seq_rm(0, 5, 12)
    runtime.seq_add(0, 12, None, -7)
    runtime.seq_rm(0, 0, 2)
    runtime.seq_add(0, 2, None, -2)


def settled_shift(runtime):
    """The same, but nothing is pending."""
    shift(runtime)
    runtime.flush()


def nothing(runtime):
    """Leaves it as it is."""


def dropped(runtime):
    """Longer than the context, which shifts."""
    runtime.append(tokens(150))


EXTEND = SelfExtend(ga_n=2, ga_w=8)
