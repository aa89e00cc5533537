"""From flags to the cache, its length where none is given, what stays of a text, and sampling."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import NoneType
from typing import Any, TypeVar

import jax

from kvrt import LayerSkip, PromptLookup, Sampling, Speculation
from kvrt.attention.scored.layers import LayerKinds, by_kind
from kvrt.cache import checks
from kvrt.cli.flags.evaluate import (
    UNTIL_FULL,
    DraftFlags,
    EvalFlags,
    LengthFlags,
    RunOptions,
    WriteFlags,
)
from kvrt.cli.flags.groups import BY_POSITION, SelectFlags
from kvrt.cli.flags.serving import BatchOptions, BlockFlags, DoctorOptions, FitOptions
from kvrt.cli.flags.session_files import ChunkFlags
from kvrt.cli.process import output
from kvrt.drafts.drafter import Drafter
from kvrt.errors import DAMAGED, BadConfig, BadSession, UsageError
from kvrt.kv_types import KeyDtypes, KVDtypes, default_kv_dtype
from kvrt.options.cache import CacheConfig, SelfExtend
from kvrt.options.option import Options
from kvrt.options.select import DoubleSparsity, Quest, Select
from kvrt.options.size import parse_size
from kvrt.policies import SCORED, AnyPolicy, AttentionSinks, ContextShift, Policy, ScoredPolicy
from kvrt.policies.scored.duo_attention import DuoAttention, read_streaming
from kvrt.program.estimate import most_tokens, of_cells
from kvrt.runtime.generate import GenerationSpec
from kvrt.runtime.heavy_channels import read_channels
from kvrt.sizes import extent, store_specs
from kvrt.store.kv import cell_bytes
from kvrt_models.spec import DecoderSpec
from kvrt_models.tokenizer.encode import Tokenizer

CacheOptions = EvalFlags | BatchOptions | FitOptions | DoctorOptions
_Flags = TypeVar("_Flags", bound=EvalFlags)
_Options = EvalFlags | BatchOptions | FitOptions
NGRAM, LAYERSKIP = "ngram", "layerskip:"
_MOST_EXTENDED = 16  # times the trained length that SelfExtend is advised for
# The policies by position as --policy names them.
_NAMES: dict[str, tuple[str, type[ContextShift | AttentionSinks]]] = {
    "ContextShift": ("context_shift", ContextShift),
    "AttentionSinks": ("attention_sinks", AttentionSinks),
}
_SHARE = 4  # default size of a cache: one part of so many of the free memory


def cache_config(options: CacheOptions, n_trained: int) -> CacheConfig:
    """The cache that a command's flags ask for.

    What a command has no flag for is as `CacheConfig` has it. A context above the trained length is
    worth a warning where the flags are those of a run.

    Args:
      options: of a command with a cache.
      n_trained: tokens that the model was trained for.

    Raises:
      UsageError: two flags do not go together.
      BadConfig: a value is none that a cache can have.
    """
    fields = options.part(CacheConfig)
    fields["type_k"], fields["type_v"] = kv_dtypes(options)
    is_block = isinstance(options, BlockFlags)
    fields["block_size"] = options.block if is_block else options.block_size
    if isinstance(options, EvalFlags | BatchOptions):
        fields["self_extend"] = extend_config(options)
    if isinstance(options, ChunkFlags) and options.chunk:
        fields["n_seq_max"] = 2  # chunks go through the other one to their place
    if isinstance(options, SelectFlags):
        fields["select"] = select_config(options)
    config = CacheConfig(n_ctx=options.n_ctx or n_trained, **fields)
    config = config.for_platform(jax.default_backend())
    if isinstance(options, EvalFlags):
        _warn_beyond(config, n_trained)
    return config


def kv_dtypes(options: CacheOptions) -> tuple[KeyDtypes, KVDtypes]:
    """Of keys and values: the flags', or the platform's default."""
    usual = default_kv_dtype(jax.default_backend())
    return options.cache_type_k or usual, options.cache_type_v or usual


def _warn_beyond(config: CacheConfig, n_trained: int) -> None:
    """Warns of a context that is longer than what the model was trained for."""
    extend = config.self_extend
    reach = extend.reach(n_trained) if extend else n_trained
    if config.n_ctx > reach:
        further = f" ({reach:,} with SelfExtend)" if extend else ""
        remedy = "a greater -gan" if extend else "-gan (SelfExtend)"
        output.warn(
            f"-c {config.n_ctx} is above the {n_trained:,} tokens that the model was trained for"
            f"{further}, and text beyond them suffers; {remedy} reads further, -c {reach} drops "
            "older tokens instead"
        )


def sized(
    options: _Flags, spec: DecoderSpec, n_prompt: int, n_bytes: float, *, quiet: bool
) -> _Flags:
    """The options with a length of the context where they leave it open.

    It is what the model was trained for, if that takes at most a quarter of n_bytes; otherwise the
    greatest power of two that does, or what the prompt and its answer need if that is more. A
    shorter one is said in one line.
    """
    if options.n_ctx:
        return options
    n_trained = spec.n_ctx_train
    n_ctx = n_trained
    if not math.isinf(n_bytes):
        config = cache_config(dataclasses.replace(options, n_ctx=n_trained), n_trained)
        estimate = functools.partial(of_cells, spec.groups, spec.recurrent)
        n_most = most_tokens(estimate, config, int(n_bytes) // _SHARE)
        n_ctx = n_trained if n_most >= n_trained else 1 << max(n_most.bit_length() - 1, 0)
        n_ctx = min(max(n_ctx, n_prompt + answer_length(options)), n_trained)
    if n_ctx < n_trained and not quiet:
        output.note(
            f"context: {n_ctx:,} of the {n_trained:,} tokens that the model was trained for; more "
            "would take over a quarter of the memory that is free, -c N sets it"
        )
    return dataclasses.replace(options, n_ctx=n_ctx)


def extend_config(options: EvalFlags | BatchOptions) -> SelfExtend | None:
    """SelfExtend as the flags ask for it, or None.

    Raises:
      BadConfig: the window is not a multiple of the group.
    """
    if options.grp_attn_n == 1:
        return None
    return SelfExtend(**options.part(SelfExtend))


def answer_length(options: EvalFlags) -> int:
    """Tokens that follow the prompt, as far as the flags say; an endless text counts as one."""
    return max(options.n_predict, 1) if isinstance(options, LengthFlags) else 0


def select_config(options: SelectFlags) -> Select | None:
    """Sparse reads as the flags ask for them, or None.

    Raises:
      BadConfig: sizes leave no choice, or a file has no channels.
    """
    if options.select == "none":
        return None
    try:
        if options.select == "quest":
            return Quest(**options.part(Quest))
        assert options.select_channels is not None, "checked with the flags"
        channels, weights = read_channels(options.select_channels)
        return DoubleSparsity(channels=channels, weights=weights, **options.part(DoubleSparsity))
    except BadConfig as error:
        raise BadConfig(f"--select {options.select}: {error}") from error


def sampling(options: WriteFlags) -> Sampling:
    """How tokens are sampled."""
    return Sampling(**options.part(Sampling))


def stop_ids(options: LengthFlags, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokens that end the text."""
    return () if options.ignore_eos else tuple(sorted(tokenizer.eos_ids))


def n_best(options: WriteFlags) -> int:
    """Log-probabilities that are wanted of each token."""
    return options.logprobs if isinstance(options, RunOptions) else 0


def speculation(
    options: LengthFlags, drafter: Drafter | LayerSkip | None = None
) -> Speculation | None:
    """Drafts that are verified, as the flags ask for them; what drafts may still be opened."""
    if not isinstance(options, DraftFlags) or options.draft is None:
        return None
    found = drafter or named_drafter(options.draft) or PromptLookup()
    return Speculation(drafter=found, n_draft=options.n_draft)


def named_drafter(draft: str) -> PromptLookup | LayerSkip | None:
    """The drafter that --draft names, None for a model's name.

    Raises:
      UsageError: layers are named that are no number.
    """
    if draft == NGRAM:
        return PromptLookup()
    if not draft.startswith(LAYERSKIP):
        return None
    layer = draft.removeprefix(LAYERSKIP)
    if not layer.isdecimal():
        raise UsageError(
            f"--draft {draft}: {layer!r} is no number of layers; give one, as in layerskip:8"
        )
    return LayerSkip(exit_layer=int(layer))


def request(options: Options, tokenizer: Tokenizer) -> GenerationSpec | None:
    """What a command generates, but for the tokens before it; None if it writes nothing."""
    if not isinstance(options, WriteFlags):
        return None
    return GenerationSpec(
        n_predict=options.n_predict if options.n_predict >= 0 else None,
        seq_id=0,
        sampling=sampling(options),
        stop_ids=stop_ids(options, tokenizer),
        recent=(),
        n_best=n_best(options),
        speculation=speculation(options),
        stride=options.stride,
    )


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
    n_least = n_prompt + (isinstance(options, LengthFlags) and options.n_predict != 0)
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
    until_full = isinstance(options, LengthFlags) and options.n_predict == UNTIL_FULL
    # SelfExtend would move positions as well; llama.cpp's tool leaves out the shift then.
    return options.policy_name != "none" and not until_full and not options.extends


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
        return dropping(options, n_ctx)
    n_keep = n_kept(options.keep, ids, tokenizer)
    if n_keep > n_ctx - 2:
        raise BadConfig(
            f"--keep {options.keep} keeps {n_keep:,} tokens, which leaves nothing to drop in "
            f"{n_ctx:,} cells; keep fewer, raise -c or use --nocontext_shift"
        )
    return dropping(options, n_ctx, n_keep=n_keep)


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
    return dropping(options, options.n_ctx_request)


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
    checks.together(spec.groups, spec.recurrent, config, policy)
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


def dropping(options: _Options, n_ctx: int, n_keep: int = 0) -> ContextShift | AttentionSinks:
    """The policy by position that --policy names, in a context; `n_keep` is of context shift."""
    if options.policy_name == "context_shift":
        return ContextShift(n_keep=n_keep, **options.part(ContextShift))
    return AttentionSinks(n_window=options.window(n_ctx), **options.part(AttentionSinks))
