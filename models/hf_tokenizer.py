"""The tokenizer of a Hugging Face folder, run by the `tokenizers` library as it stands."""

import json
import os
import threading
from pathlib import Path
from typing import Any

from kvrt.errors import BadModelFile, UnsupportedModel
from models.bpe import byte_table
from models.json_file import read_json
from models.spm import SPACE, byte_value
from models.vocab import Kind, Vocab, end_ids

MAX_VOCAB = 1 << 22


class FolderCodec:
    """Encodes with a tokenizer.json; special tokens are the library's business."""

    def __init__(self, tokenizer: Any, vocab: Vocab, *, byte_level: bool) -> None:
        """Keeps the tokenizer; raises BadModelFile as `byte_table`."""
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._lock = threading.Lock()
        normal = [t for t, k in zip(vocab.texts, vocab.kinds, strict=True) if k == Kind.NORMAL]
        self._table = byte_table(normal) if byte_level else None

    @property
    def rules(self) -> bytes:
        """All that decides how text is cut, as tokenizer.json would have it."""
        return self._tokenizer.to_str().encode()

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Ids of a text."""
        # The switch belongs to the tokenizer and not to the call, hence the lock.
        with self._lock:
            self._tokenizer.encode_special_tokens = not parse_special
            return self._tokenizer.encode(text, add_special_tokens=add_special).ids

    def token_bytes(self, token: int) -> bytes:
        """Raw bytes of a token; none for control tokens."""
        text, kind = self._vocab.texts[token], self._vocab.kinds[token]
        if kind == Kind.USER_DEFINED:
            return text.encode()
        if kind == Kind.BYTE:
            return bytes([byte_value(text)])
        if kind != Kind.NORMAL:
            return b""
        if self._table is None:
            return text.replace(SPACE, " ").encode()
        return text.translate(self._table).encode("latin-1")


def read_folder(path: str | os.PathLike[str]) -> tuple[Vocab, FolderCodec]:
    """Reads tokenizer.json and the small files beside it.

    Raises:
      BadModelFile: tokenizer.json is missing or damaged, or another file is damaged.
      UnsupportedModel: a decoder that is neither byte-level nor SentencePiece.
    """
    import tokenizers

    path = Path(path)
    file = path / "tokenizer.json"
    if not file.is_file():
        raise BadModelFile(
            f"{file}: missing; save the model with its fast tokenizer, or use a GGUF file"
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # The library raises nothing more special than this.
        raise BadModelFile(f"{file}: refused by the tokenizers library: {error}") from error
    _take_whole_texts(tokenizer)
    byte_level = _is_byte_level(tokenizer, file)
    settings = _optional(path / "tokenizer_config.json")
    config = _optional(path / "config.json")
    generation = _optional(path / "generation_config.json")
    texts, kinds = _tokens(tokenizer, config, byte_level=byte_level)
    bos_id = _special(tokenizer, settings, config, "bos")
    eos_id = _special(tokenizer, settings, config, "eos")
    ends = {*end_ids(texts), *_ids(generation), *_ids(config)}
    ends |= set() if eos_id is None else {eos_id}
    outside = [i for i in (bos_id, *ends) if i is not None and not 0 <= i < len(texts)]
    if outside:
        raise BadModelFile(
            f"{path}: bos or eos id {outside[0]} is outside the vocabulary of {len(texts)} tokens; "
            f"fetch the folder again"
        )
    around = tokenizer.encode("", add_special_tokens=True).ids
    vocab = Vocab(
        texts=texts,
        kinds=kinds,
        bos_id=bos_id,
        eos_id=eos_id,
        eos_ids=frozenset(ends),
        add_bos=bos_id is not None and around[:1] == [bos_id],
        add_eos=eos_id is not None and around[-1:] == [eos_id],
        chat_template=_template(path, settings),
    )
    return vocab, FolderCodec(tokenizer, vocab, byte_level=byte_level)


def _take_whole_texts(tokenizer: Any) -> None:
    """Resets what files keep from training: cut and padded texts, merges left out at random."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None) is not None:
        # The model is shared with the tokenizer, so this reaches it.
        tokenizer.model.dropout = None


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _is_byte_level(tokenizer: Any, file: Path) -> bool:
    """True for byte-level tokens, False for SentencePiece's with a mark for the space."""
    if tokenizer.decoder is None:
        state = {}
    else:
        state = json.loads(tokenizer.decoder.__getstate__())
    steps = [step["type"] for step in state.get("decoders", [state]) if "type" in step]
    if "ByteLevel" in steps:
        return True
    if {"ByteFallback", "Metaspace", "Replace"} & set(steps):
        return False
    raise UnsupportedModel(
        f"{file}: decoder {steps or 'none'}; byte-level and SentencePiece are known; use a GGUF "
        f"file of the model"
    )


def _tokens(
    tokenizer: Any, config: dict[str, Any], *, byte_level: bool
) -> tuple[list[str], list[int]]:
    """Texts and kinds up to the size of the model's embedding, which may be padded."""
    ids = tokenizer.get_vocab(with_added_tokens=True)
    padded = config.get("vocab_size")
    n_vocab = max([padded if isinstance(padded, int) else 0, *(i + 1 for i in ids.values())])
    if n_vocab > MAX_VOCAB:
        raise BadModelFile(
            f"the vocabulary has {n_vocab} ids, at most {MAX_VOCAB} are allowed; fetch the folder "
            f"again"
        )
    texts = [f"[PAD{i}]" for i in range(n_vocab)]
    kinds = [int(Kind.UNUSED)] * n_vocab
    for text, i in ids.items():
        is_byte = not byte_level and len(text) == 6 and text.startswith("<0x")
        texts[i], kinds[i] = text, Kind.BYTE if is_byte else Kind.NORMAL
    for i, added in tokenizer.get_added_tokens_decoder().items():
        texts[i], kinds[i] = added.content, Kind.CONTROL if added.special else Kind.USER_DEFINED
    return texts, kinds


def _special(
    tokenizer: Any, settings: dict[str, Any], config: dict[str, Any], role: str
) -> int | None:
    """The id of bos or eos: by name from the tokenizer's settings, else by id from the config."""
    name = settings.get(f"{role}_token")
    if isinstance(name, dict):
        name = name.get("content")
    if isinstance(name, str):
        token = tokenizer.token_to_id(name)
        if token is None:
            raise BadModelFile(f"{role}_token is {name!r}, which tokenizer.json does not have")
        return token
    token = config.get(f"{role}_token_id")
    return token if isinstance(token, int) else None


def _ids(config: dict[str, Any]) -> set[int]:
    value = config.get("eos_token_id")
    values = value if isinstance(value, list) else [value]
    return {item for item in values if isinstance(item, int)}


def _template(path: Path, settings: dict[str, Any]) -> str | None:
    """The default chat template: a file of its own, or an entry of the tokenizer's settings."""
    file = path / "chat_template.jinja"
    if file.exists():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BadModelFile(f"{file}: cannot be read: {error}") from error
    value = settings.get("chat_template")
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None
