"""Typed look-ups in a model's header: GGUF metadata or config.json, both written by strangers."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kvrt.errors import BadModelFile, UnsupportedModel

MAX_SIZE = 2**31 - 1
MAX_NUMBER = 1e30
REMEDY = "fetch or convert the model again"


@dataclasses.dataclass(frozen=True)
class Header:
    """Keys and values; a null counts as a missing key.

    Attributes:
      values: of the header.
      prefix: stands before every key asked for.
      names: what the file calls a key, where it has another name there.
      usual: values in place of missing keys.
      arch: model type of config.json or architecture of a GGUF.
      tensors: of a GGUF, by name, with a `shape`; None for config.json.
    """

    values: Mapping[str, Any]
    prefix: str = ""
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    usual: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    arch: str = ""
    tensors: Mapping[str, Any] | None = None

    def called(self, key: str) -> str:
        """What the file calls a key."""
        return self.prefix + self.names.get(key, key)

    def has(self, key: str) -> bool:
        """Whether the key stands there with a value."""
        return self.values.get(self.called(key)) is not None

    def is_null(self, key: str) -> bool:
        """Whether the key stands there with a null."""
        return self.called(key) in self.values and not self.has(key)

    def whole(
        self, key: str, default: int | None = None, *, least: int = 1, most: int = MAX_SIZE
    ) -> int:
        """A whole number in [least, most].

        Raises:
          BadModelFile: the key is missing without a default, or the value is something else.
          UnsupportedModel: the value is a list, one entry a layer.
        """
        value = self._get(key, default)
        if isinstance(value, (list, np.ndarray)):
            raise UnsupportedModel(
                f"{self.called(key)!r} is {brief(value)}; models whose layers differ are not "
                "supported, only one value for all"
            )
        if type(value) is not int or not least <= value <= most:
            raise self.bad(key, value, f"a whole number from {least} to {most}")
        return value

    def by_layer(
        self, key: str, n_layers: int, default: Any = None, *, least: int = 1
    ) -> tuple[int, ...]:
        """A whole number for each layer, from a list of as many or one number for all.

        Args:
          key: of the header.
          n_layers: layers of the model.
          default: in place of a missing key, of either form.
          least: smallest number that is allowed.

        Raises:
          BadModelFile: the key is missing without a default, or holds something else.
        """
        value = self._get(key, default)
        if not isinstance(value, (list, tuple, np.ndarray)):
            return (self.whole(key, default, least=least),) * n_layers
        # Lists of booleans are numbers to llama.cpp as well.
        numbers = [int(x) if isinstance(x, (np.bool_, np.integer)) else x for x in value]
        whole = all(type(x) is int and least <= x <= MAX_SIZE for x in numbers)
        if len(numbers) != n_layers or not whole:
            wanted = f"{n_layers} whole numbers from {least} to {MAX_SIZE}"
            raise self.bad(key, value, f"a list of {wanted}, or one for all layers,")
        return tuple(numbers)

    def number(self, key: str, default: float | None = None, *, zero: bool = False) -> float:
        """A finite number above 0, or from 0 where `zero` says so.

        Raises:
          BadModelFile: the key is missing without a default, or the value is something else.
        """
        value = self._get(key, default)
        if not is_number(value, zero=zero):
            raise self.bad(key, value, f"a finite number {'from' if zero else 'above'} 0")
        return float(value)

    def numbers(self, key: str, n: int) -> tuple[float, ...]:
        """A list of n numbers above 0.

        Raises:
          BadModelFile: the key is missing or holds something else.
        """
        value = self._get(key, None)
        if not isinstance(value, list) or len(value) != n or not all(map(is_number, value)):
            raise self.bad(key, value, f"a list of {n} numbers above 0")
        return tuple(map(float, value))

    def kinds(self, key: str, usual: Sequence[str], *known: str) -> Sequence[str]:
        """A name for each layer, of those known; `usual` in place of a missing list.

        Raises:
          BadModelFile: no list of as many names.
          UnsupportedModel: another name.
        """
        kinds = self._get(key, usual)
        if not isinstance(kinds, list) or len(kinds) != len(usual):
            raise self.bad(key, kinds, f"a list of {len(usual)} names")
        for kind in kinds:
            if kind not in known:
                raise UnsupportedModel(
                    f"{self.called(key)!r} with {brief(kind)} is not supported in {self.arch}; "
                    f"only {' and '.join(known)}"
                )
        return kinds

    def layers(self, key: str, n_layers: int, usual: Iterable[int] = ()) -> tuple[int, ...]:
        """Indices of layers in ascending order; `usual` in place of a missing list.

        Raises:
          BadModelFile: no list of layers below `n_layers`.
        """
        ids, known = self._get(key, list(usual)), range(n_layers)
        if not isinstance(ids, list) or any(type(i) is not int or i not in known for i in ids):
            raise self.bad(key, ids, f"a list of layers below {n_layers}")
        return tuple(sorted(set(ids)))

    def flag(self, key: str, default: bool) -> bool:
        """True or false; anything else is a BadModelFile."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.bad(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string; anything else is a BadModelFile, as is a missing key without a default."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.bad(key, value, "a string")
        return value

    def inner(self, key: str) -> "Header":
        """The object under a key, empty where there is none; anything else is a BadModelFile."""
        value = self._get(key, {})
        if not isinstance(value, Mapping):
            raise self.bad(key, value, "an object")
        return Header(value)

    def only(self, key: str, *supported: Any) -> None:
        """Refuses a value that is present and not one of those supported.

        Raises:
          UnsupportedModel: it is another.
        """
        value = self.values.get(self.called(key))
        if value is None:
            return
        if isinstance(value, (list, dict, np.ndarray)) or value not in supported:
            remedy = f"only {' or '.join(map(brief, supported))}" if supported else "leave it out"
            raise UnsupportedModel(
                f"{self.called(key)!r} is {brief(value)}, which is not supported; {remedy}"
            )

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(self.called(key))
        value = self.usual.get(key, default) if value is None else value
        if value is None:
            raise BadModelFile(f"the model's header lacks {self.called(key)!r}; {REMEDY}")
        return value

    def bad(self, key: str, value: Any, wanted: str) -> BadModelFile:
        """What to raise for a value of another form."""
        found = f"{self.called(key)!r} is {brief(value)}"
        return BadModelFile(f"the model's header is damaged: {found}, {wanted} is wanted; {REMEDY}")


def check_known(name: str, what: str, known: tuple[str, ...]) -> None:
    """Refuses a name that is not known; `what` has a place for it."""
    if name not in known:
        raise UnsupportedModel(
            f"{what.format(brief(name))} is not supported; one of {', '.join(known)}"
        )


def is_number(value: Any, *, zero: bool = False) -> bool:
    """Whether a value is an int or float, finite, and above 0 (or from 0)."""
    if type(value) not in (int, float):
        return False
    return (0 < value < MAX_NUMBER) or (zero and value == 0)


def brief(value: Any) -> str:
    """A value from a header on one short line."""
    if isinstance(value, (list, np.ndarray)):
        return f"a list of {len(value)}"
    if isinstance(value, Mapping):
        return f"an object of {len(value)} keys"
    if isinstance(value, str):
        return ascii(value if len(value) <= 60 else value[:57] + "...")
    if type(value) is int and abs(value) > 10**30:
        return "an integer of more than 30 digits"
    return repr(value)
