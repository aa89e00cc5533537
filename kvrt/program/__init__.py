"""What is compiled: the step, the decode loop, sampling, and the programs made of them.

Names are imported on first use. A loop of one's own takes `forward` or `decode_many`, what they
are given, and a `StepSpec`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvrt.attention.scored.layers import ScoredGroup
    from kvrt.attention.scored.spec import SlotSpec
    from kvrt.cells.slots import Places, SeqBlocks
    from kvrt.program.batch import Batch
    from kvrt.program.decode_loop import LoopPlan, Sampled, decode_many
    from kvrt.program.layout import Layout, cell_layout
    from kvrt.program.mesh import Placement
    from kvrt.program.programs import Program, ProgramKey, Programs
    from kvrt.program.sample import Sampler, sample_tokens
    from kvrt.program.step import Cache, StepSpec, create, forward
    from kvrt.sizes import Extent, StoreSpec
    from kvrt.store.kv import KVStore
    from kvrt.store.quantized import Quantized
    from kvrt.store.recurrent import StateIndex, StateStore
    from kvrt.store.shards import Shards

_HOMES = {
    "Batch": "program.batch",
    "Cache": "program.step",
    "Extent": "sizes",
    "KVStore": "store.kv",
    "Layout": "program.layout",
    "LoopPlan": "program.decode_loop",
    "Placement": "program.mesh",
    "Places": "cells.slots",
    "Program": "program.programs",
    "ProgramKey": "program.programs",
    "Programs": "program.programs",
    "Quantized": "store.quantized",
    "Sampled": "program.decode_loop",
    "Sampler": "program.sample",
    "ScoredGroup": "attention.scored.layers",
    "SeqBlocks": "cells.slots",
    "SlotSpec": "attention.scored.spec",
    "Shards": "store.shards",
    "StateIndex": "store.recurrent",
    "StateStore": "store.recurrent",
    "StepSpec": "program.step",
    "StoreSpec": "sizes",
    "cell_layout": "program.layout",
    "create": "program.step",
    "decode_many": "program.decode_loop",
    "forward": "program.step",
    "sample_tokens": "program.sample",
}

__all__ = [
    "Batch",
    "Cache",
    "Extent",
    "KVStore",
    "Layout",
    "LoopPlan",
    "Placement",
    "Places",
    "Program",
    "ProgramKey",
    "Programs",
    "Quantized",
    "Sampled",
    "Sampler",
    "ScoredGroup",
    "SeqBlocks",
    "Shards",
    "SlotSpec",
    "StateIndex",
    "StateStore",
    "StepSpec",
    "StoreSpec",
    "cell_layout",
    "create",
    "decode_many",
    "forward",
    "sample_tokens",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvrt.program' has no attribute {name!r}")
    return getattr(importlib.import_module(f"kvrt.{_HOMES[name]}"), name)
