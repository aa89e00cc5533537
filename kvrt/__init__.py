"""A KV-cache runtime for decoder language models in pure JAX.

Names are imported on first use, so that `kvrt --help` does not wait for JAX.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str
    from kvrt.attention import (
        Attend,
        BlockView,
        Decoder,
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
    from kvrt.config import (
        CacheConfig,
        GroupSpec,
        MaskSpec,
        QueryTemperature,
        RecurrentSpec,
        RopeSpec,
        SelfExtend,
    )
    from kvrt.drafts.drafter import DraftContext, Drafter, Speculation
    from kvrt.drafts.layer_skip import LayerSkip
    from kvrt.drafts.prompt_lookup import PromptLookup
    from kvrt.errors import Busy
    from kvrt.policies import AttentionSinks, ContextShift
    from kvrt.program.mesh import MeshSpec
    from kvrt.program.sample import Sampling
    from kvrt.reuse.blend import BlendSpec
    from kvrt.reuse.schema import PlacedModule, PlacedSchema
    from kvrt.runtime.blend import Blended
    from kvrt.runtime.chunks.chunk import CachedChunk, StoredChunk
    from kvrt.runtime.chunks.store import ChunkStore
    from kvrt.runtime.draft_model import DraftModel
    from kvrt.runtime.generate import After, GenerationSpec, Token
    from kvrt.runtime.prompt_cache import PromptCache, Served
    from kvrt.runtime.runtime import Runtime
    from kvrt.select_spec import DoubleSparsity, Indexed, Quest, Select
    from kvrt.serving.beams.spec import BeamSpec
    from kvrt.serving.config import EngineConfig
    from kvrt.serving.engine import Engine
    from kvrt.serving.metrics import CheckpointUse, EngineStats, PoolUse, TierUse
    from kvrt.serving.offload import TierConfig
    from kvrt.serving.outputs import Output
    from kvrt.serving.request import Request
    from kvrt.serving.scheduling.step_plan import Rules
    from kvrt.serving.sessions.folder import SessionDir
    from kvrt.serving.sessions.pins import Pin
    from kvrt.serving.sessions.private_prefix import PrivatePrefix
    from kvrt.state_arrays import StateArray

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
    "ChunkStore": "runtime.chunks.store",
    "LayeredDecoder": "attention",
    "PromptCache": "runtime.prompt_cache",
    "PlacedModule": "reuse.schema",
    "PlacedSchema": "reuse.schema",
    "Served": "runtime.prompt_cache",
    "BlockView": "attention",
    "Busy": "errors",
    "CacheConfig": "config",
    "ContextShift": "policies",
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
    "EngineConfig": "serving.config",
    "EngineStats": "serving.metrics",
    "PoolUse": "serving.metrics",
    "CheckpointUse": "serving.metrics",
    "TierUse": "serving.metrics",
    "MeshSpec": "program.mesh",
    "Output": "serving.outputs",
    "Pin": "serving.sessions.pins",
    "PrivatePrefix": "serving.sessions.private_prefix",
    "Request": "serving.request",
    "Rules": "serving.scheduling.step_plan",
    "TierConfig": "serving.offload",
    "DraftModel": "runtime.draft_model",
    "Runtime": "runtime.runtime",
    "Sampling": "program.sample",
    "SessionDir": "serving.sessions.folder",
    "SelfExtend": "config",
    "Stats": "cache.stats",
    "Token": "runtime.generate",
    "DoubleSparsity": "select_spec",
    "Indexed": "select_spec",
    "Quest": "select_spec",
    "Select": "select_spec",
    "attend": "attention",
}

__all__ = [
    "After",
    "Attend",
    "AttentionChoice",
    "AttentionSinks",
    "BeamSpec",
    "BlendSpec",
    "Blended",
    "BlockView",
    "Busy",
    "CacheConfig",
    "CachedChunk",
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
    "Engine",
    "EngineConfig",
    "EngineStats",
    "GenerationSpec",
    "GroupSpec",
    "Indexed",
    "LayerAttention",
    "LayerKV",
    "LayerSkip",
    "LayeredDecoder",
    "LostCheckpoint",
    "MaskSpec",
    "MeshSpec",
    "Output",
    "Pin",
    "PlacedModule",
    "PlacedSchema",
    "PoolUse",
    "PrivatePrefix",
    "PromptCache",
    "PromptLookup",
    "QueryTemperature",
    "Quest",
    "RecurrentSpec",
    "Request",
    "ResumePositions",
    "RopeSpec",
    "Rules",
    "Runtime",
    "Sampling",
    "Select",
    "SelfExtend",
    "SeqView",
    "Served",
    "SessionDir",
    "ShardedDecoder",
    "Speculation",
    "StateArray",
    "Stats",
    "StoredChunk",
    "TierConfig",
    "TierUse",
    "Token",
    "TokenQKV",
    "attend",
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
    if name not in _HOMES:
        raise AttributeError(f"module 'kvrt' has no attribute {name!r}")
    return getattr(importlib.import_module(f"kvrt.{_HOMES[name]}"), name)
