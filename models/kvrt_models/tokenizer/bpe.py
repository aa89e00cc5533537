"""Byte-level BPE of GGUF files, run by the `tokenizers` library."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvrt.errors import BadModelFile, UnsupportedModel, UsageError
from kvrt_models.header import brief
from kvrt_models.tokenizer.vocab import Kind, Vocab, strings


@dataclasses.dataclass(frozen=True)
class PreTokenizer:
    """How text is cut into words before merges apply.

    Attributes:
      patterns: regular expressions; each cuts the pieces that the one before left.
      whole_words: a word that is a token as it stands is taken without merging.
      add_bos: files that do not say otherwise put bos first.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_SHORT_FORMS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_KINDS = {
    "gpt2": PreTokenizer((_GPT2,)),
    "digits": PreTokenizer((r"\p{N}", _GPT2)),
    "llama3": PreTokenizer((_SHORT_FORMS + _WORD + r"|\p{N}{1,3}" + _TAIL,), True, True),
    "dbrx": PreTokenizer((_SHORT_FORMS + _WORD + r"|\p{N}{1,3}" + _TAIL,)),
    "qwen2": PreTokenizer((_SHORT_FORMS + _WORD + r"|\p{N}" + _TAIL,)),
    "tekken": PreTokenizer((_TEKKEN,), True, True),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}
# `tokenizer.ggml.pre` -> kind. Source: llama.cpp `llama-vocab.cpp`; tekken's pattern is that of
# the model's own tokenizer.json, which llama.cpp approximates outside ASCII.
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    name: _KINDS[kind]
    for kind, names in {
        "gpt2": "gpt-2 phi-2 mpt olmo jais trillion exaone4 a.x-4.0 mellum gigachat",
        "digits": "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
        "llama3": "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
        "dbrx": "dbrx smaug-bpe glm4 chatglm-bpe",
        "qwen2": "qwen2 deepseek-r1-qwen kormo megrez stablelm2 hunyuan solar-open grok-2",
        "tekken": "tekken",
        "default": "default",
    }.items()
    for name in names.split()
}


def byte_alphabet() -> dict[str, int]:
    """Character -> byte of the byte-level alphabet.

    Printable Latin-1 characters stand for themselves, the other 68 bytes for U+0100 onwards.

    Source: GPT-2's `bytes_to_unicode`.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(rest)}


def byte_table(texts: Iterable[str]) -> dict[int, int]:
    """The table for `str.translate` that turns byte-level tokens into Latin-1 text of their bytes.

    Raises:
      BadModelFile: one of the tokens has a character outside the byte-level alphabet.
    """
    alphabet = byte_alphabet()
    strange = set("".join(texts)) - alphabet.keys()
    if strange:
        raise BadModelFile(
            f"a token holds {min(strange)!a}, which no byte-level vocabulary has; convert the "
            f"model again"
        )
    return {ord(char): byte for char, byte in alphabet.items()}


class BpeCodec:
    """Encodes and decodes pieces of text that hold no special tokens."""

    def __init__(self, vocab: Vocab, merges: Sequence[str], pre: PreTokenizer) -> None:
        """Builds the library's tokenizer; raises BadModelFile as `byte_table` and for merges."""
        self._vocab = vocab
        self._table = byte_table(
            text for text, kind in zip(vocab.texts, vocab.kinds, strict=True) if kind == Kind.NORMAL
        )
        ids = {text: i for i, text in enumerate(vocab.texts)}
        self._tokenizer = _build(ids, [_pair(merge, ids) for merge in merges], pre)
        self._known = bytes(byte for char, byte in byte_alphabet().items() if char in ids)

    def encode(self, text: str, after_special: bool) -> list[int]:
        """Token ids of text without special tokens; `after_special` changes nothing here.

        Raises:
          UsageError: a byte of the text has no token, so it would be lost.
        """
        raw = text.encode()
        lost = raw.translate(None, self._known)
        if lost:
            at = len(raw[: raw.index(lost[0])].decode(errors="ignore"))
            raise UsageError(
                f"the vocabulary has no token for character {text[at]!a} at {at}; remove it from "
                f"the text"
            )
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def token_bytes(self, token: int) -> bytes:
        """Raw bytes of a token; none for control tokens."""
        text, kind = self._vocab.texts[token], self._vocab.kinds[token]
        if kind == Kind.NORMAL:
            return text.translate(self._table).encode("latin-1")
        return text.encode() if kind == Kind.USER_DEFINED else b""


def bpe_codec(metadata: Mapping[str, Any], vocab: Vocab, pre: PreTokenizer) -> BpeCodec:
    """Builds the codec from the file's merges."""
    return BpeCodec(vocab, strings(metadata, "merges"), pre)


def pre_tokenizer(name: Any) -> PreTokenizer:
    """The pre-tokenizer of that GGUF name; an empty one is "default".

    Raises:
      UnsupportedModel: no text, or a name that is not in `PRE_TOKENIZERS`.
    """
    if isinstance(name, str) and not name:
        name = "default"
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise UnsupportedModel(
            f"tokenizer.ggml.pre is {brief(name)}; known are {', '.join(sorted(PRE_TOKENIZERS))}; "
            f"use the model as a Hugging Face folder instead"
        )
    return PRE_TOKENIZERS[name]


def _pair(merge: str, ids: Mapping[str, int]) -> tuple[str, str]:
    cut = merge.find(" ", 1)
    left, right = merge[:cut], merge[cut + 1 :]
    if cut < 0 or left not in ids or right not in ids or left + right not in ids:
        raise BadModelFile(
            f"merge {merge!a} joins or makes what is no token; convert the model again"
        )
    return left, right


def _build(ids: dict[str, int], merges: list[tuple[str, str]], pre: PreTokenizer) -> Any:
    import tokenizers
    from tokenizers import models, pre_tokenizers

    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=ids, merges=merges, ignore_merges=pre.whole_words)
    )
    steps: list[Any] = [
        pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in pre.patterns
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return tokenizer
