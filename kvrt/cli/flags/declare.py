"""What a flag is: a field of a dataclass; name, type, default, range and help in one place.

A command has one such dataclass, made of groups of flags that several commands share.
"""

import dataclasses
import functools
import math
import typing
from typing import Any, Literal, TypeVar, get_args, get_origin

from kvrt.files.kinds import FileKind
from kvrt.files.named import NamedFile

INT_MAX = 2**31 - 1
_KEY = "flag"
_Class = TypeVar("_Class")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flag:
    """A flag or place of a command.

    Attributes:
      group: heading it stands under in the help.
      default: its value where it is not given.
      help: a line or two for people.
      value: what the help calls its value.
      short: one letter, or a few without a dash between them, or "".
      aliases: other names it has elsewhere.
      low: least number.
      most: greatest number; None is the greatest int32 for a whole number, no limit for others.
      place: it is no flag but the next word without a dash.
      needed: it cannot be left out.
      several: it takes some of its words too, by commas.
      advanced: it stands in the help of all flags alone.
      file: the kind of file or folder that it names; None for values that are no path.
      name: of the field.
      type: of the field.
    """

    group: str
    default: Any
    help: str
    value: str = ""
    short: str = ""
    aliases: tuple[str, ...] = ()
    low: float = 0
    most: float | None = None
    place: bool = False
    needed: bool = False
    several: bool = False
    advanced: bool = False
    file: FileKind | None = None
    name: str = ""
    type: Any = None

    @property
    def kind(self) -> Any:
        """Its type where it is given: without None, and of one where it takes several."""
        kinds = get_args(self.type)
        return kinds[0] if type(None) in kinds or self.several else self.type

    @property
    def choices(self) -> tuple[str, ...]:
        """The only words it takes, those of its Literal; none for other types."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def high(self) -> float:
        """The greatest number it takes."""
        limit = INT_MAX if self.kind is int else math.inf
        return limit if self.most is None else self.most

    @property
    def names(self) -> tuple[str, ...]:
        """All names that it is given by."""
        return tuple(x for x in (self.name, self.short, *self.aliases) if x)

    def labelled(self, value: str) -> str:
        """The flag with a value, for messages; of a place the value alone."""
        name = f"-{self.short}" if len(self.short) == 1 else f"--{self.name}"
        return value if self.place else f"{name} {value}"


def flag(group: str, default: Any, help: str, value: str = "", **more: Any) -> Any:
    """A field of a `flag_group`; `more` are further fields of its `Flag`."""
    made = Flag(group=group, default=default, help=help, value=value, **more)
    return dataclasses.field(default=default, metadata={_KEY: made})


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
def flag_group(cls: type[_Class]) -> type[_Class]:
    """Makes a frozen, keyword-only dataclass, whose fields are flags."""
    return dataclasses.dataclass(frozen=True, kw_only=True)(cls)


@flag_group
class Options:
    """Base of all options; `given` are the names of flags that were not left to their default."""

    given: frozenset[str] = frozenset()

    def check(self) -> None:
        """Refuses flags that contradict each other; raises UsageError."""

    def file_kind(self, flag: Flag) -> FileKind | None:
        """The kind of file that a flag names beside these values."""
        return flag.file

    def files(self) -> list[NamedFile]:
        """Files and folders that this process reads or writes by its flags."""
        found = []
        for flag in flags_of(type(self)):
            kind, value = self.file_kind(flag), getattr(self, flag.name)
            paths = value if isinstance(value, tuple) else (value,)
            if kind is not None and value is not None:
                found += [NamedFile(label=flag.labelled(x), path=x, kind=kind) for x in paths]
        return found

    def settled(self) -> "Options":
        """The options with a value in place of what is left to chance."""
        return self


@functools.cache
def flags_of(options: type[Options]) -> tuple[Flag, ...]:
    """All flags and places of a command, in the order of the help."""
    fields = [f for f in dataclasses.fields(options) if _KEY in f.metadata]
    return tuple(dataclasses.replace(f.metadata[_KEY], name=f.name, type=f.type) for f in fields)
