"""BPE of GGUF files, on bytes or on text with byte tokens, run by the `tokenizers` library."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvrt.errors import BadModelFile, UsageError
from kvrt_models.tokenizer.pre_tokenizers import PreTokenizer
from kvrt_models.tokenizer.spm import SPACE, spaced_bytes
from kvrt_models.tokenizer.vocab import Kind, Vocab


def byte_alphabet() -> dict[str, int]:
    """Character -> byte of the byte-level alphabet.

    Printable Latin-1 characters stand for themselves, the other 68 bytes for U+0100 onwards.

    Source: GPT-2's `bytes_to_unicode`.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(rest)}


_BYTES = byte_alphabet()


def byte_level_bytes(text: str) -> bytes:
    """Raw bytes of a byte-level token; one with other characters stands for itself.

    Source: the `ByteLevel` decoder of the `tokenizers` library.
    """
    try:
        return bytes(_BYTES[char] for char in text)
    except KeyError:
        return text.encode()


class BpeCodec:
    """Encodes and decodes pieces of text that hold no special tokens.

    Tokens are of bytes, or of UTF-8 text with U+2581 for a space beside one token for each byte.
    """

    def __init__(self, vocab: Vocab, merges: Sequence[str], pre: PreTokenizer) -> None:
        """Builds the library's tokenizer; raises BadModelFile for merges and lacking bytes."""
        self._vocab, self._spaced = vocab, pre.spaced
        ids = {text: i for i, text in enumerate(vocab.texts)}
        strange = set() if pre.spaced else set("".join(merges)) - _BYTES.keys() - {" "}
        lacking = [i for i in range(256) if pre.spaced and f"<0x{i:02X}>" not in ids]
        if strange:
            raise BadModelFile(
                f"a merge holds {min(strange)!a}, which no byte-level vocabulary has; convert the "
                f"model again"
            )
        if lacking:
            raise BadModelFile(
                f"the vocabulary has no token for byte {lacking[0]:#04x}; convert the model again"
            )
        self._tokenizer = _build(ids, [_pair(merge, ids) for merge in merges], pre)
        known = range(256) if pre.spaced else [x for char, x in _BYTES.items() if char in ids]
        self._known = bytes(known)

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
        if self._spaced:
            return spaced_bytes(self._vocab, token)
        text, kind = self._vocab.texts[token], self._vocab.kinds[token]
        if kind == Kind.NORMAL:
            return byte_level_bytes(text)
        return text.encode() if kind == Kind.USER_DEFINED else b""


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
    from tokenizers import models, normalizers, pre_tokenizers

    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab=ids, merges=merges, ignore_merges=pre.whole_words, byte_fallback=pre.spaced
        )
    )
    steps: list[Any] = [
        pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in pre.patterns
    ]
    if pre.spaced:
        tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    else:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return tokenizer
