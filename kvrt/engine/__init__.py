"""The step, the loop, the runtime of one conversation and the engine of many requests."""

from kvrt.engine.engine import Engine
from kvrt.engine.engine_config import EngineConfig
from kvrt.engine.generate import Token
from kvrt.engine.mesh import MeshSpec
from kvrt.engine.plan import Rules
from kvrt.engine.requests import Output, Request
from kvrt.engine.runtime import Runtime
from kvrt.engine.sample import Sampling
from kvrt.engine.stats import DropEvent, Stats
from kvrt.engine.tiered import TierConfig

__all__ = [
    "DropEvent",
    "Engine",
    "EngineConfig",
    "MeshSpec",
    "Output",
    "Request",
    "Rules",
    "Runtime",
    "Sampling",
    "Stats",
    "TierConfig",
    "Token",
]
