"""What drafts for `kvrt run --draft`: the text, layers, or another model in its own runtime."""

from kvrt import DraftModel, LayerSkip, Runtime
from kvrt.cli.flags.evaluate import RunOptions
from kvrt.cli.process import startup, status
from kvrt.cli.setup.model import open_with_status
from kvrt.cli.setup.sampling import named_drafter, sampling
from kvrt.cli.setup.weights import choose_weights
from kvrt.config import CacheConfig
from kvrt.drafts.drafter import Drafter
from kvrt.errors import UsageError
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
    quiet = options.quiet
    weights = choose_weights(options.dtype)
    other = open_with_status(options.draft, dtype=weights.dtype, on_host=False, quiet=quiet)
    if not _same_tokens(model.tokenizer, other.tokenizer):
        raise UsageError(
            f"--draft {options.draft}: its vocabulary is another than that of {model.name}; give "
            "a model of the same family, ngram or layerskip:E"
        )
    own = CacheConfig(
        n_ctx=config.n_ctx,
        n_ubatch=config.n_ubatch,
        block_size=config.block_size,
        n_rs_seq=options.n_draft + 1 if other.spec.recurrent else 0,
    )
    startup.check_memory(other.spec.groups, own, other.spec.recurrent, widened=other.widened_bytes)
    runtime = Runtime(other.shapes, own, identity=other.identity)
    drafter = DraftModel(runtime=runtime, sampling=sampling(options))
    with status.waiting(f"reading and compiling {other.name}, which drafts", not quiet):
        drafter.prepare(n_prompt)
        runtime.bind(other.wait().decoder)
    return drafter


def _same_tokens(a: Tokenizer, b: Tokenizer) -> bool:
    if a.digest == b.digest:
        return True
    n = a.n_vocab
    return n == b.n_vocab and all(a.token_bytes(i) == b.token_bytes(i) for i in range(n))
