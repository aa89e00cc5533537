"""From flags to what stays of a text that outgrows its context, and whether a prompt fits."""

from collections.abc import Sequence

from kvrt.cli.flags.evaluate import UNTIL_FULL, EvalFlags, LengthFlags
from kvrt.cli.flags.serving import BatchOptions
from kvrt.cli.process import output
from kvrt.cli.setup.flag_map import taken
from kvrt.config import CacheConfig
from kvrt.errors import BadConfig, UsageError
from kvrt.policies import AttentionSinks, ContextShift, Policy
from kvrt.sizes import extent
from kvrt_models.spec import DecoderSpec
from kvrt_models.tokenizer.encode import Tokenizer


def stays(options: EvalFlags, spec: DecoderSpec, config: CacheConfig) -> bool:
    """Whether older text never has to go: no layer keeps all of it, or one cannot forget.

    A policy that was named is left to the runtime, which takes or refuses it.
    """
    rolls = all(extent(g, config).rolls for g in spec.groups)
    return options.policy is None and (spec.recurrent is not None or rolls)


def check_prompt(options: EvalFlags, n_prompt: int, spec: DecoderSpec, config: CacheConfig) -> None:
    """Refuses a prompt that leaves no cell for what follows; warns of tokens to be dropped.

    Raises:
      UsageError: it does not fit, and nothing shifts.
    """
    n_least = n_prompt + _writes(options)
    if all(extent(g, config).rolls for g in spec.groups):
        return
    if shifts(options) and options.policy_name == "attention_sinks":
        _warn_behind_window(options, n_prompt, config)
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


def _warn_behind_window(options: EvalFlags, n_prompt: int, config: CacheConfig) -> None:
    """Warns of a prompt that attention sinks do not keep; refuses more than the context holds."""
    n_window = options.window(config.n_ctx)
    n_kept = options.n_sink + n_window
    if n_kept > config.n_ctx:
        raise UsageError(
            f"--n_sink {options.n_sink} and --n_window {n_window} keep {n_kept} tokens, the "
            f"context has {config.n_ctx} cells; keep fewer, or raise -c to {n_kept}"
        )
    if n_prompt > n_kept:
        output.warn(
            f"the prompt has {n_prompt} tokens, of which {n_kept} stay: the first {options.n_sink} "
            f"and the last {n_window}; raise -c or --n_window to keep it"
        )


def shifts(options: EvalFlags) -> bool:
    """Whether the flags let older text go."""
    # SelfExtend would move positions as well; llama.cpp's tool leaves out the shift then.
    return options.policy_name != "none" and not _until_full(options) and not options.extends


def policy_of_run(
    options: EvalFlags, n_ctx: int, ids: list[int], tokenizer: Tokenizer
) -> Policy | None:
    """The policy that the flags of a run ask for.

    Raises:
      BadConfig: it leaves nothing to drop, or a size is none that it can have.

    Source: llama.cpp `tools/completion`, n_keep.
    """
    if not shifts(options):
        return None
    if options.policy_name == "attention_sinks":
        return _sinks(options, n_ctx)
    n_keep = n_kept(options.keep, ids, tokenizer)
    if n_keep > n_ctx - 2:
        raise BadConfig(
            f"--keep {options.keep} keeps {n_keep} tokens, which leaves nothing to drop in "
            f"{n_ctx} cells; keep fewer, raise -c or use --nocontext_shift"
        )
    return ContextShift(n_keep=n_keep, **taken("ContextShift", options))


def policy_of_batch(options: BatchOptions) -> Policy | None:
    """One as the flags say it, which is refused before the weights are read; lines have theirs."""
    if options.policy == "none":
        return None
    if options.policy == "context_shift":
        return ContextShift(**taken("ContextShift", options))
    return _sinks(options, options.n_ctx_request)


def n_kept(keep: int, ids: Sequence[int], tokenizer: Tokenizer) -> int:
    """Tokens of a prompt that --keep means."""
    begins = tokenizer.add_bos and ids[0] == tokenizer.bos_id
    return min(keep + begins, len(ids)) if 0 <= keep <= len(ids) else len(ids)


def _sinks(options: EvalFlags | BatchOptions, n_ctx: int) -> AttentionSinks:
    return AttentionSinks(n_window=options.window(n_ctx), **taken("AttentionSinks", options))


def _writes(options: EvalFlags) -> bool:
    """Whether a token is to follow the prompt."""
    return isinstance(options, LengthFlags) and options.n_predict != 0


def _until_full(options: EvalFlags) -> bool:
    return isinstance(options, LengthFlags) and options.n_predict == UNTIL_FULL
