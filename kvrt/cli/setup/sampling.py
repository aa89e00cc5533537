"""From flags to what is generated, and how its tokens are sampled."""

from kvrt import LayerSkip, PromptLookup, Sampling, Speculation
from kvrt.cli.flags.evaluate import LengthFlags, RunOptions, WriteFlags
from kvrt.drafts.drafter import Drafter
from kvrt.errors import UsageError
from kvrt.options.option import Options
from kvrt.runtime.generate import GenerationSpec
from kvrt_models.tokenizer.encode import Tokenizer

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
