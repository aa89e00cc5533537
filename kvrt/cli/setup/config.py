"""From flags to the cache and its policy, and what of them does not go together."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import jax

from kvrt.cli.flags.declare import flags_of
from kvrt.cli.flags.evaluate import CheckpointFlags, EvalFlags, KVFlags, LengthFlags, SizeFlags
from kvrt.cli.flags.serving import BatchOptions, BlockFlags
from kvrt.cli.process import output
from kvrt.config import CacheConfig, SelfExtend
from kvrt.errors import BadConfig, UsageError
from kvrt.kv_types import KeyDtypes, KVDtypes, default_kv_dtype
from kvrt.policies import ContextShift
from kvrt.program.estimate import most_tokens, of_cells
from kvrt.sizes import extent
from kvrt_models.spec import DecoderSpec
from kvrt_models.tokenizer.encode import Tokenizer

_Flags = TypeVar("_Flags", bound=EvalFlags)
# Of the memory that is available, what a cache takes whose size nobody has chosen.
_SHARE = 4
# Flags of the cache, and the fields of `CacheConfig` that they set.
_FIELDS = {
    "n_seq_max": "n_seq_max",
    "n_ubatch": "n_ubatch",
    "n_batch": "n_ubatch",
    "hadamard": "hadamard",
    "rope": "rope",
    "attention": "attention",
    "defrag_thold": "defrag_threshold",
    "swa_full": "swa_full",
    "n_checkpoints": "n_checkpoints",
    "checkpoint_interval": "checkpoint_interval",
}


def cache_config(options: SizeFlags, n_trained: int) -> CacheConfig:
    """The cache that a command's flags ask for.

    What a command has no flag for is as `CacheConfig` has it. A context above the trained length is
    worth a warning where the flags are those of a run.

    Args:
      options: of run, ask, prefill, batch or fit.
      n_trained: tokens that the model was trained for.

    Raises:
      UsageError: two flags do not go together.
      BadConfig: a value is none that a cache can have.
    """
    names = {f.name for f in flags_of(type(options))}
    fields: dict[str, Any] = {_FIELDS[x]: getattr(options, x) for x in _FIELDS if x in names}
    if isinstance(options, KVFlags):
        fields["type_k"], fields["type_v"] = kv_dtypes(options)
    if isinstance(options, BlockFlags):
        fields["block_size"] = options.block
    if isinstance(options, EvalFlags | BatchOptions):
        fields["self_extend"] = extend_config(options)
    if isinstance(options, CheckpointFlags):
        fields["checkpoint_bytes"] = options.max_checkpoint_bytes()
    config = CacheConfig(n_ctx=options.n_ctx or n_trained, **fields)
    if isinstance(options, EvalFlags):
        _warn_beyond(config, n_trained)
    return config


def kv_dtypes(options: KVFlags) -> tuple[KeyDtypes, KVDtypes]:
    """Of keys and values: the flags', or the platform's default."""
    usual = default_kv_dtype(jax.default_backend())
    return options.cache_type_k or usual, options.cache_type_v or usual


def _warn_beyond(config: CacheConfig, n_trained: int) -> None:
    """Warns of a context that is longer than what the model was trained for."""
    extend = config.self_extend
    reach = extend.reach(n_trained) if extend else n_trained
    if config.n_ctx > reach:
        further = f" (with SelfExtend {reach})" if extend else ""
        output.warn(
            f"-c {config.n_ctx} is above the {n_trained} tokens that the model was trained for"
            f"{further}, and text beyond them suffers; use -c {reach} "
            f"{'or a greater -gan' if extend else 'with --context_shift'}"
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
        n_ctx = min(max(n_ctx, n_prompt + _n_answer(options)), n_trained)
    if n_ctx < n_trained and not quiet:
        output.note(
            f"context: {n_ctx:,} of the {n_trained:,} tokens that the model was trained for; more "
            "would take over a quarter of the memory that is free, -c N sets it"
        )
    return dataclasses.replace(options, n_ctx=n_ctx)


def stays(spec: DecoderSpec, config: CacheConfig) -> bool:
    """Whether older text never has to go: no layer keeps all of it, or one cannot forget."""
    return spec.recurrent is not None or all(extent(g, config).rolls for g in spec.groups)


def check_prompt(options: EvalFlags, n_prompt: int, spec: DecoderSpec, config: CacheConfig) -> None:
    """Refuses a prompt that leaves no cell for what follows; warns of tokens to be dropped.

    Raises:
      UsageError: it does not fit, and nothing shifts.
    """
    n_least = n_prompt + _writes(options)
    if all(extent(g, config).rolls for g in spec.groups):
        return
    if shifts(options) and spec.recurrent is not None:
        output.warn(
            "the state of recurrent layers cannot forget, so the context does not shift and the "
            f"text ends with its {config.n_ctx} cells; --nocontext_shift if that is wanted"
        )
    if n_least <= config.n_ctx:
        return
    if shifts(options) and spec.recurrent is None:
        if n_prompt > config.n_ctx:
            output.warn(
                f"the prompt has {n_prompt} tokens, the context {config.n_ctx} cells: older tokens "
                "are dropped while it is read, so that the answer does not know the prompt's "
                f"beginning; raise -c to {n_least} to keep it"
            )
        return
    raise UsageError(
        f"the prompt has {n_prompt} tokens, the context {config.n_ctx} cells, and {n_least} are "
        f"needed; raise -c to {n_least} or more (the model was trained for {spec.n_ctx_train}), "
        "use --context_shift or shorten the prompt"
    )


def extend_config(options: EvalFlags | BatchOptions) -> SelfExtend | None:
    """SelfExtend as the flags ask for it, or None.

    Raises:
      UsageError: the kind does not go with the key frame.
      BadConfig: the window is not a multiple of the group.
    """
    if options.grp_attn_n == 1:
        return None
    if options.self_extend == "paper" and options.rope != "read":
        raise UsageError("--self_extend paper rotates each key in two ways; add --rope read")
    return SelfExtend(ga_n=options.grp_attn_n, ga_w=options.grp_attn_w, kind=options.self_extend)


def shifts(options: EvalFlags) -> bool:
    """Whether the flags let older text go."""
    # Both would move positions; llama.cpp's tool leaves out the shift as well.
    extends = options.grp_attn_n > 1 and options.self_extend == "cache"
    return options.context_shift and not _until_full(options) and not extends


def context_shift(
    options: EvalFlags, n_ctx: int, ids: list[int], tokenizer: Tokenizer
) -> ContextShift | None:
    """The policy that the flags ask for.

    Raises:
      BadConfig: --keep leaves nothing to drop.

    Source: llama.cpp `tools/completion`, n_keep.
    """
    if not shifts(options):
        return None
    n_keep = n_kept(options.keep, ids, tokenizer)
    if n_keep > n_ctx - 2:
        raise BadConfig(
            f"--keep {options.keep} keeps {n_keep} tokens, which leaves nothing to drop in "
            f"{n_ctx} cells; keep fewer, raise -c or use --nocontext_shift"
        )
    return ContextShift(n_keep=n_keep)


def n_kept(keep: int, ids: Sequence[int], tokenizer: Tokenizer) -> int:
    """Tokens of a prompt that --keep means."""
    begins = tokenizer.add_bos and ids[0] == tokenizer.bos_id
    return min(keep + begins, len(ids)) if 0 <= keep <= len(ids) else len(ids)


def _n_answer(options: EvalFlags) -> int:
    """Tokens that follow the prompt, as far as the flags say; an endless text counts as one."""
    return max(options.n_predict, 1) if isinstance(options, LengthFlags) else 0


def _writes(options: EvalFlags) -> bool:
    """Whether a token is to follow the prompt."""
    return isinstance(options, LengthFlags) and options.n_predict != 0


def _until_full(options: EvalFlags) -> bool:
    return isinstance(options, LengthFlags) and options.n_predict == -2
