"""Makes the object of a cell: everything that can be known beforehand is refused here."""

import contextlib
import dataclasses
import functools
from typing import Any
from unittest import mock

from kvrt import CacheConfig, Runtime, SelfExtend
from kvrt.attention import registry
from kvrt.cache import checks
from kvrt.options.engine import EngineConfig
from kvrt.options.select import DoubleSparsity
from kvrt.options.serving import Rules, TierConfig
from kvrt.policies import SCORED as POLICIES
from kvrt.policies import AttentionSinks, ContextShift
from kvrt.program.mesh import MeshSpec
from kvrt.serving.engine import Engine
from tests.interpreted import GPU, TPU
from tests.matrix import reused
from tests.matrix.axes import Cell
from tests.matrix.drafted import speculation_of
from tests.matrix.plaincache import CHANNELS, N_READ, N_RECENT, N_SINK, RUN, SCORED, SIZES
from tests.matrix.plainmodel import N_KV, PlainModel
from tests.one_layer import one_layer_a_program

ATTENTION = {"xla": "chunked", "gpu": GPU, "tpu": TPU, "sparse": "chunked"}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of a cell: keys by channel are quantized from the 129th token of a sequence on.

    n_discard leaves 19 tokens or fewer, more than a window of 9 needs and less than one of 24.
    """

    n_ctx: int = 72
    n_seq: int = 2
    block: int = 8
    n_step: int = 8
    n_window: int = 40
    n_discard: int = 44
    n_keep: int = 4
    n_prompt: int = 40
    n_decode: int = 6


def sizes_of(cell: Cell) -> Sizes:
    # Sparse reads are of blocks of 16.
    small = Sizes(block=16 if cell.attention == "sparse" else 8)
    if cell.state in ("chunks", "modules"):
        # What sinks move of modules is copied, and so is what goes to blocks; in fewer cells a wide
        # window has all.
        many = cell.policy == "attention_sinks" or cell.where == "blocks"
        many |= cell.layers == "full+wide_window"
        small = dataclasses.replace(small, n_seq=3, n_ctx=128 if many else small.n_ctx)
    if cell.dtype.startswith("kivi") and cell.is_engine:
        return _by_channel(cell)
    if cell.dtype.startswith("kivi"):
        small = Sizes(224, 1, 32, 32, 170, 204, n_prompt=160)
        if cell.policy in ("context_shift", "attention_sinks"):
            return dataclasses.replace(small, n_prompt=192, n_decode=36)
        return small
    if cell.is_engine:
        # Of 55 tokens of a request 36 go at once: 19 stay, as above.
        n_ctx = (96 if small.block == 16 else 80) if cell.state == "tiers" else 128
        if cell.state != "plain":  # only what is never dropped can be hit: two blocks
            small = dataclasses.replace(small, n_keep=16, n_window=36)
        else:  # a quarter of it, which goes at once where a K-shift quantizes again, is a chunk
            small = dataclasses.replace(small, n_window=48)
        if cell.decode != "plain":  # two of a request's sequences, and another request
            n_ctx, small = 256, dataclasses.replace(small, n_seq=3)
        return dataclasses.replace(small, n_ctx=n_ctx, n_discard=40 - small.n_keep)
    if cell.policy in ("context_shift", "attention_sinks"):
        return dataclasses.replace(small, n_prompt=56, n_decode=12)
    if cell.speculation != "none":
        return dataclasses.replace(small, n_ctx=max(small.n_ctx, 96))
    if cell.where == "blocks" and cell.attention == "sparse":
        return dataclasses.replace(small, n_ctx=max(small.n_ctx, 80))
    return small


def _by_channel(cell: Cell) -> Sizes:
    """Of an engine whose blocks are 32 tokens, which share scales; a hit is one of them."""
    n_keep, n_seq = 4 if cell.state == "plain" else RUN, 2 if cell.decode == "plain" else 3
    n_ctx = {2: 96 if cell.state == "tiers" else 256, 3: 384}[n_seq]
    sizes = Sizes(n_ctx=n_ctx, n_seq=n_seq, block=RUN, n_keep=n_keep)
    return dataclasses.replace(sizes, n_window=52 - n_keep, n_discard=40 - n_keep)


def policy_of(cell: Cell) -> Any:
    sizes = sizes_of(cell)
    if cell.policy == "context_shift":
        return ContextShift(n_keep=sizes.n_keep, n_discard=sizes.n_discard)
    if cell.policy == "attention_sinks":
        return AttentionSinks(n_sink=sizes.n_keep, n_window=sizes.n_window)
    return None


def scored_of(cell: Cell) -> Any:
    """A policy by score whose slots hold less than a text has."""
    settings = SCORED.get(cell.policy)
    return None if settings is None else POLICIES[cell.policy](**SIZES, **settings)


def extend_of(cell: Cell) -> SelfExtend | None:
    kind = {"extend_cache": "cache", "extend_paper": "paper"}.get(cell.policy)
    # Only what lies before the first round can be hit.
    large = cell.dtype == "kivi4" or cell.attention == "sparse"
    if kind == "cache" and cell.is_engine and cell.state != "plain" and large:
        return SelfExtend(ga_n=2, ga_w=48, kind=kind)
    ga_w = 16 if cell.is_engine and cell.state != "plain" and kind == "cache" else 8
    return SelfExtend(ga_n=2, ga_w=ga_w, kind=kind) if kind else None


def select_of(cell: Cell) -> DoubleSparsity | None:
    """Reads of single cells, fewer than a text has."""
    if cell.attention != "sparse":
        return None
    return DoubleSparsity(
        n_cells=N_READ,
        n_sink=N_SINK,
        n_recent=N_RECENT,
        n_dense=0,
        channels=((CHANNELS,) * N_KV,) * 2,
        by_cell=True,
    )


def config_of(cell: Cell) -> CacheConfig:
    sizes = sizes_of(cell)
    return CacheConfig(
        n_ctx=sizes.n_ctx,
        n_seq_max=sizes.n_seq,
        block_size=sizes.block,
        n_ubatch=sizes.n_step,
        type_k=cell.dtype,
        type_v="f16" if cell.dtype.startswith("kivi") else cell.dtype,
        rope=cell.rope,
        attention=ATTENTION[cell.attention],
        select=select_of(cell),
        self_extend=extend_of(cell),
        defrag_threshold=1.0,
        programs=cell.programs,
        n_checkpoints=8 if _leaves_checkpoints(cell) else 0,
    )


def _leaves_checkpoints(cell: Cell) -> bool:
    """Where they are asked for, or a prompt's windows and states are found at nothing else.

    In cells those are where a request ended, behind what it sampled by sparse reads.
    """
    found = cell.state in ("prefix", "session") and cell.where == "engine_cells"
    return cell.state == "checkpoints" or (found and cell.attention == "sparse")


def options_of(cell: Cell) -> EngineConfig:
    """What an engine is told; a request with a policy outgrows its own context."""
    rules = Rules(n_batch=sizes_of(cell).n_step, n_ctx_seq=56 if policy_of(cell) else None)
    told: dict[str, Any] = {"modules": True} if cell.state == "modules" else {}
    return EngineConfig(
        mode="cell" if cell.where == "engine_cells" else "paged",
        rules=rules,
        prefix_cache=cell.state != "plain",
        shared_reads=cell.decode == "shared",
        speculation=speculation_of(cell),
        tiers=TierConfig(host_bytes=1 << 22, always=True) if cell.state == "tiers" else None,
        **told,
    )


@contextlib.contextmanager
def kernels_of_here():
    """The interpreted kernels count as this platform's, so that they are asked as on their own."""
    with mock.patch.dict(registry._PLATFORMS, {GPU: ("cpu",), TPU: ("cpu",)}):
        yield


@functools.cache
def model_of(layers: str, state: str = "plain") -> PlainModel:
    return PlainModel(layers, has_front=state == "chunks")


def build(cell: Cell) -> Any:
    """A Runtime, or an Engine, of a cell."""
    mesh = MeshSpec(tensor=2, context=2) if cell.devices == "mesh" else None
    model, config = model_of(cell.layers, cell.state), config_of(cell)
    policy = policy_of(cell) or scored_of(cell)
    with kernels_of_here(), one_layer_a_program():
        if cell.is_engine:
            made = Engine(model, config, options_of(cell), mesh=mesh, policy=policy)
            if cell.state == "chunks":
                small = dataclasses.replace(config, n_ctx=128, n_seq_max=2)
                made.private_prefix = reused.private_prefix(
                    Runtime(model, small, policy=scored_of(cell), mesh=mesh)
                )
            if made._steps._reads is not None:
                # Whatever that costs: all of it fits into one pass.
                made._steps._reads.choose = lambda runs, n_blocks, cost: runs[: cost.most]
            return made
        told: dict[str, Any] = {}
        if cell.state in ("tiers", "prefix"):
            told[{"tiers": "tiers", "prefix": "prefix_cache"}[cell.state]] = True
        if cell.decode != "plain":
            told["decode"] = cell.decode
        made = Runtime(model, config, policy=policy, mesh=mesh, **told)
        if (spec := speculation_of(cell)) is not None:
            # As a generation is asked for, before anything runs.
            checks.drafts(spec, made.config, made.programs.spec.layout, model.n_vocab)
        if cell.state == "chunks":
            reused.refuse(made)
        if cell.state == "modules":
            made.modules = reused.modules(made)
    if cell.where == "blocks" and cell.state not in ("chunks", "modules"):
        made.to_blocks(0)
    return made
