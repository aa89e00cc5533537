"""From flags to the cache (sizes, types, a length where none is given), and to what is sampled."""

import dataclasses
import functools
import math
from typing import TypeVar

import jax

from kvrt import LayerSkip, PromptLookup, Sampling, Speculation
from kvrt.cli.flags.evaluate import EvalFlags, LengthFlags, RunOptions, WriteFlags
from kvrt.cli.flags.groups import SelectFlags
from kvrt.cli.flags.serving import BatchOptions, BlockFlags, DoctorOptions, FitOptions
from kvrt.cli.flags.session_files import ChunkFlags
from kvrt.cli.process import output
from kvrt.drafts.drafter import Drafter
from kvrt.errors import BadConfig, UsageError
from kvrt.kv_types import KeyDtypes, KVDtypes, default_kv_dtype
from kvrt.options.cache import CacheConfig, SelfExtend
from kvrt.options.option import Options
from kvrt.options.select import DoubleSparsity, Quest, Select
from kvrt.program.estimate import most_tokens, of_cells
from kvrt.runtime.generate import GenerationSpec
from kvrt.runtime.heavy_channels import read_channels
from kvrt_models.spec import DecoderSpec
from kvrt_models.tokenizer.encode import Tokenizer

CacheOptions = EvalFlags | BatchOptions | FitOptions | DoctorOptions
_Flags = TypeVar("_Flags", bound=EvalFlags)
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


NGRAM, LAYERSKIP = "ngram", "layerskip:"


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
    if not isinstance(options, RunOptions) or options.draft is None:
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
