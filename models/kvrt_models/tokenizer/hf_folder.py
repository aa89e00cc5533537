"""The tokenizer of a Hugging Face folder, run by the `tokenizers` library as it stands."""

import collections
import json
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvrt.errors import BadModelFile, KvrtError, UnsupportedModel, UsageError
from kvrt_models.header import Header, brief
from kvrt_models.hf.json_file import parse_json, read_json, read_text_file
from kvrt_models.tokenizer.bpe import byte_level_bytes
from kvrt_models.tokenizer.harmless import is_harmless
from kvrt_models.tokenizer.library import LibraryTokenizer
from kvrt_models.tokenizer.process import ProcessLimits, TokenizerProcess
from kvrt_models.tokenizer.spm import BYTE_TOKEN, spaced_bytes
from kvrt_models.tokenizer.vocab import Kind, Vocab, check_lengths, end_ids

MAX_VOCAB = 1 << 20
# Of several named chat templates, the one that transformers takes as well.
DEFAULT_TEMPLATE = "default"


_LIMITS = ProcessLimits()


# What runs a tokenizer.json, here or elsewhere.
Backend = LibraryTokenizer | TokenizerProcess


class FolderCodec:
    """Encodes with a tokenizer.json; special tokens are the library's business."""

    def __init__(self, backend: Backend, vocab: Vocab, *, byte_level: bool) -> None:
        """Keeps the tokenizer."""
        self._backend = backend
        self._vocab = vocab
        self._lock = threading.Lock()
        self._byte_level = byte_level

    @property
    def rules(self) -> bytes:
        """All that decides how text is cut, as tokenizer.json would have it."""
        return self._backend.rules.encode()

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Ids of a text.

        Raises:
          UsageError: the library cannot encode it.
        """
        # A setting of the tokenizer goes with each call, hence the lock.
        with self._lock:
            try:
                return self._backend.encode(
                    text, add_special=add_special, parse_special=parse_special
                )
            except KvrtError:
                raise
            except Exception as error:  # The library raises nothing more special than this.
                raise UsageError(
                    f"tokenizer.json cannot encode a text of {len(text)} characters: "
                    f"{_one_line(error)}; use a GGUF file of the model"
                ) from error

    def token_bytes(self, token: int) -> bytes:
        """Raw bytes of a token; none for control tokens."""
        text, kind = self._vocab.texts[token], self._vocab.kinds[token]
        if kind == Kind.NORMAL and self._byte_level:
            return byte_level_bytes(text)
        return spaced_bytes(self._vocab, token)


def read_folder(
    path: str | os.PathLike[str], *, limits: ProcessLimits = _LIMITS
) -> tuple[Vocab, FolderCodec]:
    """Reads tokenizer.json and the small files beside it.

    Args:
      path: the folder.
      limits: on the process of a tokenizer.json that could take for ever.

    Raises:
      BadModelFile: tokenizer.json is missing or damaged, or another file is damaged.
      UnsupportedModel: a decoder that is neither byte-level nor SentencePiece.
    """
    path, file = Path(path), Path(path) / "tokenizer.json"
    backend, rules = _build(file, limits)
    byte_level = _is_byte_level(rules, file)
    settings = _optional(path / "tokenizer_config.json")
    config = _optional(path / "config.json")
    generation = _optional(path / "generation_config.json")
    ids = _model_ids(rules, file)
    texts, kinds = _tokens(ids, backend.added, config, byte_level=byte_level)
    known = ids | {text: i for i, text, _ in backend.added}
    bos_id = _special(known, settings, config, "bos")
    eos_id = _special(known, settings, config, "eos")
    ends = {*end_ids(texts, kinds), *_ids(generation, "eos"), *_ids(config, "eos")}
    ends |= set() if eos_id is None else {eos_id}
    templates, around = _templates(path, settings), _around(backend, file)
    _check_inside((bos_id, *ends, *around), len(texts), path)
    vocab = Vocab(
        texts=texts,
        kinds=kinds,
        bos_id=bos_id,
        eos_id=eos_id,
        eos_ids=frozenset(ends),
        add_bos=bos_id is not None and around[:1] == [bos_id],
        add_eos=eos_id is not None and around[-1:] == [eos_id],
        chat_template=templates.get(DEFAULT_TEMPLATE),
        other_templates=tuple(sorted(set(templates) - {DEFAULT_TEMPLATE})),
    )
    return vocab, FolderCodec(backend, vocab, byte_level=byte_level)


def _build(file: Path, limits: ProcessLimits) -> tuple[Backend, dict[str, Any]]:
    """The tokenizer of a file and its rules, in a process of its own where they are not known."""
    if not file.is_file():
        raise BadModelFile(
            f"{file}: missing; save the model with its fast tokenizer, or use a GGUF file"
        )
    text = read_text_file(file)
    rules = parse_json(file, text)
    try:
        if not is_harmless(rules):
            process = TokenizerProcess(text, limits)
            # As the library writes them: older files leave out what they do not need.
            return process, json.loads(process.rules)
        return LibraryTokenizer(text), rules
    except KvrtError as error:
        raise BadModelFile(f"{file}: {error}; use a GGUF file of the model") from error
    except Exception as error:  # The library raises nothing more special than this.
        raise BadModelFile(
            f"{file}: refused by the tokenizers library: {_one_line(error)}; use a GGUF file of "
            f"the model"
        ) from error


def _check_inside(ids: Iterable[int | None], n_vocab: int, path: Path) -> None:
    outside = [i for i in ids if i is not None and not 0 <= i < n_vocab]
    if outside:
        raise BadModelFile(
            f"{path}: bos, eos or template id {outside[0]} is outside the vocabulary of "
            f"{n_vocab} tokens; fetch the folder again"
        )


def _around(backend: Backend, file: Path) -> list[int]:
    """The ids that are put around a text, found with none."""
    try:
        return backend.encode("", add_special=True, parse_special=False)
    except UsageError as error:
        raise BadModelFile(f"{file}: {error}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _is_byte_level(rules: dict[str, Any], file: Path) -> bool:
    """True for byte-level tokens, False for SentencePiece's with a mark for the space."""
    state = rules.get("decoder") or {}
    steps = [step["type"] for step in state.get("decoders", [state]) if "type" in step]
    if "ByteLevel" in steps:
        return True
    if {"ByteFallback", "Metaspace", "Replace"} & set(steps):
        return False
    raise UnsupportedModel(
        f"{file}: decoder {steps or 'none'}; byte-level and SentencePiece are known; use a GGUF "
        f"file of the model"
    )


def _model_ids(rules: dict[str, Any], file: Path) -> dict[str, int]:
    """Text -> id of the tokens that the model of a tokenizer.json has, added ones left out."""
    vocab = rules["model"]["vocab"]
    if isinstance(vocab, list):  # Unigram: a text and a score each, in order.
        vocab = {text: i for i, (text, _) in enumerate(vocab)}
    if len(set(vocab.values())) < len(vocab):
        twice, n = collections.Counter(vocab.values()).most_common(1)[0]
        raise BadModelFile(f"{file}: {n} tokens have the id {twice}; fetch the file again")
    return vocab


def _tokens(
    ids: dict[str, int],
    added: list[tuple[int, str, bool]],
    config: dict[str, Any],
    *,
    byte_level: bool,
) -> tuple[list[str], list[int]]:
    """Texts and kinds up to the size of the model's embedding, which may be padded."""
    padded = Header(config).whole("vocab_size", default=1)
    n_vocab = max(padded, *(i + 1 for i in ids.values()), *(i + 1 for i, _, _ in added), 1)
    if n_vocab > MAX_VOCAB:
        raise BadModelFile(
            f"the vocabulary has {n_vocab} ids, at most {MAX_VOCAB} are allowed; fetch the folder "
            f"again"
        )
    texts = [f"[PAD{i}]" for i in range(n_vocab)]
    kinds = [int(Kind.UNUSED)] * n_vocab
    for text, i in ids.items():
        is_byte = not byte_level and BYTE_TOKEN.fullmatch(text)
        texts[i], kinds[i] = text, Kind.BYTE if is_byte else Kind.NORMAL
    for i, text, special in added:
        if kinds[i] != Kind.UNUSED and texts[i] != text:
            raise BadModelFile(
                f"tokenizer.json gives the id {i} to two tokens, {brief(texts[i])} and "
                f"{brief(text)}; fetch the folder again"
            )
        texts[i], kinds[i] = text, Kind.CONTROL if special else Kind.USER_DEFINED
    check_lengths(texts)
    return texts, kinds


def _special(
    ids: dict[str, int], settings: dict[str, Any], config: dict[str, Any], role: str
) -> int | None:
    """The id of bos or eos: by name from the tokenizer's settings, else by id from the config."""
    name = settings.get(f"{role}_token")
    if isinstance(name, dict):
        name = name.get("content")
    if name is None:
        found = _ids(config, role)
        return found[0] if len(found) == 1 else None
    if not isinstance(name, str):
        raise BadModelFile(f"{role}_token is {brief(name)}, a text is wanted; fetch the file again")
    if name not in ids:
        raise BadModelFile(f"{role}_token is {brief(name)}, which tokenizer.json does not have")
    return ids[name]


def _ids(config: dict[str, Any], role: str) -> list[int]:
    """The ids that a config names for a role: one, a list, or none."""
    key = f"{role}_token_id"
    value = config.get(key)
    values = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(item) is not int for item in values):
        raise BadModelFile(
            f"{key} is {brief(value)}, an id or a list of ids is wanted; fetch the file again"
        )
    return values


def _templates(path: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name: a file of its own, or an entry of the tokenizer's settings."""
    file = path / "chat_template.jinja"
    if file.exists():
        return {DEFAULT_TEMPLATE: read_text_file(file)}
    value = settings.get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT_TEMPLATE: value}
    source, templates = path / "tokenizer_config.json", {}
    for item in value if isinstance(value, list) else [None]:
        name, text = map(item.get, ("name", "template")) if isinstance(item, dict) else (0, 0)
        if not isinstance(name, str) or not isinstance(text, str):
            raise BadModelFile(
                f"{source}: chat_template is {brief(value)}; a text, or a list of objects with a "
                "name and a template, is wanted; fetch the file again"
            )
        if name in templates:
            raise BadModelFile(f"{source}: two chat templates are named {brief(name)}; fetch again")
        templates[name] = text
    return templates
