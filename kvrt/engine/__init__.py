"""The step, the loop, the runtime of one conversation and the engine of many requests."""

from kvrt.cache.stats import DropEvent, Stats
from kvrt.program.mesh import MeshSpec
from kvrt.program.sample import Sampling
from kvrt.runtime.generate import Token
from kvrt.runtime.runtime import Runtime
from kvrt.serving.engine import Engine
from kvrt.serving.offload import TierConfig
from kvrt.serving.request import Output, Request
from kvrt.serving.step_plan import Rules

__all__ = [
    "DropEvent",
    "Engine",
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
