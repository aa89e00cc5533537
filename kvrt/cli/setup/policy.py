"""From flags to what stays of a text that outgrows its context, and whether a prompt fits."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import NoneType
from typing import Any, TypeVar

from kvrt.attention.scored.layers import LayerKinds, by_kind
from kvrt.cli.flags.evaluate import UNTIL_FULL, EvalFlags, LengthFlags
from kvrt.cli.flags.groups import BY_POSITION
from kvrt.cli.flags.serving import BatchOptions, FitOptions
from kvrt.cli.process import output
from kvrt.cli.setup.config import answer_length, cache_config
from kvrt.errors import DAMAGED, BadConfig, BadSession, UsageError
from kvrt.options.cache import CacheConfig, SelfExtend
from kvrt.options.size import parse_size
from kvrt.policies import SCORED, AnyPolicy, AttentionSinks, ContextShift, Policy, ScoredPolicy
from kvrt.policies.scored.duo_attention import DuoAttention, read_streaming
from kvrt.sizes import extent, store_specs
from kvrt.store.kv import cell_bytes
from kvrt_models.spec import DecoderSpec
from kvrt_models.tokenizer.encode import Tokenizer

_Options = EvalFlags | BatchOptions | FitOptions
_Flags = TypeVar("_Flags", bound=EvalFlags)
_MOST_EXTENDED = 16  # times the trained length that SelfExtend is advised for


def stays(options: EvalFlags, spec: DecoderSpec, config: CacheConfig) -> bool:
    """Whether older text never has to go: no layer keeps all of it, or one cannot forget.

    A policy that was named is left to the runtime, which takes or refuses it.
    """
    rolls = all(extent(g, config).rolls for g in spec.groups)
    return options.policy is None and (_cannot_forget(spec, config) or rolls)


def _cannot_forget(spec: DecoderSpec, config: CacheConfig) -> bool:
    """Whether states of recurrent layers keep a policy from dropping."""
    return spec.recurrent is not None and config.on_states == "refuse"


def check_prompt(options: EvalFlags, n_prompt: int, spec: DecoderSpec, config: CacheConfig) -> None:
    """Refuses a prompt that leaves no cell for what follows; warns of tokens to be dropped.

    Raises:
      UsageError: it does not fit, and nothing shifts.
    """
    n_least = n_prompt + _writes(options)
    remedy = _room_for(n_prompt + answer_length(options), spec, options)
    if options.policy_name not in BY_POSITION:
        return
    if all(extent(g, config).rolls for g in spec.groups):
        return
    if shifts(options) and options.policy_name == "attention_sinks":
        _warn_behind_window(options, n_prompt, config)
        return
    if shifts(options) and _cannot_forget(spec, config):
        output.warn(
            "the state of recurrent layers cannot forget, so the context does not shift and the "
            f"text ends with its {config.n_ctx:,} cells; --nocontext_shift if that is wanted, or "
            "--on_states keep"
        )
    if n_least <= config.n_ctx:
        return
    if shifts(options) and not _cannot_forget(spec, config):
        if n_prompt > config.n_ctx:
            output.warn(
                f"the prompt has {n_prompt:,} tokens, the context {config.n_ctx:,} cells: older "
                "tokens are dropped while it is read, so that the answer does not know the "
                f"prompt's beginning; to keep it {remedy}"
            )
        return
    raise UsageError(
        f"the prompt has {n_prompt:,} tokens, the context {config.n_ctx:,} cells, and {n_least:,} "
        f"are needed; {remedy}, drop older tokens (--context_shift) or shorten the prompt"
    )


def _room_for(n_tokens: int, spec: DecoderSpec, options: EvalFlags) -> str:
    """The flags with which a context holds n_tokens, within what the model was trained for."""
    n_trained, window = spec.n_ctx_train, options.grp_attn_w
    if n_tokens <= n_trained:
        return f"raise -c to {n_tokens}"
    # A power of two, for SelfExtend in the cache wants a window of whole groups.
    group = 2
    while SelfExtend(ga_n=group, ga_w=window, kind="paper").reach(n_trained) < n_tokens:
        group *= 2
        if group > _MOST_EXTENDED:
            return f"use a model trained for more than its {n_trained:,} tokens"
    simple = spec.recurrent is None and all(g.mask.kind == "full" for g in spec.groups)
    extended = f" with -gan {group} (SelfExtend)" if simple and not window % group else ""
    return (
        f"raise -c to {n_tokens}{extended}, beyond the {n_trained:,} tokens that the model was "
        "trained for"
    )


def _warn_behind_window(options: EvalFlags, n_prompt: int, config: CacheConfig) -> None:
    """Warns of a prompt that attention sinks do not keep; refuses more than the context holds."""
    n_window = options.window(config.n_ctx)
    n_kept = options.n_sink + n_window
    if n_kept > config.n_ctx:
        raise UsageError(
            f"--n_sink {options.n_sink} and --n_window {n_window} keep {n_kept:,} tokens, the "
            f"context has {config.n_ctx:,} cells; keep fewer, or raise -c to {n_kept}"
        )
    if n_prompt > n_kept:
        output.warn(
            f"the prompt has {n_prompt:,} tokens, of which {n_kept:,} stay: the first "
            f"{options.n_sink:,} and the last {n_window:,}; raise -c or --n_window to keep it"
        )


def shifts(options: EvalFlags) -> bool:
    """Whether the flags let older text go."""
    # SelfExtend would move positions as well; llama.cpp's tool leaves out the shift then.
    return options.policy_name != "none" and not _until_full(options) and not options.extends


def policy_of_run(
    options: EvalFlags, n_ctx: int, ids: list[int], tokenizer: Tokenizer
) -> Policy | None:
    """The policy by position that the flags of a run ask for.

    Raises:
      BadConfig: it leaves nothing to drop, or a size is none that it can have.

    Source: llama.cpp `tools/completion`, n_keep.
    """
    if not shifts(options):
        return None
    if options.policy_name == "attention_sinks":
        return sinks(options, n_ctx)
    n_keep = n_kept(options.keep, ids, tokenizer)
    if n_keep > n_ctx - 2:
        raise BadConfig(
            f"--keep {options.keep} keeps {n_keep:,} tokens, which leaves nothing to drop in "
            f"{n_ctx:,} cells; keep fewer, raise -c or use --nocontext_shift"
        )
    return ContextShift(n_keep=n_keep, **options.part(ContextShift))


# The policies by position as --policy names them.
_NAMES: dict[str, tuple[str, type[ContextShift | AttentionSinks]]] = {
    "ContextShift": ("context_shift", ContextShift),
    "AttentionSinks": ("attention_sinks", AttentionSinks),
}


def follow_policy(
    options: _Flags, said: Mapping[str, Any] | None, ids: Sequence[int], tokenizer: Tokenizer
) -> _Flags:
    """The options with the policy by position of a session where flags do not say otherwise.

    Args:
      options: flags, those of the session's cache among them.
      said: the policy's name and settings; None, or a policy of the user's own, changes nothing.
      ids: the prompt, those tokens first that the session holds.
      tokenizer: of the model.

    Raises:
      BadSession: the policy can have no such settings.
    """
    sizes = dict(said or {})
    name, kind = _NAMES.get(sizes.pop("name", ""), (None, None))
    if kind is None or (
        {"policy", "context_shift"} & options.given and options.policy_name != name
    ):
        return options
    try:
        if any(type(x) not in (int, NoneType) for x in sizes.values()):
            raise BadConfig(f"whole numbers are wanted, found {sizes}")
        kind(**sizes)
    except (TypeError, BadConfig) as error:
        raise BadSession(f"its policy {name}: {error}; {DAMAGED}") from error
    flags = {k: v for k, v in sizes.items() if v is not None}
    if n_keep := flags.pop("n_keep", 0):
        flags["keep"] = n_keep - _begins(ids, tokenizer)
    if name == "attention_sinks":
        flags["policy"] = name
    return replace(options, **{k: v for k, v in flags.items() if k not in options.given})


def followed(before: EvalFlags, after: EvalFlags) -> str:
    """The flags of `follow_policy` that it has changed, for a line; "" of none."""
    names = ("policy", "keep", "n_discard", "n_sink", "n_window", "n_drop")
    new = [(x, getattr(after, x)) for x in names if getattr(after, x) != getattr(before, x)]
    return " ".join(f"--{name} {value}" for name, value in new)


def policy_of_batch(options: BatchOptions | FitOptions, spec: DecoderSpec) -> AnyPolicy | None:
    """One as the flags say it, which is refused before the weights are read; lines have theirs."""
    if options.policy == "none":
        return None
    if options.policy not in BY_POSITION:
        return by_score(options, spec, options.n_ctx_request)
    if options.policy == "context_shift":
        return ContextShift(**options.part(ContextShift))
    return sinks(options, options.n_ctx_request)


def by_score(options: _Options, spec: DecoderSpec, n_ctx: int) -> ScoredPolicy:
    """The policy by score that --policy names, with its budget in tokens.

    Raises:
      UsageError: the budget is no size.
      BadConfig: it leaves no token to choose.
    """
    name, interval = options.policy_name, options.policy_interval
    text = options.policy_budget.strip()
    kind = DuoAttention if name == "duo_attention" else SCORED[name]
    sizes = options.part(kind)
    if options.says("n_sink"):
        sizes["n_sink"] = options.n_sink
    if text.isdecimal():
        n = int(text)
    elif text.endswith("%"):
        n = _part_of(text, n_ctx)
    else:
        n = _in_bytes(parse_size("--policy_budget", text), spec, options) - interval
    if options.streaming_heads is not None:
        sizes["streaming"] = _streaming(options.streaming_heads)
    try:
        return kind(budget=n, **sizes)
    except BadConfig as error:
        raise BadConfig(f"--policy {name} --policy_budget {text}: {error}") from error


# A longest context is searched for by many sizes, each with a policy of its own.
_streaming = functools.lru_cache(maxsize=1)(read_streaming)


def _part_of(text: str, n_ctx: int) -> int:
    try:
        part = float(text[:-1])
    except ValueError:
        part = 0.0
    if not 0 < part <= 100:
        raise UsageError(f"--policy_budget {text}: a part of the context is from above 0 to 100%")
    return int(n_ctx * part / 100)


def _in_bytes(n_bytes: int, spec: DecoderSpec, options: _Options) -> int:
    """Tokens a kv head whose keys, values, positions and sums take so much in all layers."""
    config, one = cache_config(options, spec.n_ctx_train), 0
    for group, store in zip(spec.groups, store_specs(spec.groups, config), strict=True):
        if group.mask.kind == "full":
            one += cell_bytes(store) + 8 * len(group.layers) * group.n_kv_heads
    return n_bytes // max(one, 1)


def layers_of_spec(spec: DecoderSpec, config: CacheConfig, policy: AnyPolicy | None) -> LayerKinds:
    """The layers of a model by what keeps them, before there are weights; raises BadConfig."""
    heads = {i: spec.n_heads_of(i) for g in spec.groups for i in g.all_layers}
    scored = policy if isinstance(policy, ScoredPolicy) else None
    return by_kind(spec.groups, spec.recurrent, config, scored, heads)


def n_kept(keep: int, ids: Sequence[int], tokenizer: Tokenizer) -> int:
    """Tokens of a prompt that --keep means."""
    begins = _begins(ids, tokenizer)
    return min(keep + begins, len(ids)) if 0 <= keep <= len(ids) else len(ids)


def _begins(ids: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Whether the tokens begin with one that --keep does not count."""
    return tokenizer.add_bos and ids[0] == tokenizer.bos_id


def sinks(options: _Options, n_ctx: int) -> AttentionSinks:
    """The sinks and the window that flags ask for in a context."""
    return AttentionSinks(n_window=options.window(n_ctx), **options.part(AttentionSinks))


def _writes(options: EvalFlags) -> bool:
    """Whether a token is to follow the prompt."""
    return isinstance(options, LengthFlags) and options.n_predict != 0


def _until_full(options: EvalFlags) -> bool:
    return isinstance(options, LengthFlags) and options.n_predict == UNTIL_FULL
