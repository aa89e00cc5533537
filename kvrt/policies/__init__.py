"""What a sequence keeps when it grows beyond its room."""

from types import MappingProxyType

from kvrt.policies.attention_sinks import AttentionSinks
from kvrt.policies.context_shift import ContextShift
from kvrt.policies.drops import DropSchedule
from kvrt.policies.policy import Drop, Policy
from kvrt.policies.schedule import Due, Schedule, SeqCounts
from kvrt.policies.scored import (
    SCORED,
    DuoAttention,
    Observed,
    QuerySums,
    Reads,
    ScoredPolicy,
    Seen,
    Tap,
)

# By name, as `kvrt batch --policy` says it; the contract test runs over all of them.
POLICIES = MappingProxyType({"context_shift": ContextShift, "attention_sinks": AttentionSinks})

# By positions, or by scores of what each kv head keeps.
AnyPolicy = Policy | ScoredPolicy


def by_position(policy: AnyPolicy | None) -> Policy | None:
    """A policy that drops positions; None for one by score, which drops none."""
    return None if isinstance(policy, ScoredPolicy) else policy


def policy_name(policy: AnyPolicy) -> str:
    """The name that `--policy` has for a policy, or the name of its class."""
    names = {kind: name for name, kind in (*POLICIES.items(), *SCORED.items())}
    return {**names, DuoAttention: "duo_attention"}.get(type(policy), type(policy).__name__)


def __getattr__(name: str) -> object:
    """Refuses names that have a successor; what is imported says so as well."""
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
