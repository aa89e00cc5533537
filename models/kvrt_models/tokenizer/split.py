"""Cuts special tokens out of a text before a codec encodes what lies between them."""

from typing import TYPE_CHECKING

from kvrt_models.tokenizer.vocab import Kind, Vocab

if TYPE_CHECKING:
    from kvrt_models.tokenizer.bpe import BpeCodec
    from kvrt_models.tokenizer.spm import SpmCodec

_CUT_OUT = (Kind.CONTROL, Kind.USER_DEFINED, Kind.UNKNOWN)


class SplitCodec:
    """Encodes text with special tokens, for codecs that know of none.

    User-defined tokens are always cut out, control tokens only when they are asked for. The longest
    are looked for first, over the whole text.

    Source: llama.cpp `tokenizer_st_partition`.
    """

    def __init__(self, vocab: Vocab, inner: "BpeCodec | SpmCodec") -> None:
        """Sorts the special tokens of the vocabulary by length."""
        self._vocab = vocab
        self._inner = inner
        special = [i for i, kind in enumerate(vocab.kinds) if kind in _CUT_OUT]
        self._all = sorted(special, key=lambda i: -len(vocab.texts[i].encode()))
        self._user = [i for i in self._all if vocab.kinds[i] == Kind.USER_DEFINED]

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Ids of a text, with bos and eos where the vocabulary wants them."""
        vocab = self._vocab
        out = [vocab.bos_id] if add_special and vocab.add_bos and vocab.bos_id is not None else []
        after_special = True
        for part in self._parts(text, self._all if parse_special else self._user):
            if isinstance(part, int):
                out.append(part)
            else:
                out += self._inner.encode(part, after_special)
            after_special = isinstance(part, int)
        if add_special and vocab.add_eos and vocab.eos_id is not None:
            out.append(vocab.eos_id)
        return out

    def token_bytes(self, token: int) -> bytes:
        """Raw bytes of a token."""
        return self._inner.token_bytes(token)

    def _parts(self, text: str, special: list[int]) -> list[int | str]:
        """The text as ids of special tokens and the non-empty stretches between them."""
        parts: list[int | str] = [text] if text else []
        for token in special:
            name = self._vocab.texts[token]
            if name not in text:
                continue
            cut: list[int | str] = []
            for part in parts:
                if isinstance(part, int):
                    cut.append(part)
                    continue
                for i, stretch in enumerate(part.split(name)):
                    cut += [token] * (i > 0) + [stretch] * (stretch != "")
            parts = cut
        return parts
