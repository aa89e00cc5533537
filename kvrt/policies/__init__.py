"""What a sequence keeps when it grows beyond its room; names are imported on first use.

So flags know the settings of a policy by position without JAX.
"""

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING

from kvrt.policies.attention_sinks import AttentionSinks
from kvrt.policies.context_shift import ContextShift
from kvrt.policies.policy import Drop, Policy

if TYPE_CHECKING:
    from kvrt.policies.drops import DropSchedule
    from kvrt.policies.schedule import Due, Schedule, SeqCounts
    from kvrt.policies.scored import (
        SCORED,
        AnyPolicy,
        Observed,
        QuerySums,
        Reads,
        ScoredPolicy,
        Seen,
        Tap,
        by_position,
        policy_name,
        policy_traits,
    )

# By name, as `--policy` says it; the contract test runs over all of them.
POLICIES = MappingProxyType({"context_shift": ContextShift, "attention_sinks": AttentionSinks})

_HOMES = {
    "DropSchedule": "drops",
    **dict.fromkeys(("Due", "Schedule", "SeqCounts"), "schedule"),
    **dict.fromkeys(
        (
            *("SCORED", "AnyPolicy", "Observed", "QuerySums", "Reads", "ScoredPolicy", "Seen"),
            *("Tap", "by_position", "policy_name", "policy_traits"),
        ),
        "scored",
    ),
}


def __getattr__(name: str) -> object:
    """Imports a name, or refuses one that has a successor."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"kvrt.policies.{_HOMES[name]}"), name)
    if now := {"PolicyContext": "DropSchedule", "Advance": "Due"}.get(name):
        raise ImportError(f"kvrt.policies.{name} is {now} since 2026-11-26; see Schedule.due")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "POLICIES",
    "SCORED",
    "AnyPolicy",
    "AttentionSinks",
    "ContextShift",
    "Drop",
    "DropSchedule",
    "Due",
    "Observed",
    "Policy",
    "QuerySums",
    "Reads",
    "Schedule",
    "ScoredPolicy",
    "Seen",
    "SeqCounts",
    "Tap",
    "by_position",
    "policy_name",
    "policy_traits",
]
