"""What keeps a cache in order: K-shift, context shift, defragmentation."""

from kvrt.upkeep.context_shift import ContextShift

__all__ = ["ContextShift"]
