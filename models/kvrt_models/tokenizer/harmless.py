"""Which tokenizer.json files are harmless: their components are known, and their sizes bounded.

A file is a pipeline of components by name, and some can be made to take for ever, or all memory, on
a text: a regular expression that backtracks, replacements that double a text forty times, a
template of ten million tokens. Files of models that people use have few kinds; those are listed
here, and others run in a process of their own (`kvrt_models.tokenizer.process`).

Source: the format is that of the `tokenizers` library, `Tokenizer.to_str`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from kvrt_models.tokenizer.pre_tokenizers import PRE_TOKENIZERS

_KEYS = frozenset(
    "version truncation padding added_tokens normalizer pre_tokenizer post_processor decoder "
    "model".split()
)
MAX_ADDED = 1 << 16
MAX_ADDED_CHARS = 1 << 20
MAX_MERGES = 1 << 22
MAX_STEPS = 16
MAX_TEXT = 256
MAX_GROWTH = 16

_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKS = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# Expressions of models in use, beside those that GGUF names stand for. They run in linear time.
PATTERNS = frozenset(pattern for kind in PRE_TOKENIZERS.values() for pattern in kind.patterns) | {
    rf"{_SHORT}|{_MARKS}\p{{L}}+|\p{{N}}{{1,3}}{_REST}",  # Llama 3
    rf"{_SHORT}|{_MARKS}\p{{L}}+|\p{{N}}{_REST}",  # Qwen 2
    # gpt-oss
    rf"{_MARKS}{_UPPER}*{_LOWER}+{_SHORT}?|{_MARKS}{_UPPER}+{_LOWER}*{_SHORT}?|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"\p{N}{1,3}",
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
}


def is_harmless(rules: Mapping[str, Any]) -> bool:
    """Whether every component is known, and takes time and memory in proportion to a text.

    Args:
      rules: content of a tokenizer.json; anything may stand there.
    """
    return (
        set(rules) <= _KEYS
        and _added(rules.get("added_tokens"))
        and _model(rules.get("model"))
        and _steps(rules.get("normalizer"), "normalizers", _normalizer)
        and (growth := _growth(rules.get("normalizer"))) <= MAX_GROWTH
        # Added tokens are normalised as well, and their automaton is built of that.
        and growth * sum(len(t["content"]) for t in rules["added_tokens"]) <= MAX_ADDED_CHARS
        and _steps(rules.get("pre_tokenizer"), "pretokenizers", _pre_tokenizer)
        and _steps(rules.get("post_processor"), "processors", _post_processor)
        and _steps(rules.get("decoder"), "decoders", _decoder)
    )


def _added(value: Any) -> bool:
    if not isinstance(value, list) or len(value) > MAX_ADDED:
        return False
    return all(isinstance(token, dict) and _text(token.get("content")) for token in value)


def _text(value: Any) -> bool:
    """Whether a value is a short text, and not none."""
    return isinstance(value, str) and 0 < len(value) <= MAX_TEXT


def _model(value: Any) -> bool:
    """Byte-pair encoding, and no token with a prefix or suffix that says where it stands."""
    if not isinstance(value, dict) or value.get("type") != "BPE":
        return False
    merges = value.get("merges")
    return (
        not value.get("continuing_subword_prefix")
        and not value.get("end_of_word_suffix")
        and isinstance(value.get("vocab"), dict)
        and isinstance(merges, list)
        and len(merges) <= MAX_MERGES
    )


def _steps(value: Any, key: str, known: Callable[[Mapping[str, Any]], bool]) -> bool:
    """Whether a component is none, a known one, or a short sequence of known ones."""
    steps = _flat(value, key)
    return len(steps) <= MAX_STEPS and all(isinstance(s, dict) and known(s) for s in steps)


def _flat(value: Any, key: str) -> list[Any]:
    """A component as the list of its steps."""
    if value is None:
        return []
    if isinstance(value, dict) and value.get("type") == "Sequence":
        steps = value.get(key)
        return steps if isinstance(steps, list) else [None]
    return [value]


def _normalizer(step: Mapping[str, Any]) -> bool:
    kind = step.get("type")
    if kind == "Replace":
        content = step.get("content")
        return _replaced(step) is not None and (content == "" or _text(content))
    if kind == "Prepend":
        return _text(step.get("prepend"))
    return kind in {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents", "Nmt"}


def _replaced(step: Mapping[str, Any]) -> str | None:
    """What a step looks for where that is a plain text; None for an expression and all else."""
    pattern = step.get("pattern")
    text = pattern.get("String") if isinstance(pattern, dict) and len(pattern) == 1 else None
    return text if _text(text) else None


def _growth(normalizer: Any) -> float:
    """How many times longer the replacements of a known normaliser can make a text."""
    growth = 1.0
    for step in _flat(normalizer, "normalizers"):
        old = _replaced(step)
        if old is not None:
            growth *= max(1.0, len(step["content"].encode()) / len(old.encode()))
    return growth


def _pre_tokenizer(step: Mapping[str, Any]) -> bool:
    kind = step.get("type")
    if kind == "Split":
        pattern = step.get("pattern")
        regex = pattern.get("Regex") if isinstance(pattern, dict) else None
        return _replaced(step) is not None or (isinstance(regex, str) and regex in PATTERNS)
    return kind in {"ByteLevel", "Digits", "Metaspace", "Punctuation", "Whitespace"} | {
        "BertPreTokenizer",
        "UnicodeScripts",
        "WhitespaceSplit",
    }


def _post_processor(step: Mapping[str, Any]) -> bool:
    """The kinds that add a handful of tokens around a text."""
    kind = step.get("type")
    if kind != "TemplateProcessing":
        return kind in {"ByteLevel", "RobertaProcessing", "BertProcessing"}
    single, special = step.get("single"), step.get("special_tokens")
    return (
        isinstance(single, list)
        and isinstance(special, dict)
        and max(len(single), len(special)) <= MAX_STEPS
        and all(isinstance(t, dict) and _few(t.get("ids")) for t in special.values())
        # The library panics where a piece names a token that is not there.
        and all(
            _named(p, "Sequence") == "A" or _named(p, "SpecialToken") in special for p in single
        )
    )


def _few(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MAX_STEPS


def _named(piece: Any, kind: str) -> str | None:
    """The name in a piece of a template of that kind; None for another piece and all else."""
    inner = piece.get(kind) if isinstance(piece, dict) and len(piece) == 1 else None
    name = inner.get("id") if isinstance(inner, dict) else None
    return name if isinstance(name, str) else None


def _decoder(step: Mapping[str, Any]) -> bool:
    """Decoders are built and not run, but an expression takes its time when it is built."""
    kind = step.get("type")
    if kind == "Replace":
        return _replaced(step) is not None
    return kind in {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Strip"}
