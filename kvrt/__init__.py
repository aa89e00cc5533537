"""A KV-cache runtime for decoder language models in pure JAX.

Names are imported on first use, so that `kvrt --help` does not wait for JAX.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str
    from kvrt import errors, policies, session
    from kvrt.attention import (
        Attend,
        BlockView,
        Decoder,
        KindedDecoder,
        LayerAttention,
        LayeredDecoder,
        LayerKV,
        SeqView,
        ShardedDecoder,
        TokenQKV,
        attend,
    )
    from kvrt.attention.choice import AttentionChoice
    from kvrt.cache.stats import DropEvent, LostCheckpoint, Stats
    from kvrt.cellcache.checkpoint.resume import ResumePositions
    from kvrt.cells import Cells
    from kvrt.config import GroupSpec, Indexed, MaskSpec, QueryTemperature, RecurrentSpec, RopeSpec
    from kvrt.drafts.drafter import DraftContext, Drafter, Speculation
    from kvrt.drafts.layer_skip import LayerSkip
    from kvrt.drafts.prompt_lookup import PromptLookup
    from kvrt.errors import (
        BadConfig,
        BadLogits,
        BadModelFile,
        BadRange,
        BadRequest,
        BadSequence,
        BadSession,
        BadToken,
        Busy,
        CacheFull,
        CannotRewind,
        FetchError,
        KvrtError,
        NoKernel,
        SaveError,
        SessionMismatch,
        SharedCells,
        UnsupportedModel,
        UsageError,
    )
    from kvrt.options.cache import CacheConfig, SelfExtend
    from kvrt.options.engine import EngineConfig, SessionDir
    from kvrt.options.sampling import Sampling
    from kvrt.options.select import DoubleSparsity, Quest, Select
    from kvrt.options.serving import Rules, TierConfig
    from kvrt.policies import AttentionSinks, ContextShift, Policy, ScoredPolicy
    from kvrt.policies.scored import (
        H2O,
        TOVA,
        DuoAttention,
        ExpectedAttention,
        KeyDiff,
        Keyformer,
        KeyNorm,
        KVzip,
        Scissorhands,
        SnapKV,
        SparseWindow,
    )
    from kvrt.program.disk_hits import keep_programs
    from kvrt.program.mesh import MeshSpec
    from kvrt.reuse.blend import BlendSpec
    from kvrt.reuse.plan import KeptChunk, ReusePlan
    from kvrt.reuse.reasons import Reason, Recomputed
    from kvrt.reuse.schema import PlacedModule, PlacedSchema
    from kvrt.runtime.blend import Blended
    from kvrt.runtime.chunks.chunk import CachedChunk, StoredChunk
    from kvrt.runtime.chunks.store import ChunkStore
    from kvrt.runtime.draft_model import DraftModel
    from kvrt.runtime.generate import After, GenerationSpec, Token
    from kvrt.runtime.prompt_cache import PromptCache, Served
    from kvrt.runtime.runtime import Runtime
    from kvrt.runtime.session_file import Restored, SessionFile, Way
    from kvrt.serving.beams.spec import BeamSpec
    from kvrt.serving.engine import Engine
    from kvrt.serving.metrics import CheckpointUse, EngineStats, PoolUse, TierUse
    from kvrt.serving.outputs import Output
    from kvrt.serving.request import Request
    from kvrt.serving.sessions.pins import Pin
    from kvrt.serving.sessions.private_prefix import PrivatePrefix
    from kvrt.state_arrays import StateArray
    from kvrt_models.load import load

_HOMES = {
    "After": "runtime.generate",
    "Cells": "cells",
    "GenerationSpec": "runtime.generate",
    "QueryTemperature": "config",
    "Attend": "attention",
    "AttentionChoice": "attention.choice",
    "AttentionSinks": "policies",
    "BeamSpec": "serving.beams.spec",
    "BlendSpec": "reuse.blend",
    "Blended": "runtime.blend",
    "CachedChunk": "runtime.chunks.chunk",
    "StoredChunk": "runtime.chunks.chunk",
    "SessionFile": "runtime.session_file",
    "Restored": "runtime.session_file",
    "Way": "runtime.session_file",
    "KeptChunk": "reuse.plan",
    "ReusePlan": "reuse.plan",
    "Reason": "reuse.reasons",
    "Recomputed": "reuse.reasons",
    "ChunkStore": "runtime.chunks.store",
    "KindedDecoder": "attention",
    "LayeredDecoder": "attention",
    "PromptCache": "runtime.prompt_cache",
    "PlacedModule": "reuse.schema",
    "PlacedSchema": "reuse.schema",
    "Served": "runtime.prompt_cache",
    "BlockView": "attention",
    "BadConfig": "errors",
    "BadLogits": "errors",
    "BadModelFile": "errors",
    "BadRange": "errors",
    "BadRequest": "errors",
    "BadSequence": "errors",
    "BadSession": "errors",
    "BadToken": "errors",
    "Busy": "errors",
    "CacheFull": "errors",
    "CannotRewind": "errors",
    "FetchError": "errors",
    "KvrtError": "errors",
    "NoKernel": "errors",
    "SaveError": "errors",
    "SessionMismatch": "errors",
    "SharedCells": "errors",
    "UnsupportedModel": "errors",
    "UsageError": "errors",
    "CacheConfig": "options.cache",
    "ContextShift": "policies",
    "Policy": "policies",
    "ScoredPolicy": "policies",
    "DuoAttention": "policies.scored",
    "ExpectedAttention": "policies.scored",
    "H2O": "policies.scored",
    "KVzip": "policies.scored",
    "KeyDiff": "policies.scored",
    "KeyNorm": "policies.scored",
    "Keyformer": "policies.scored",
    "Scissorhands": "policies.scored",
    "SnapKV": "policies.scored",
    "SparseWindow": "policies.scored",
    "TOVA": "policies.scored",
    "keep_programs": "program.disk_hits",
    "Decoder": "attention",
    "DraftContext": "drafts.drafter",
    "Drafter": "drafts.drafter",
    "DropEvent": "cache.stats",
    "LayerSkip": "drafts.layer_skip",
    "PromptLookup": "drafts.prompt_lookup",
    "Speculation": "drafts.drafter",
    "LostCheckpoint": "cache.stats",
    "ResumePositions": "cellcache.checkpoint.resume",
    "LayerAttention": "attention",
    "LayerKV": "attention",
    "SeqView": "attention",
    "ShardedDecoder": "attention",
    "TokenQKV": "attention",
    "GroupSpec": "config",
    "MaskSpec": "config",
    "RecurrentSpec": "config",
    "StateArray": "state_arrays",
    "RopeSpec": "config",
    "Engine": "serving.engine",
    "EngineConfig": "options.engine",
    "EngineStats": "serving.metrics",
    "PoolUse": "serving.metrics",
    "CheckpointUse": "serving.metrics",
    "TierUse": "serving.metrics",
    "MeshSpec": "program.mesh",
    "Output": "serving.outputs",
    "Pin": "serving.sessions.pins",
    "PrivatePrefix": "serving.sessions.private_prefix",
    "Request": "serving.request",
    "Rules": "options.serving",
    "TierConfig": "options.serving",
    "DraftModel": "runtime.draft_model",
    "Runtime": "runtime.runtime",
    "Sampling": "options.sampling",
    "SessionDir": "options.engine",
    "SelfExtend": "options.cache",
    "Stats": "cache.stats",
    "Token": "runtime.generate",
    "DoubleSparsity": "options.select",
    "Indexed": "config",
    "Quest": "options.select",
    "Select": "options.select",
    "attend": "attention",
}

# Rooms with public names of their own.
_ROOMS = ("errors", "policies", "session")

__all__ = [
    "H2O",
    "TOVA",
    "After",
    "Attend",
    "AttentionChoice",
    "AttentionSinks",
    "BadConfig",
    "BadLogits",
    "BadModelFile",
    "BadRange",
    "BadRequest",
    "BadSequence",
    "BadSession",
    "BadToken",
    "BeamSpec",
    "BlendSpec",
    "Blended",
    "BlockView",
    "Busy",
    "CacheConfig",
    "CacheFull",
    "CachedChunk",
    "CannotRewind",
    "Cells",
    "CheckpointUse",
    "ChunkStore",
    "ContextShift",
    "Decoder",
    "DoubleSparsity",
    "DraftContext",
    "DraftModel",
    "Drafter",
    "DropEvent",
    "DuoAttention",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "ExpectedAttention",
    "FetchError",
    "GenerationSpec",
    "GroupSpec",
    "Indexed",
    "KVzip",
    "KeptChunk",
    "KeyDiff",
    "KeyNorm",
    "Keyformer",
    "KindedDecoder",
    "KvrtError",
    "LayerAttention",
    "LayerKV",
    "LayerSkip",
    "LayeredDecoder",
    "LostCheckpoint",
    "MaskSpec",
    "MeshSpec",
    "NoKernel",
    "Output",
    "Pin",
    "PlacedModule",
    "PlacedSchema",
    "Policy",
    "PoolUse",
    "PrivatePrefix",
    "PromptCache",
    "PromptLookup",
    "QueryTemperature",
    "Quest",
    "Reason",
    "Recomputed",
    "RecurrentSpec",
    "Request",
    "Restored",
    "ResumePositions",
    "ReusePlan",
    "RopeSpec",
    "Rules",
    "Runtime",
    "Sampling",
    "SaveError",
    "Scissorhands",
    "ScoredPolicy",
    "Select",
    "SelfExtend",
    "SeqView",
    "Served",
    "SessionDir",
    "SessionFile",
    "SessionMismatch",
    "ShardedDecoder",
    "SharedCells",
    "SnapKV",
    "SparseWindow",
    "Speculation",
    "StateArray",
    "Stats",
    "StoredChunk",
    "TierConfig",
    "TierUse",
    "Token",
    "TokenQKV",
    "UnsupportedModel",
    "UsageError",
    "Way",
    "attend",
    "errors",
    "keep_programs",
    "load",
    "policies",
    "session",
    "version",
]


def version() -> str:
    """The version that is installed."""
    import importlib.metadata  # late: until it is imported a signal is a traceback

    try:
        return importlib.metadata.version("kvrt")
    except importlib.metadata.PackageNotFoundError:
        return "from source, not installed"


def __getattr__(name: str):
    if name == "__version__":
        return version()
    if name == "load":
        # The one name of `kvrt_models` here; nothing else in kvrt but the command imports that.
        return importlib.import_module("kvrt_models.load").load
    if name in _ROOMS:
        return importlib.import_module(f"kvrt.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'kvrt' has no attribute {name!r}")
    return getattr(importlib.import_module(f"kvrt.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
