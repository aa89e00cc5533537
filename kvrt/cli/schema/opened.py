"""A schema's file, and a runtime with room for its modules."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvrt import CacheConfig, Runtime
from kvrt.cli.flags.evaluate import EvalFlags
from kvrt.cli.process import startup
from kvrt.cli.run import prompt
from kvrt.cli.setup import config
from kvrt.cli.setup.open_runtime import choosing
from kvrt.errors import UsageError
from kvrt.reuse.schema import PlacedSchema, lay_out, read_schema
from kvrt_models.load import Opened
from kvrt_models.tokenizer.vocab import Kind

if TYPE_CHECKING:
    from kvrt_models.tokenizer.encode import Tokenizer

FIRST_SEQ = 1  # sequence 0 is the prompt's


def read_placed(path: str, model: Opened) -> PlacedSchema:
    """The modules of a schema's file, placed by a model's tokenizer.

    All stand behind BOS where the model has one. See `placeholder` for what stands
    for arguments.

    Raises:
      UsageError: it cannot be read, or is no schema.
    """
    text, tokenizer = prompt.read_text("--schema", path), model.tokenizer
    lead = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    try:
        unions = read_schema(text)
        return lay_out(unions, encoder(tokenizer), placeholder(tokenizer), lead)
    except UsageError as error:
        raise UsageError(f"--schema {path}: {error}") from error


def encoder(tokenizer: "Tokenizer") -> Callable[[str], list[int]]:
    """A text's tokens by themselves, without BOS."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special=False)

    return encode


def n_tokens_of(placed: PlacedSchema) -> int:
    """Cells that all modules take, those of each union together."""
    return len(placed.lead) + sum(len(m.ids) for m in placed.modules)


def open_modules(
    options: EvalFlags,
    model: Opened,
    placed: PlacedSchema,
    n_more: int,
    check: Callable[[CacheConfig], Any],
) -> Runtime:
    """A runtime with a sequence for the prompt and one for each choice of a union.

    Args:
      options: the flags, and what a session says in place of those that were not given.
      model: its shapes.
      placed: the modules.
      n_more: tokens of a prompt beside them.
      check: refuses a session that does not go with the cache.

    Raises:
      UsageError: a flag that modules do not go with; too few cells.
    """
    _check_flags(options)
    n, left = n_tokens_of(placed) + n_more, startup.available_bytes()
    options = config.sized(options, model.spec, n, left, quiet=True)
    cache = config.cache_config(options, model.spec.n_ctx_train)
    if n > cache.n_ctx:
        raise UsageError(
            f"the modules and the prompt have {n:,} tokens, the context {cache.n_ctx:,} cells; "
            f"raise -c to {n}"
        )
    check(cache)
    cache = dataclasses.replace(cache, n_seq_max=placed.n_choices + FIRST_SEQ)
    spec = model.spec
    startup.check_memory(spec.groups, cache, spec.recurrent, mesh=None, widened=model.widened_bytes)
    with choosing(cache.attention, quiet=True):
        return Runtime(model.shapes, cache, identity=model.identity)


def _check_flags(options: EvalFlags) -> None:
    if options.mesh is not None:
        raise UsageError("--schema and --mesh do not go together yet; leave out --mesh")
    if "policy" in options.given and options.policy_name != "none":
        raise UsageError(
            f"--policy {options.policy_name} drops tokens, and those of modules are other prompts' "
            "as well; leave it out"
        )


def placeholder(tokenizer: "Tokenizer") -> int:
    """The token that stands where an argument will be: the unknown one, else the end of text.

    Raises:
      UsageError: the vocabulary has neither.
    """
    kinds = list(tokenizer.vocab.kinds)
    if Kind.UNKNOWN in kinds:
        return kinds.index(Kind.UNKNOWN)
    if tokenizer.eos_id is None:
        raise UsageError("the vocabulary has no unknown token and no end of text to hold a place")
    return tokenizer.eos_id
