"""The step, the loop and the runtime."""

from kvrt.engine.generate import Token
from kvrt.engine.runtime import Runtime
from kvrt.engine.sample import Sampling
from kvrt.engine.stats import DropEvent, Stats

__all__ = ["DropEvent", "Runtime", "Sampling", "Stats", "Token"]
