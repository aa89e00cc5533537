"""The vocabulary in GGUF metadata: token texts, their kinds, and which ids begin and end a text."""

import collections
import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kvrt.errors import BadModelFile
from kvrt_models.header import Header, brief

PREFIX = "tokenizer.ggml."
MAX_TOKEN_CHARS = 1 << 12

# Texts that end generation wherever a vocabulary has them. Source: llama.cpp `llama-vocab.cpp`.
END_TEXTS = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> "
    "<|endoftext|> </s> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> "
    "<eos> <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> "
    "<REPO> <reponame> <|file_sep|>".split()
) | {"<｜end▁of▁sentence｜>"}  # noqa: RUF001
# Of these, texts that markup or prose may hold: they end a text where the file has them as control
# tokens. Gemma and Qwen have HTML's </s> among their ordinary tokens.
_ORDINARY = frozenset("</s> <EOT> _<EOT> [EOT] [EOS] <eos> <PAD> [PAD] <REPO> <reponame>".split())
# Texts that are control tokens whatever the file says of them, and do not end a text.
CONTROL_TEXTS = frozenset(
    "<|fim_prefix|> <fim-prefix> <fim_prefix> <PRE> ▁<PRE> <|code_prefix|> <|prefix|> "
    "<|fim_suffix|> <fim-suffix> <fim_suffix> <SUF> ▁<SUF> <|code_suffix|> <|suffix|> "
    "<|fim_middle|> <fim-middle> <fim_middle> <MID> ▁<MID> <|code_middle|> <|middle|>".split()
)
# Keys whose ids end generation too.
_END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")


class Kind(enum.IntEnum):
    """What a token is, numbered as in GGUF `tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vocab:
    """Token texts and the ids with a role.

    Attributes:
      texts: text of each token, as the vocabulary writes it; unique. `[n_vocab]`
      kinds: `Kind` of each token. `[n_vocab]`
      bos_id: token that begins a text, or None.
      eos_id: token that ends a text, or None.
      eos_ids: every token that ends generation.
      add_bos: encoding puts bos_id first.
      add_eos: encoding puts eos_id last.
      chat_template: the model's template, or None.
      other_templates: names of chat templates beside it, or of all where none is the default.
    """

    texts: Sequence[str]
    kinds: Sequence[int]
    bos_id: int | None
    eos_id: int | None
    eos_ids: frozenset[int]
    add_bos: bool
    add_eos: bool
    chat_template: str | None
    other_templates: tuple[str, ...] = ()


def end_ids(texts: Iterable[str], kinds: Iterable[int]) -> frozenset[int]:
    """Ids of the well-known texts that end generation."""
    found = {
        text: i
        for i, (text, kind) in enumerate(zip(texts, kinds, strict=True))
        if text in END_TEXTS and (kind == Kind.CONTROL or text not in _ORDINARY)
    }
    # A harmony vocabulary ends a message with <|end|> and goes on; <|return|> and <|call|> end it.
    if "<|return|>" in found and "<|call|>" in found:
        found.pop("<|end|>", None)
    return frozenset(found.values())


def ordinary_ends(texts: Iterable[str]) -> frozenset[int]:
    """Ids of the well-known ends that may be ordinary text as well."""
    return frozenset(i for i, text in enumerate(texts) if text in _ORDINARY)


def check_lengths(texts: Iterable[str]) -> None:
    """Refuses tokens so long that a short answer of a model could fill a disk.

    Raises:
      BadModelFile: a text of more than `MAX_TOKEN_CHARS` characters.
    """
    longest = max(map(len, texts), default=0)
    if longest > MAX_TOKEN_CHARS:
        raise BadModelFile(
            f"the vocabulary has a token of {longest} characters, {MAX_TOKEN_CHARS} are allowed; "
            f"fetch or convert the model again"
        )


def vocab_from_gguf(
    metadata: Mapping[str, Any], *, add_bos: bool, bos: int | None, eos: int | None
) -> Vocab:
    """Reads and checks the vocabulary of a GGUF file.

    Args:
      metadata: keys and values of the header.
      add_bos: whether this family puts bos first when the file does not say.
      bos: bos id of this family when the file does not say, or None.
      eos: eos id of this family when the file does not say, or None.

    Raises:
      BadModelFile: lists that are missing, of the wrong length or with a text twice.
    """
    keys, texts = Header(metadata, PREFIX), _texts(metadata)
    kinds = _kinds(metadata, len(texts))
    # Without kinds a file has no other sign of a control token than its text.
    ordinary = _ORDINARY if PREFIX + "token_type" in metadata else frozenset()
    by_text = CONTROL_TEXTS | END_TEXTS - ordinary
    for i, text in enumerate(texts):
        if text in by_text:
            kinds[i] = Kind.CONTROL
    ends = {i for i in (_id(metadata, key, len(texts)) for key in _END_KEYS) if i is not None}
    for i in ends & ordinary_ends(texts):
        kinds[i] = Kind.CONTROL
    ends |= end_ids(texts, kinds)
    bos_id = _id(metadata, "bos", len(texts), bos)
    eos_id = _id(metadata, "eos", len(texts), eos)
    key = "tokenizer.chat_template"
    template = Header(metadata).text(key) if metadata.get(key) is not None else None
    with_bos = keys.flag("add_bos_token", add_bos)
    with_eos = keys.flag("add_eos_token", False)
    if (with_bos and bos_id is None) or (with_eos and eos_id is None):
        raise BadModelFile("the file asks for a bos or eos token and names none; convert it again")
    return Vocab(
        texts=texts,
        kinds=kinds,
        bos_id=bos_id,
        eos_id=eos_id,
        eos_ids=frozenset(ends if eos_id is None else ends | {eos_id}),
        add_bos=with_bos,
        add_eos=with_eos,
        chat_template=template,
    )


def _texts(metadata: Mapping[str, Any]) -> list[str]:
    """Text of each token, unique and of bounded length."""
    texts = [text or f"[EMPTY_{i}]" for i, text in enumerate(strings(metadata, "tokens"))]
    if len(set(texts)) < len(texts):
        twice = collections.Counter(texts).most_common(1)[0][0]
        raise BadModelFile(f"{PREFIX}tokens holds {brief(twice)} twice; convert the model again")
    check_lengths(texts)
    return texts


def strings(metadata: Mapping[str, Any], name: str) -> list[str]:
    """The list of strings under a tokenizer key, which must be there."""
    value = metadata.get(PREFIX + name)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise BadModelFile(f"{PREFIX}{name}: a list of strings is wanted; convert the model again")
    return value


def numbers(metadata: Mapping[str, Any], name: str, n_vocab: int, default: float) -> np.ndarray:
    """One number a token under a tokenizer key; all `default` when the key is missing. `[n_vocab]`.

    Raises:
      BadModelFile: not a list of numbers, or one of another length.
    """
    if PREFIX + name not in metadata:
        return np.full(n_vocab, default)
    found = metadata[PREFIX + name]
    plain = isinstance(found, np.ndarray) or all(
        isinstance(x, int | float | np.number)
        for x in (found if isinstance(found, list) else [found])
    )
    values = np.asarray(found if plain else [])
    if values.dtype.kind not in "iuf" or values.shape != (n_vocab,):
        raise BadModelFile(
            f"{PREFIX}{name}: {n_vocab} numbers are wanted, one a token, and found is "
            f"{brief(found)}; convert the model again"
        )
    if not np.isfinite(values).all():
        raise BadModelFile(f"{PREFIX}{name} holds what is no finite number; convert it again")
    return values


def _kinds(metadata: Mapping[str, Any], n_vocab: int) -> list[int]:
    found = numbers(metadata, "token_type", n_vocab, default=Kind.NORMAL)
    if found.dtype.kind == "f" or not np.isin(found, list(Kind)).all():
        raise BadModelFile(
            f"{PREFIX}token_type holds what is no kind of token, {min(Kind)} to {max(Kind)} are; "
            f"convert the model again"
        )
    return found.tolist()


def _id(
    metadata: Mapping[str, Any], role: str, n_vocab: int, default: int | None = None
) -> int | None:
    """The id of a role; outside the vocabulary a default is none and a written id an error."""
    key = f"{PREFIX}{role}_token_id"
    value = metadata.get(key)
    if value is None:
        return default if default is not None and default < n_vocab else None
    if type(value) is int and value in (-1, 2**32 - 1):  # Both are written for "none".
        return None
    if type(value) is not int or not 0 <= value < n_vocab:
        raise BadModelFile(
            f"{key} is {brief(value)}, 0 to {n_vocab - 1} is wanted; convert it again"
        )
    return value
