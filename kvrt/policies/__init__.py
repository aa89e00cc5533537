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
    from kvrt.policies.scored import SCORED, Observed, QuerySums, Reads, ScoredPolicy, Seen, Tap

    # By positions, or by scores of what each kv head keeps.
    AnyPolicy = Policy | ScoredPolicy

# By name, as `--policy` says it; the contract test runs over all of them.
POLICIES = MappingProxyType({"context_shift": ContextShift, "attention_sinks": AttentionSinks})

_HOMES = {
    "DropSchedule": "drops",
    **dict.fromkeys(("Due", "Schedule", "SeqCounts"), "schedule"),
    **dict.fromkeys(
        ("SCORED", "Observed", "QuerySums", "Reads", "ScoredPolicy", "Seen", "Tap"), "scored"
    ),
}


def by_position(policy: "AnyPolicy | None") -> Policy | None:
    """A policy that drops positions; None for one by score, which drops none."""
    from kvrt.policies.scored import ScoredPolicy

    return None if isinstance(policy, ScoredPolicy) else policy


def policy_name(policy: "AnyPolicy") -> str:
    """The name that `--policy` has for a policy, or the name of its class."""
    from kvrt.policies.scored import SCORED, DuoAttention

    names = {kind: name for name, kind in (*POLICIES.items(), *SCORED.items())}
    return {**names, DuoAttention: "duo_attention"}.get(type(policy), type(policy).__name__)


def __getattr__(name: str) -> object:
    """Imports a name, or refuses one that has a successor."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"kvrt.policies.{_HOMES[name]}"), name)
    if name == "AnyPolicy":
        return Policy | importlib.import_module("kvrt.policies.scored").ScoredPolicy
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
]
