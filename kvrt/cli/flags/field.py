"""What a flag is: a field of a dataclass; name, type, default, range and help in one place.

A command has one such dataclass, made of groups of flags that several commands share.
"""

import dataclasses
import math
from typing import Annotated, Any, Literal, get_args, get_origin


@dataclasses.dataclass(frozen=True)
class Info:
    """What a flag is beside its name, type and default.

    Attributes:
      group: heading it stands under in the help.
      help: a line or two for people.
      value: what the help calls its value.
      short: one letter, or "".
      aliases: other names it has elsewhere.
      low: least number.
      high: greatest number.
      place: it is no flag but the next word without a dash.
      needed: it cannot be left out.
      several: it takes some of its words too, by commas.
    """

    group: str
    help: str
    value: str = ""
    _: dataclasses.KW_ONLY
    short: str = ""
    aliases: tuple[str, ...] = ()
    low: float = 0
    high: float = math.inf
    place: bool = False
    needed: bool = False
    several: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Base of all options; `given` are the names of flags that were not left to their default."""

    given: frozenset[str] = frozenset()

    def check(self) -> None:
        """Refuses flags that contradict each other; raises UsageError."""

    def settled(self) -> "Options":
        """The options with a value in place of what is left to chance."""
        return self


@dataclasses.dataclass(frozen=True)
class Flag:
    """A row of the table, taken apart."""

    name: str
    type: Any
    default: Any
    info: Info

    @property
    def kind(self) -> Any:
        """Its type where it is given: without None, and of one where it takes several."""
        kinds = get_args(self.type)
        return kinds[0] if type(None) in kinds or self.info.several else self.type

    @property
    def choices(self) -> tuple[str, ...]:
        """The only words it takes, those of its Literal; none for other types."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()


def rows(options: type[Options]) -> list[Flag]:
    """All flags and places of a command, in the order of the help."""
    fields = [f for f in dataclasses.fields(options) if get_origin(f.type) is Annotated]
    parts = [(f.name, get_args(f.type), f.default) for f in fields]
    return [Flag(name, kind, default, info) for name, (kind, info), default in parts]
