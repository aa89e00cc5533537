"""The prompt: read from a flag, a file or standard input, and turned into token ids."""

import dataclasses
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from kvrt.cli.flags.evaluate import PromptFlags
from kvrt.errors import UsageError, reason
from kvrt.files.typed_json import json_value, typed
from kvrt.whole_numbers import Whole

if TYPE_CHECKING:
    from kvrt_models.tokenizer.encode import Tokenizer

MAX_BYTES = 1 << 28
_STDIN = 0
_Ids = Annotated[tuple[Whole, ...], Meta(min_length=1)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """What was given: text, or the ids of `--tokens`; `chat` takes text as a user's message.

    A conversation may begin with a `system` message. A text that is `alone` is a chunk's, which
    stands behind `chunk_lead`.
    """

    text: str | None = None
    ids: tuple[int, ...] = ()
    chat: bool = False
    system: str | None = None
    alone: bool = False

    @property
    def is_none(self) -> bool:
        """Whether nothing was given."""
        return self.text is None and not self.ids


def read_prompt(options: PromptFlags) -> Prompt:
    """The prompt that the flags name; a text after a file stands behind a blank line.

    Raises:
      UsageError: a file that cannot be read, is no UTF-8, or is no JSON list of ids.
    """
    if options.tokens is not None:
        return Prompt(ids=_ids(options.tokens))
    if options.file is None:
        return Prompt(text=options.prompt, chat=options.chat, system=options.system)
    text = read_text("-f", options.file)
    if options.prompt is not None:
        text += f"\n\n{options.prompt}"
    return Prompt(text=text, chat=options.chat, system=options.system)


def read_text(flag: str, path: str) -> str:
    """A text file, - for standard input, without the newline at its end.

    Raises:
      UsageError: it cannot be read, or is no UTF-8.
    """
    try:
        # llama.cpp leaves out the newline that every editor puts at the end of a file.
        return _bytes(flag, path).decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{flag} {path}: byte {error.start} is no UTF-8; give a text file in UTF-8"
        ) from error


def prompt_ids(prompt: Prompt, tokenizer: "Tokenizer", *, chat: bool) -> list[int]:
    """Token ids of a prompt, at least one.

    Raises:
      UsageError: nothing to start from, an id outside the vocabulary, or no chat template.
    """
    if prompt.alone:
        return _alone(prompt, tokenizer)
    if prompt.text is None:
        return _known(prompt.ids, tokenizer)
    if chat:
        # Late, so that a mistake in a file is reported at once.
        from kvrt.cli.run import turns

        ids = turns.first_turn(prompt.text, prompt.system, tokenizer)
    else:
        ids = tokenizer.encode(prompt.text)
    if not ids:
        raise UsageError(
            "the prompt is empty and the model begins no text by itself; give text with -p or -f"
        )
    return ids


def chunk_lead(tokenizer: "Tokenizer") -> list[int]:
    """What a chunk is computed behind: BOS, where the model has one."""
    return [] if tokenizer.bos_id is None else [tokenizer.bos_id]


def _alone(prompt: Prompt, tokenizer: "Tokenizer") -> list[int]:
    """Tokens of a chunk behind its lead, which stands there once.

    Raises:
      UsageError: there is no text, or an id outside the vocabulary.
    """
    lead = chunk_lead(tokenizer)
    if prompt.text is None:
        ids = _known(prompt.ids, tokenizer)
        ids = ids[len(lead) :] if ids[: len(lead)] == lead else ids
    else:
        ids = tokenizer.encode(prompt.text, add_special=False)
    if not ids:
        raise UsageError("the chunk is empty; give text with -p or -f")
    return [*lead, *ids]


def behind(prompt: Prompt, tokenizer: "Tokenizer") -> list[int]:
    """Token ids of a prompt that follows other text, as it stands; at least one.

    Raises:
      UsageError: nothing to append, or an id outside the vocabulary.
    """
    if prompt.text is None:
        return _known(prompt.ids, tokenizer)
    ids = tokenizer.encode(prompt.text, add_special=False)
    if not ids:
        raise UsageError("the text to append is empty; give text with -p or -f")
    return ids


def _known(ids: tuple[int, ...], tokenizer: "Tokenizer") -> list[int]:
    bad = [i for i in ids if i >= tokenizer.n_vocab]
    if bad:
        raise UsageError(
            f"--tokens: id {bad[0]} is outside the model's vocabulary, 0 to "
            f"{tokenizer.n_vocab - 1}; use ids of this model's tokenizer"
        )
    return list(ids)


def _ids(path: str) -> tuple[int, ...]:
    try:
        return typed(_Ids, json_value(_bytes("--tokens", path)))
    except ValueError as error:
        wanted = "a JSON list of at least one token id is wanted, like [1, 2, 3]"
        raise UsageError(f"--tokens {path}: {error}; {wanted}") from error


def _bytes(flag: str, path: str) -> bytes:
    try:
        with open(_STDIN if path == "-" else path, "rb", closefd=path != "-") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        why = reason(error)
        raise UsageError(f"{flag} {path}: {why}; give a file that can be read, or -") from error
    if len(data) > MAX_BYTES:
        raise UsageError(f"{flag} {path}: more than {MAX_BYTES} bytes; give a shorter prompt")
    return data
