"""The flags of what goes when a context is full, and how far it reaches."""

import functools
from typing import Annotated, Literal, get_args

from msgspec import Meta

from kvrt.errors import UsageError
from kvrt.options.option import Options, flag, flag_group, flags_of, flags_of_config
from kvrt.options.policies import BY_SCORE, OF_SIZES, ScoredName
from kvrt.policies import POLICIES

DropName = Literal["none", "context_shift", "attention_sinks"]
PolicyName = Literal[DropName, ScoredName]
BY_POSITION = get_args(DropName)
_DROPS = f"{' or '.join(BY_POSITION)}, for one by score is that of all requests, --policy,"
_LineDrop = Annotated[DropName, Meta(extra={"wanted": _DROPS})]
# By what has settings: the policies that they are of.
_SETTINGS = {**{kind: (name,) for name, kind in POLICIES.items()}, **OF_SIZES}
# The policies that a flag is of.
_OF = {x.name: of for kind, of in _SETTINGS.items() for x in flags_of(kind)}
_OF["n_sink"] += BY_SCORE
_context = functools.partial(flag, "Context")
_policy = functools.partial(flag, "Context", advanced=True)


@flag_group
class KeepFlags(*map(flags_of_config, reversed(_SETTINGS))):
    """What of a text stays when older tokens go: the settings of all policies."""

    @property
    def policy_name(self) -> PolicyName:
        """The policy that is meant."""
        raise NotImplementedError  # of the groups of flags with a --policy

    @property
    def policy_elsewhere(self) -> bool:
        """Whether a session, or a line of requests, may say the policy."""
        return False

    def check(self) -> None:
        """Refuses flags of another policy, and heads that stream without a file of them."""
        super().check()
        if self.policy_name == "duo_attention" and self.streaming_heads is None:
            raise UsageError(
                "--policy duo_attention wants to know which heads stream; add --streaming_heads "
                "FILE, which scripts/streaming_heads.py writes"
            )
        for name, policies in _OF.items():
            if (
                name in self.given - {"keep"}
                and self.policy_name not in policies
                and not self.policy_elsewhere
            ):
                some = " or ".join(policies[:2]) + (" or another of them" if policies[2:] else "")
                raise UsageError(
                    f"--{name} says nothing with --policy {self.policy_name}; add --policy {some}"
                )
        if "refresh_every" in self.given and not self.n_read:
            raise UsageError("--refresh_every is of --n_read; add --n_read N")

    def window(self, n_ctx: int) -> int:
        """Newest tokens that attention sinks keep in a context; a policy's window is at least 2."""
        return self.n_window or max(n_ctx - self.n_sink, 2)


@flag_group
class RunPolicyFlags(KeepFlags):
    """What a run keeps that goes on beyond its context."""

    context_shift: bool = _context(True, "drop older tokens when the context is full, and continue")
    policy: PolicyName | None = _context(
        None,
        "what a full context drops: context_shift (the default) half of what --keep leaves, "
        "attention_sinks all but --n_sink first and --n_window last tokens, none ends there; "
        "others keep --policy_budget tokens a kv head by score, from the start; if not given, a "
        "session's",
        "NAME",
    )

    @property
    def policy_name(self) -> PolicyName:
        """The policy that is meant."""
        return self.policy or ("context_shift" if self.context_shift else "none")

    def check(self) -> None:
        """Refuses two policies at once."""
        super().check()
        if self.policy not in (None, "none") and not self.context_shift:
            raise UsageError(f"--policy {self.policy} drops tokens, --nocontext_shift drops none")


@flag_group
class BatchPolicyFlags(KeepFlags):
    """What a request keeps that goes on beyond its context."""

    policy: PolicyName = _context(
        "none",
        "what a request keeps beyond its share of the context (none refuses it), or by score",
        "NAME",
        line=_LineDrop,
        decides=("policy",),
    )

    @property
    def policy_name(self) -> PolicyName:
        """The policy that is meant."""
        return self.policy


@flag_group
class WindowFlags(Options):
    """What windowed layers see beside their window."""

    window_sinks: int = _policy(
        0,
        "first tokens that windowed layers go on seeing behind their window; they keep all cells "
        "then, and the answers are not those that the model was trained for",
        "N",
        decides=("window_sinks",),
    )
