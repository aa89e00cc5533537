"""One line of `kvrt batch`: from JSON to a request, within bounds, and what is wrong with it."""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeGuard

from kvrt.cli.flags.context import BY_POSITION, PolicyName
from kvrt.cli.flags.declare import flags_of
from kvrt.cli.flags.evaluate import SamplingFlags
from kvrt.cli.flags.other_names import other_programs
from kvrt.config import MAX_SEQUENCES

MAX_LINE_BYTES = 1 << 24
MAX_ID = 256
MAX_PRIORITY = 1 << 20
MAX_STOPS = 64
MAX_SALT = 64
MAX_CHUNKS = 256
MAX_PATH = 4096
_MOST_TOKEN = 2**31 - 1
_SHOWN = 40


Id = str | int  # of a request, as its line has it


class Wrong(Exception):
    """What is wrong with a line; `id` is the request's where it could be read."""

    def __init__(self, message: str, id: Id | None = None):
        """One line."""
        super().__init__(message)
        self.id = id


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """A request as its line has it, with the command's flags where it says nothing.

    Attributes:
      id: its name.
      prompt: text; None where `tokens` are given.
      tokens: ids.
      draws: values of `kvrt.engine.Sampling`.
      n_predict: tokens to draw at most.
      n: samples.
      priority: lower goes first.
      stop: texts that end a sample.
      chat: the prompt is a user's message.
      ignore_eos: an end-of-text token does not end it.
      policy: what it keeps when it outgrows its context, by name.
      keep: of a context shift, tokens of the prompt that stay; -1 is all.
      n_sink: of attention sinks, first tokens that stay.
      n_window: of attention sinks, newest tokens that stay.
      n_discard: of a context shift, tokens dropped at once; 0 is half of what may go.
      n_drop: of attention sinks, tokens dropped at once, at least.
      salt: requests of different salts never share a prefix.
      cache: whether it may use prefixes that others have computed.
      beams: `num_beams`, `length_penalty` and `early_stopping` of `kvrt.Request`.
      room: `quota` and `reserve` of it.
      chunks: files of texts that stand before the prompt, blended.
      given: keys that its line has.
    """

    id: Id
    prompt: str | None
    tokens: tuple[int, ...]
    sampling: Mapping[str, Any]
    n_predict: int
    n: int
    priority: int
    stop: tuple[str, ...]
    chat: bool
    ignore_eos: bool
    policy: PolicyName
    keep: int
    n_sink: int
    n_window: int
    n_discard: int
    n_drop: int
    salt: str
    cache: bool
    beams: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    room: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    chunks: tuple[str, ...] = ()
    given: frozenset[str] = frozenset()


class Parser:
    """From the bytes of a line to a request."""

    def __init__(self, defaults: Mapping[str, Any]):
        """With the values of what a line leaves out."""
        self._defaults = defaults
        self._draws = {f.name: f for f in flags_of(SamplingFlags)}
        self._default_draws = {name: defaults[name] for name in self._draws}
        self._keys = ["id", "prompt", "tokens", "chunks", *_OTHERS, *_BEAMS, *_ROOM, *self._draws]

    def parse(self, data: bytes | None) -> Asked:
        """The request; raises Wrong."""
        if data is None:
            raise Wrong(f"longer than {MAX_LINE_BYTES} bytes; shorten the prompt")
        given = _object(data)
        name = given.get("id")
        if not _is_id(name):
            found = "is missing" if "id" not in given else f"is {_show(name)}"
            raise Wrong(
                f"id {found}; a text of 1 to {MAX_ID} characters or a whole number is wanted"
            )
        try:
            return self._parse(name, given)
        except Wrong as error:
            raise Wrong(str(error), name) from error

    def _parse(self, name: Id, given: dict[str, Any]) -> Asked:
        for key in given:
            if key not in self._keys:
                raise Wrong(self._unknown(key))
        if ("prompt" in given) == ("tokens" in given):
            raise Wrong("either prompt or tokens is wanted")
        wanted = {k: self._defaults[k] for k in _OTHERS}
        wanted |= {k: check(k, given[k]) for k, check in _OTHERS.items() if k in given}
        if wanted["chat"] and "tokens" in given:
            raise Wrong("chat needs prompt, tokens gives ids")
        if "chunks" in given and wanted["chat"]:
            raise Wrong(
                "chunks stand before a prompt, and a chat template before its text; give one"
            )
        beams = {k: check(k, given[k]) for k, check in _BEAMS.items() if k in given}
        room = {k: check(k, given[k]) for k, check in _ROOM.items() if k in given}
        if wanted["stop"] and beams.get("num_beams", 1) > 1:
            raise Wrong("stop ends a text as it is read, num_beams compares whole ones; give one")
        sampling = self._default_draws | {
            k: self._draw(k, given[k]) for k in self._draws if k in given
        }
        if beams.get("num_beams", 1) > 1 and "temp" not in given:
            sampling["temp"] = 0.0  # the flag's is for lines that are sampled
        return Asked(
            id=name,
            prompt=_prompt(given["prompt"]) if "prompt" in given else None,
            tokens=_tokens(given["tokens"]) if "tokens" in given else (),
            sampling=sampling,
            beams=beams,
            room=room,
            chunks=_chunks(given["chunks"]) if "chunks" in given else (),
            given=frozenset(given),
            **wanted,
        )

    def _unknown(self, key: str) -> str:
        near = other_programs.counterpart(key)
        hint = f" (in kvrt it is {near.flag})" if near and near.flag in self._keys else ""
        return f"unknown key {_show(key)}{hint}; the keys are {', '.join(self._keys)}"

    def _draw(self, key: str, value: Any) -> float:
        flag = self._draws[key]
        low, high = flag.low, flag.high
        if flag.kind is int:
            return _whole(key, value, int(low), int(high))
        is_number = type(value) in (int, float) and low <= value <= high
        if not is_number or not math.isfinite(value):
            most = f"from {low} to {high}" if math.isfinite(high) else f"of at least {low}"
            raise Wrong(f"{key} is {_show(value)}; a number {most} is wanted")
        return float(value)


def _is_id(value: Any) -> TypeGuard[Id]:
    if isinstance(value, str):
        return 0 < len(value) <= MAX_ID and _is_text(value)
    # A JSON true would pass for the integer 1.
    return type(value) is int and abs(value) < 1 << 63


def _object(data: bytes) -> dict[str, Any]:
    """A JSON object without constants that JSON has not, and without two values of a key."""
    try:
        # Editors of some systems begin a file with a mark, which is none of its text.
        found = _DECODER.decode(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise Wrong(f"byte {error.start} is no UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise Wrong(f"no JSON ({' '.join(str(error).split())})") from error
    if not isinstance(found, dict):
        raise Wrong(f"{_show(found)} is no JSON object")
    return found


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON")


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {_show(key)} is given twice")
        found[key] = value
    return found


_DECODER = json.JSONDecoder(parse_constant=_no_constant, object_pairs_hook=_pairs)


def _prompt(value: Any) -> str:
    if not isinstance(value, str) or not value or not _is_text(value):
        raise Wrong(f"prompt is {_show(value)}; a text of at least one character is wanted")
    return value


def _tokens(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise Wrong(f"tokens is {_show(value)}; a list of at least one id is wanted")
    for i, item in enumerate(value):
        # A JSON true would pass for the integer 1.
        if type(item) is not int or not 0 <= item <= _MOST_TOKEN:
            raise Wrong(f"tokens has {_show(item)} at {i}; an id of at least 0 is wanted")
    return tuple(value)


def _chunks(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not 0 < len(value) <= MAX_CHUNKS:
        raise Wrong(f"chunks is {_show(value)}; a list of 1 to {MAX_CHUNKS} files is wanted")
    for name in value:
        if not isinstance(name, str) or not 0 < len(name) <= MAX_PATH or not _is_text(name):
            raise Wrong(f"chunks has {_show(name)}; names of files are wanted")
    return tuple(value)


def _stop(key: str, value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or len(texts) > MAX_STOPS:
        raise Wrong(f"{key} is {_show(value)}; a text or up to {MAX_STOPS} of them are wanted")
    for text in texts:
        if not isinstance(text, str) or not text or not _is_text(text):
            raise Wrong(f"{key} has {_show(text)}; texts of at least one character are wanted")
    return tuple(texts)


def _flag(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise Wrong(f"{key} is {_show(value)}; true or false is wanted")
    return value


def _whole(key: str, value: Any, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise Wrong(f"{key} is {_show(value)}; a whole number from {low} to {high} is wanted")
    return value


def _policy(key: str, value: Any) -> str:
    if value not in BY_POSITION:
        raise Wrong(
            f"{key} is {_show(value)}; one of {', '.join(BY_POSITION)} is wanted, one by score is "
            "that of all requests: --policy"
        )
    return value


def _salt(key: str, value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_SALT or not _is_text(value):
        raise Wrong(f"{key} is {_show(value)}; a text of at most {MAX_SALT} characters is wanted")
    return value


# Keys beside id, prompt, tokens and those of sampling; a check takes the key and its value.
_OTHERS: Mapping[str, Callable[[str, Any], Any]] = {
    "n_predict": functools.partial(_whole, low=1, high=_MOST_TOKEN),
    "n": functools.partial(_whole, low=1, high=MAX_SEQUENCES),
    "priority": functools.partial(_whole, low=-MAX_PRIORITY, high=MAX_PRIORITY),
    "stop": _stop,
    "chat": _flag,
    "ignore_eos": _flag,
    "policy": _policy,
    "keep": functools.partial(_whole, low=-1, high=_MOST_TOKEN),
    "n_sink": functools.partial(_whole, low=0, high=_MOST_TOKEN),
    "n_window": functools.partial(_whole, low=2, high=_MOST_TOKEN),
    "n_discard": functools.partial(_whole, low=0, high=_MOST_TOKEN),
    "n_drop": functools.partial(_whole, low=1, high=_MOST_TOKEN),
    "salt": _salt,
    "cache": _flag,
}


def _penalty(key: str, value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise Wrong(f"{key} is {_show(value)}; a finite number is wanted")
    return float(value)


def _early(key: str, value: Any) -> bool | str:
    if not isinstance(value, bool) and value != "never":
        raise Wrong(f'{key} is {_show(value)}; true, false or "never" is wanted')
    return value


# Those of a beam search, which no flag has.
_BEAMS: Mapping[str, Callable[[str, Any], Any]] = {
    "num_beams": functools.partial(_whole, low=1, high=MAX_SEQUENCES),
    "length_penalty": _penalty,
    "early_stopping": _early,
}
# Likewise, of its room in the cache.
_ROOM: Mapping[str, Callable[[str, Any], int]] = {
    "quota": functools.partial(_whole, low=1, high=_MOST_TOKEN),
    "reserve": functools.partial(_whole, low=0, high=_MOST_TOKEN),
}


def _is_text(value: str) -> bool:
    """Whether it can be written as UTF-8: JSON may hold halves of a character."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _show(value: Any) -> str:
    """A value as JSON has it, in a few characters of one line."""
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
