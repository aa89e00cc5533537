"""Text to token ids and back, the same for every kind of model file.

`tokenizer_from_gguf` and `tokenizer_from_folder` build a `Tokenizer`; `stream.py` decodes token by
token.
"""

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kvrt.errors import BadModelFile, BadToken, UnsupportedModel, UsageError
from kvrt_models.header import brief
from kvrt_models.identity import tokenizer_digest
from kvrt_models.tokenizer.split import SplitCodec
from kvrt_models.tokenizer.vocab import PREFIX, Kind, Vocab, ordinary_ends, strings, vocab_from_gguf

if TYPE_CHECKING:
    from kvrt_models.tokenizer.hf_folder import FolderCodec

# Keys of GGUF metadata that decide how text is cut, beside the vocabulary itself.
_RULES = ("model", "pre", "merges", "scores", "add_space_prefix", "remove_extra_whitespaces")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A vocabulary and the codec that runs on it.

    Attributes:
      vocab: token texts and the ids with a role.
      codec: the library behind it.
      digest: sha256 of all that decides what a text becomes, hexadecimal.
      beyond: texts of added tokens, by id, for which the model's embedding has no row.
    """

    vocab: Vocab
    codec: "SplitCodec | FolderCodec"
    digest: str
    beyond: Mapping[int, str] = dataclasses.field(default_factory=dict)

    @property
    def n_vocab(self) -> int:
        """Tokens in the vocabulary."""
        return len(self.vocab.texts)

    @property
    def bos_id(self) -> int | None:
        """Token that begins a text."""
        return self.vocab.bos_id

    @property
    def eos_id(self) -> int | None:
        """Token that ends a text."""
        return self.vocab.eos_id

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every token that ends generation: end of text, of a chat turn, of a message."""
        return self.vocab.eos_ids

    @property
    def add_bos(self) -> bool:
        """Whether `encode` puts bos_id first."""
        return self.vocab.add_bos

    @property
    def chat_template(self) -> str | None:
        """The model's chat template, for `kvrt_models.chat.render_template`.

        Raises:
          UsageError: the model has several, and none is the default.
        """
        if self.vocab.chat_template is None and self.vocab.other_templates:
            names = ", ".join(map(brief, self.vocab.other_templates[:8]))
            raise UsageError(
                f"the model's chat templates are {names} and none is named 'default'; save the "
                "wanted one as chat_template.jinja in the model's folder, or leave out --chat"
            )
        return self.vocab.chat_template

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Token ids of a text.

        Args:
          text: any text.
          add_special: put bos first and eos last where the model wants them.
          parse_special: take the text of a control token for the token itself; off, a text
            cannot smuggle one in.

        Raises:
          UsageError: text that is no Unicode, that the vocabulary cannot express, or with a token
            for which the embedding has no row.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"the text is not valid Unicode at character {error.start} "
                f"({text[error.start]!a}); give UTF-8"
            ) from error
        ids = self.codec.encode(text, add_special=add_special, parse_special=parse_special)
        if self.beyond and (absent := [i for i in ids if i in self.beyond]):
            raise UsageError(
                f"the text has the token {brief(self.beyond[absent[0]])}, id {absent[0]}, and the "
                f"model's embedding has {self.n_vocab} rows; take it out of the text"
            )
        return ids

    def token_bytes(self, token: int) -> bytes:
        """Raw bytes of a token, perhaps part of a character; none for control tokens."""
        self._check(token)
        # The codec does not know the padding of `for_embedding`.
        if self.vocab.kinds[token] == Kind.UNUSED:
            return b""
        return self.codec.token_bytes(token)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens: their bytes joined, bytes that are no UTF-8 as U+FFFD.

        Control tokens give nothing. The space that some vocabularies put before a text stays: what
        is decoded is mostly the continuation of another text.
        """
        return b"".join(map(self.token_bytes, tokens)).decode(errors="replace")

    def piece(self, token: int) -> str:
        """A token for people to read: its text, or its name if it is a control token."""
        return self.decode([token]) or self.vocab.texts[token]

    def for_embedding(self, n_rows: int) -> "Tokenizer":
        """The tokenizer with one id for each row of a model's embedding.

        Added tokens at or above `n_rows`, as a model of text keeps them for images, cannot be
        encoded; rows of a padded embedding stand for no text.

        Raises:
          BadModelFile: words of the vocabulary, or bos, lie at or above `n_rows`.
        """
        vocab = self.vocab
        words = (Kind.NORMAL, Kind.BYTE)
        if any(kind in words for kind in vocab.kinds[n_rows:]) or (
            vocab.add_bos and vocab.bos_id is not None and vocab.bos_id >= n_rows
        ):
            raise BadModelFile(
                f"the tokenizer has {self.n_vocab} tokens, the embedding {n_rows} rows; they "
                "belong to different models"
            )
        padding = range(self.n_vocab, n_rows)
        inside = range(n_rows)
        resized = dataclasses.replace(
            vocab,
            texts=[*vocab.texts[:n_rows], *(f"[PAD{i}]" for i in padding)],
            kinds=[*vocab.kinds[:n_rows], *(Kind.UNUSED for _ in padding)],
            bos_id=vocab.bos_id if vocab.bos_id in inside else None,
            eos_id=vocab.eos_id if vocab.eos_id in inside else None,
            eos_ids=vocab.eos_ids.intersection(inside),
        )
        beyond = dict(enumerate(vocab.texts[n_rows:], n_rows))
        return dataclasses.replace(self, vocab=resized, beyond=beyond)

    def _check(self, token: int) -> None:
        if not 0 <= token < self.n_vocab:
            raise BadToken(
                f"token id {token} is outside the vocabulary, 0 to {self.n_vocab - 1}; use the "
                f"tokenizer of the model that made it"
            )


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Builds the tokenizer that the metadata of a GGUF file describes.

    Raises:
      BadModelFile: keys that are missing or contradict each other.
      UnsupportedModel: a kind of tokenizer or pre-tokenizer that is not known.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model is not None and not isinstance(model, str):
        raise BadModelFile(
            f"tokenizer.ggml.model is {brief(model)}, a text is wanted; convert the model again"
        )
    if model in ("gpt2", "gemma4"):
        from kvrt_models.tokenizer import bpe
        from kvrt_models.tokenizer.pre_tokenizers import pre_tokenizer

        # Files without the key are older than it, and llama.cpp takes "default" for them.
        name = metadata.get("tokenizer.ggml.pre", "default")
        pre = pre_tokenizer(model if model == "gemma4" else name)
        vocab = vocab_from_gguf(metadata, add_bos=pre.add_bos, bos=None, eos=None)
        codec = SplitCodec(vocab, bpe.BpeCodec(vocab, strings(metadata, "merges"), pre))
        return Tokenizer(vocab=vocab, codec=codec, digest=_digest(vocab, metadata))
    if model == "llama":
        from kvrt_models.tokenizer import spm

        vocab = vocab_from_gguf(metadata, add_bos=True, bos=1, eos=2)
        codec = SplitCodec(vocab, spm.spm_codec(metadata, vocab))
        return Tokenizer(vocab=vocab, codec=codec, digest=_digest(vocab, metadata))
    if model is None:
        raise BadModelFile("the file has no tokenizer.ggml.model; use a file with its vocabulary")
    raise UnsupportedModel(
        f"tokenizer.ggml.model is {brief(model)}; gpt2, llama and gemma4 are known; use the model "
        f"as a Hugging Face folder instead"
    )


def tokenizer_from_folder(path: str | os.PathLike[str]) -> Tokenizer:
    """Builds the tokenizer of a Hugging Face folder from its tokenizer.json.

    Raises:
      BadModelFile: files that are missing or damaged.
      UnsupportedModel: a decoder that is neither byte-level nor SentencePiece.
    """
    from kvrt_models.tokenizer import hf_folder as hf_tokenizer

    vocab, codec = hf_tokenizer.read_folder(path)
    return Tokenizer(vocab=vocab, codec=codec, digest=tokenizer_digest(vocab, [codec.rules]))


def _digest(vocab: Vocab, metadata: Mapping[str, Any]) -> str:
    # As in `tokenizer_digest`: they were control tokens, too.
    kinds = list(vocab.kinds)
    for i in ordinary_ends(vocab.texts):
        kinds[i] = Kind.CONTROL
    vocab = dataclasses.replace(vocab, kinds=kinds)
    rules = [json.dumps(metadata.get(PREFIX + name), default=_listed).encode() for name in _RULES]
    return tokenizer_digest(vocab, rules)


def _listed(value: np.ndarray) -> list[Any]:
    """An array as JSON has it."""
    return value.tolist()
