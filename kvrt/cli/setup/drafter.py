"""What --draft asks for: the text, layers, or another model in its own runtime."""

from kvrt import DraftModel, LayerSkip, Runtime
from kvrt.cli.flags.evaluate import RunOptions
from kvrt.cli.flags.serving import BatchOptions
from kvrt.cli.process import startup, status
from kvrt.cli.setup.model import open_with_status
from kvrt.cli.setup.sampling import named_drafter, sampling
from kvrt.cli.setup.weights import choose_weights
from kvrt.drafts.drafter import Drafter
from kvrt.errors import UsageError
from kvrt.options.cache import CacheConfig
from kvrt_models.load import Opened
from kvrt_models.tokenizer.encode import Tokenizer


def open_drafter(
    options: RunOptions, model: Opened, config: CacheConfig, n_prompt: int
) -> Drafter | LayerSkip | None:
    """The drafter that the flags ask for, a model with its weights; None without one.

    Args:
      options: the flags.
      model: that it drafts for.
      config: of that model's cache, whose length the drafter's has.
      n_prompt: tokens of the prompt.

    Raises:
      UsageError: there is no such model, it has another vocabulary, or layers are no number.
      KvrtError: memory is lacking for it.
    """
    if options.draft is None:
        return None
    if (named := named_drafter(options.draft)) is not None:
        return named
    other, runtime = open_draft_model(options, options.draft, model, config)
    drafter = DraftModel(runtime=runtime, sampling=sampling(options))
    with status.waiting(f"reading and compiling {other.name}, which drafts", not options.quiet):
        drafter.prepare(n_prompt)
        runtime.bind(other.wait().decoder)
    return drafter


def open_draft_model(
    options: RunOptions | BatchOptions, draft: str, model: Opened, config: CacheConfig
) -> tuple[Opened, Runtime]:
    """Another model that drafts, and its runtime, which has no weights yet.

    Args:
      options: the flags.
      draft: its name.
      model: that it drafts for.
      config: of that model's cache: the drafter's holds as many tokens, and in `kvrt batch`
        sequences.

    Raises:
      UsageError: there is no such model, or it has another vocabulary.
      KvrtError: memory is lacking for it.
    """
    weights = choose_weights(options.dtype)
    other = open_with_status(draft, dtype=weights.dtype, on_host=False, quiet=options.quiet)
    if not _same_tokens(model.tokenizer, other.tokenizer):
        raise UsageError(
            f"--draft {draft}: its vocabulary is another than that of {model.name}; give a model "
            "of the same family, ngram or layerskip:E"
        )
    own = CacheConfig(
        n_ctx=config.n_ctx,
        n_ubatch=config.n_ubatch,
        block_size=config.block_size,
        n_seq_max=config.n_seq_max if isinstance(options, BatchOptions) else 1,
        n_rs_seq=options.n_draft + 1 if other.spec.recurrent else 0,
    )
    startup.check_memory(other.spec.groups, own, other.spec.recurrent, widened=other.widened_bytes)
    return other, Runtime(other.shapes, own, identity=other.identity)


def _same_tokens(a: Tokenizer, b: Tokenizer) -> bool:
    if a.digest == b.digest:
        return True
    n = a.n_vocab
    return n == b.n_vocab and all(a.token_bytes(i) == b.token_bytes(i) for i in range(n))
