"""The flags of how much a context holds, how far it reaches, and what goes when it is full."""

import functools
from typing import Literal, get_args

from kvrt.cli.flags.declare import Options, flag, flag_group
from kvrt.config import ExtendKind, OnStates
from kvrt.errors import UsageError
from kvrt.files import kinds

DropName = Literal["none", "context_shift", "attention_sinks"]
PolicyName = Literal[
    "none",
    "context_shift",
    "attention_sinks",
    "h2o",
    "snapkv",
    "tova",
    "expected_attention",
    "key_norm",
    "key_diff",
    "keyformer",
    "scissorhands",
    "sparse_window",
    "kvzip",
    "duo_attention",
]
BY_POSITION = get_args(DropName)
_BY_SCORE = tuple(name for name in get_args(PolicyName) if name not in BY_POSITION)
# The policies that a flag is of.
_OF = {
    "n_discard": ("context_shift",),
    "n_window": ("attention_sinks",),
    "n_drop": ("attention_sinks",),
    "n_sink": ("attention_sinks", *_BY_SCORE),
    "policy_budget": _BY_SCORE,
    "policy_interval": _BY_SCORE,
    "streaming_heads": ("duo_attention",),
    "n_stream": ("duo_attention",),
    "n_read": ("sparse_window",),
    "close_up": _BY_SCORE,
}
_context = functools.partial(flag, "Context")
_policy = functools.partial(flag, "Context", advanced=True)


@flag_group
class SizeFlags(Options):
    """How much it holds."""

    n_ctx: int = _context(
        0,
        "cells of the context; 0 takes a session's, or the trained length as far as a quarter of "
        "the free memory holds it, and at least prompt and answer",
        "N",
        short="c",
    )


@flag_group
class KeepFlags(Options):
    """What of a text stays when older tokens go."""

    keep: int = _context(
        0,
        "tokens of the prompt that a shift never drops, BOS not counted; -1 keeps all; if not "
        "given, a session's",
        "N",
        low=-1,
    )
    n_discard: int = _policy(
        0, "tokens that a context shift drops at once; 0 is half of what --keep leaves", "N"
    )
    n_sink: int = _policy(4, "first tokens that attention_sinks keeps", "N")
    n_window: int = _policy(
        0, "newest tokens that attention_sinks keeps; 0 takes what the context leaves", "N"
    )
    n_drop: int = _policy(
        1,
        "tokens that attention_sinks drops at once, at least; a quarter of the window, unless keys "
        "are f32 or stored unrotated: each drop rounds the others again",
        "N",
        low=1,
    )
    policy_budget: str = _policy(
        "512",
        "what each kv head keeps with a --policy by score (h2o and others): tokens, a part of the "
        "context like 25%, or the memory of all layers like 64MiB",
        "SIZE",
    )
    policy_interval: int = _policy(
        64, "tokens between two evictions of a --policy by score", "N", low=1
    )
    close_up: bool = _policy(
        False,
        "with a --policy by score: compare keys by their places among those that are kept, so that "
        "a text may be many times the trained length",
    )
    streaming_heads: str | None = _policy(
        None,
        "with --policy duo_attention: the kv heads that keep --n_stream tokens, a file that "
        "scripts/streaming_heads.py writes, or by layer, as [[1],[0,2]]; others keep the budget",
        "FILE",
        file=kinds.INPUT,
    )
    n_stream: int = _policy(
        128, "tokens that heads of --streaming_heads keep: sinks and the newest", "N", low=1
    )
    n_read: int = _policy(
        0,
        "with --policy sparse_window: tokens of the budget that each token reads, half of them the "
        "newest, a multiple of --refresh_every; 0 reads all",
        "N",
    )
    refresh_every: int = _policy(
        32,
        "with --n_read: tokens from one that reads all, by whose attention the others choose, to "
        "the next",
        "N",
        low=1,
    )

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
                name in self.given
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
class RunPolicyFlags(KeepFlags, SizeFlags):
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
    on_states: OnStates = _policy(
        "refuse",
        "where layers are recurrent: refuse, and the text ends with the context; or keep, and a "
        "policy drops from the layers with attention alone: states have all tokens",
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
    )

    @property
    def policy_name(self) -> PolicyName:
        """The policy that is meant."""
        return self.policy


@flag_group
class ExtendFlags(Options):
    """How far tokens share positions."""

    grp_attn_n: int = _context(
        1,
        "SelfExtend: tokens that share a position, so that a model reads so many times "
        "further; 1 is off",
        "N",
        short="gan",
        low=1,
    )
    grp_attn_w: int = _policy(
        512, "SelfExtend: window of tokens with positions of their own", "N", short="gaw", low=1
    )
    self_extend: ExtendKind = _policy(
        "cache",
        "SelfExtend by moving cells, without context shift, or as in the paper",
    )


@flag_group
class WindowFlags(Options):
    """What windowed layers see beside their window."""

    window_sinks: int = _policy(
        0,
        "first tokens that windowed layers go on seeing behind their window; they keep all cells "
        "then, and the answers are not those that the model was trained for",
        "N",
    )
