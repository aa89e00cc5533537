"""SentencePiece vocabularies of GGUF files, run by the `sentencepiece` library."""

import re
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvrt.errors import BadModelFile, UsageError
from kvrt_models.header import Header
from kvrt_models.tokenizer.vocab import PREFIX, Kind, Vocab, numbers

SPACE = "\u2581"
BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
# Fields of sentencepiece_model.proto: ModelProto.pieces, trainer_spec and normalizer_spec.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_BPE = 2
_NAMELESS = (Kind.CONTROL, Kind.UNKNOWN, Kind.USER_DEFINED, Kind.UNDEFINED)


class SpmCodec:
    """Encodes and decodes pieces of text that hold no special tokens."""

    def __init__(self, vocab: Vocab, model: bytes, *, add_space_prefix: bool) -> None:
        """Loads a serialised ModelProto; raises BadModelFile if the library refuses it."""
        import sentencepiece

        self._vocab = vocab
        self._prefix = " " if add_space_prefix else ""
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise BadModelFile(f"sentencepiece refuses the vocabulary: {reason}") from error

    def encode(self, text: str, after_special: bool) -> list[int]:
        """Token ids of text without special tokens.

        Args:
          text: what to encode.
          after_special: the text follows a special token or begins the whole: it gets the space
            prefix, if the vocabulary wants one.

        Raises:
          UsageError: a character without a token, in a vocabulary without an unknown token.
        """
        prefix = self._prefix if after_special else ""
        ids = self._processor.encode(prefix + text, out_type=int)
        if len(self._vocab.texts) in ids:
            raise UsageError(
                f"the vocabulary has no token for a character of {text[:40]!a} and no unknown "
                f"token; remove it from the text"
            )
        return ids

    def token_bytes(self, token: int) -> bytes:
        """Raw bytes of a token; none for control tokens."""
        return spaced_bytes(self._vocab, token)


def spaced_bytes(vocab: Vocab, token: int) -> bytes:
    """Raw bytes of a token of a vocabulary that writes U+2581 for a space."""
    text, kind = vocab.texts[token], vocab.kinds[token]
    if kind == Kind.NORMAL:
        return text.replace(SPACE, " ").encode()
    if kind == Kind.BYTE:
        return bytes([byte_value(text)])
    return text.encode() if kind == Kind.USER_DEFINED else b""


def spm_codec(metadata: Mapping[str, Any], vocab: Vocab) -> SpmCodec:
    """Builds the codec from the file's scores and kinds."""
    scores = numbers(metadata, "scores", len(vocab.texts), default=0.0)
    if np.abs(scores).max(initial=0.0) > np.finfo(np.float32).max:
        raise BadModelFile(f"{PREFIX}scores holds a number beyond float32; convert it again")
    return SpmCodec(
        vocab,
        model_proto(vocab, scores.tolist()),
        add_space_prefix=Header(metadata, PREFIX).flag("add_space_prefix", True),
    )


def byte_value(text: str) -> int:
    """The byte that a token such as <0x0A> stands for."""
    if not BYTE_TOKEN.fullmatch(text):
        raise BadModelFile(f"byte token {text!a} is not of the form <0x0A>; convert it again")
    return int(text[3:5], 16)


def model_proto(vocab: Vocab, scores: list[float]) -> bytes:
    """The vocabulary as a serialised sentencepiece ModelProto.

    Written by hand: four kinds of fields, and `protobuf` would be one more dependency. Special
    tokens are cut out of the text before sentencepiece sees it, so they get names that no token
    has; an unknown token, which the library insists on, is added when there is none.

    Source: sentencepiece's `sentencepiece_model.proto`.
    """
    kinds = list(vocab.kinds)
    mark = "\x01"
    while any(text.startswith(mark) for text in vocab.texts):
        mark += "\x01"
    texts = [
        f"{mark}{i}" if kind in _NAMELESS else text
        for i, (text, kind) in enumerate(zip(vocab.texts, kinds, strict=True))
    ]
    unknown = kinds.index(Kind.UNKNOWN) if Kind.UNKNOWN in kinds else len(kinds)
    if unknown == len(kinds):
        texts.append(mark)
        scores = [*scores, 0.0]
        kinds.append(Kind.UNKNOWN)
    out = bytearray()
    for i, (text, score, kind) in enumerate(zip(texts, scores, kinds, strict=True)):
        if kind in _NAMELESS:
            kind = Kind.UNKNOWN if i == unknown else Kind.CONTROL
        raw = text.encode()
        piece = b"\x0a" + _varint(len(raw)) + raw + b"\x15" + struct.pack("<f", score)
        out += _message(_PIECES, piece + _number(3, kind))
    n_bytes = sum(kind == Kind.BYTE for kind in kinds)
    trainer = _number(3, _BPE) + _number(35, n_bytes == 256) + _number(40, unknown)
    # Ids of bos, eos and pad: -1 is none.
    trainer += b"".join(_number(field, (1 << 64) - 1) for field in (41, 42, 43))
    normalizer = _message(1, b"identity") + _number(3, 0) + _number(4, 0) + _number(5, 1)
    return bytes(out) + _message(_TRAINER, trainer) + _message(_NORMALIZER, normalizer)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _message(field: int, body: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(body)) + body
