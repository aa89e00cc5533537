"""What a layer keeps by score: each kv head tokens of its own, within a fixed budget."""

from types import MappingProxyType

from kvrt.attention.scored.head_slots import QuerySums
from kvrt.attention.scored.policy import Observed, Reads, ScoredPolicy, Seen, Tap
from kvrt.policies import POLICIES
from kvrt.policies.policy import Policy
from kvrt.policies.scored.controls import RandomTokens, RecentOnly
from kvrt.policies.scored.duo_attention import DuoAttention
from kvrt.policies.scored.expected_attention import ExpectedAttention
from kvrt.policies.scored.h2o import H2O
from kvrt.policies.scored.keyformer import Keyformer
from kvrt.policies.scored.keys import KeyDiff, KeyNorm
from kvrt.policies.scored.kvzip import KVzip
from kvrt.policies.scored.scissorhands import Scissorhands
from kvrt.policies.scored.snapkv import SnapKV
from kvrt.policies.scored.sparse_window import SparseWindow
from kvrt.policies.scored.tova import TOVA

# By name, as `--policy` says it; the tests of the oracle run over all of them.
SCORED = MappingProxyType(
    {
        "h2o": H2O,
        "snapkv": SnapKV,
        "tova": TOVA,
        "expected_attention": ExpectedAttention,
        "key_norm": KeyNorm,
        "key_diff": KeyDiff,
        "keyformer": Keyformer,
        "scissorhands": Scissorhands,
        "sparse_window": SparseWindow,
        "kvzip": KVzip,
        "recent_only": RecentOnly,
        "random_tokens": RandomTokens,
    }
)

# By positions, or by scores of what each kv head keeps.
AnyPolicy = Policy | ScoredPolicy


def by_position(policy: AnyPolicy | None) -> Policy | None:
    """A policy that drops positions; None for one by score, which drops none."""
    return None if isinstance(policy, ScoredPolicy) else policy


def policy_traits(policy: AnyPolicy | None) -> dict[str, str]:
    """What of a policy does not go with everything, see `kvrt.options.compose`."""
    if policy is None or isinstance(policy, ScoredPolicy):
        return policy.traits if policy else {}
    return {"policy by position": type(policy).__name__}


def policy_name(policy: AnyPolicy) -> str:
    """The name that `--policy` has for a policy, or the name of its class."""
    names = {kind: name for name, kind in (*POLICIES.items(), *SCORED.items())}
    return {**names, DuoAttention: "duo_attention"}.get(type(policy), type(policy).__name__)


__all__ = [
    "H2O",
    "SCORED",
    "TOVA",
    "AnyPolicy",
    "DuoAttention",
    "ExpectedAttention",
    "KVzip",
    "KeyDiff",
    "KeyNorm",
    "Keyformer",
    "Observed",
    "QuerySums",
    "RandomTokens",
    "Reads",
    "RecentOnly",
    "Scissorhands",
    "ScoredPolicy",
    "Seen",
    "SnapKV",
    "SparseWindow",
    "Tap",
    "by_position",
    "policy_name",
    "policy_traits",
]
