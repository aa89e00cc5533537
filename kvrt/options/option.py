"""What an option is: a field of a dataclass, which says all of it once, in one line.

Its default, limits, help and flag; whether a line of `kvrt batch` may say it, and whether results
depend on it. A configuration's fields are options; a command's flags are those of the
configurations that it makes (`flags_of_config`), and of its own. Parsing, help, keys of request
lines and digests follow from the fields.
"""

import dataclasses
import functools
import math
import sys
import typing
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from msgspec import Meta

from kvrt.errors import BadConfig
from kvrt.files.kinds import FileKind
from kvrt.files.named import NamedFile
from kvrt.options.size import parse_size

INT_MAX = 2**31 - 1
_KEY = "flag"
_UNSET = object()
_Class = TypeVar("_Class")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flag:
    """A flag or place of a command.

    Attributes:
      group: heading it stands under in the help.
      default: its value where it is not given.
      help: a line or two for people.
      value: what the help calls its value.
      name: of the flag.
      field: of the configuration that it sets.
      owner: the configuration's class and field; "" of a command's own flag.
      type: of its value.
      short: one letter, or a few without a dash between them, or "".
      aliases: other names it has elsewhere.
      low: least number.
      cli_low: least number that the flag takes, where a command knows what it stands for.
      most: greatest number; None is the greatest int32 for a whole number, no limit for others.
      place: it is no flag but the next word without a dash.
      needed: it cannot be left out.
      several: it takes some of its words too, by commas.
      advanced: it stands in the help of all flags alone.
      file: the kind of file or folder that it names; None for values that are no path.
      none_at: its value that stands for None in the configuration.
      size: its text is a size in bytes, which is a number in the configuration.
      also: other flags that set the field, in commands without this one.
      made: the configuration's value is made of more than this flag, by the command.
      line: whether a line of `kvrt batch` may say it; or the type that it has there.
      decides: flags that have to differ from their defaults for results to depend on this one,
        "" itself, "always" in any case. None never does.
      limits: whether it decides if a request fits.
    """

    group: str
    default: Any
    help: str
    value: str = ""
    name: str = ""
    field: str = ""
    owner: str = ""
    type: Any = None
    short: str = ""
    aliases: tuple[str, ...] = ()
    low: float = 0
    cli_low: float | None = None
    most: float | None = None
    place: bool = False
    needed: bool = False
    several: bool = False
    advanced: bool = False
    file: FileKind | None = None
    none_at: Any = None
    size: bool = False
    also: tuple[str, ...] = ()
    made: bool = False
    line: Any = False
    decides: tuple[str, ...] | None = ("",)
    limits: bool = False

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
    def least(self) -> float:
        """The least number that the flag takes."""
        found = (x for x in (self.low, self.cli_low, self.none_at) if x is not None)
        return min(found) if self.kind in (int, float) else 0

    @property
    def high(self) -> float:
        """The greatest number it takes."""
        limit = INT_MAX if self.kind is int else math.inf
        return limit if self.most is None else self.most

    @property
    def key_type(self) -> Any:
        """The type of its key in a request line, with its limits."""
        if self.line is not True:
            return self.line
        if self.kind not in (int, float):
            return self.kind
        return Annotated[self.kind, Meta(ge=self.least, le=min(self.high, 2.0**1023))]

    @property
    def names(self) -> tuple[str, ...]:
        """All names that it is given by."""
        return tuple(x for x in (self.name, self.short, *self.aliases) if x)

    def labelled(self, value: str) -> str:
        """The flag with a value, for messages; of a place the value alone."""
        name = f"-{self.short}" if len(self.short) == 1 else f"--{self.name}"
        return value if self.place else f"{name} {value}"

    def configured(self, value: Any) -> Any:
        """A value as the configuration has it."""
        if value is None or (self.none_at is not None and value == self.none_at):
            return None
        if self.size:
            return parse_size(f"--{self.name}", value)
        return Path(value) if self.file is not None else value


def option(
    default: Any, help: str, value: str = "", *, group: str, cli: Any = _UNSET, **more: Any
) -> Any:
    """A field of a configuration that commands have as a flag.

    Args:
      default: of the configuration; `dataclasses.MISSING` is none.
      help: of the flag.
      value: what the help calls its value.
      group: heading of the help.
      cli: the flag's default, if another one.
      more: further fields of its `Flag`; `flag` is its name, if not that of the field, and
        `cli_type` its type, if another one.
    """
    own = default if cli is _UNSET else cli
    names = dict(name=more.pop("flag", ""), type=more.pop("cli_type", None))
    made = Flag(group=group, default=own, help=help, value=value, **names, **more)
    return dataclasses.field(default=default, metadata={_KEY: made})


def flag(group: str, default: Any, help: str, value: str = "", **more: Any) -> Any:
    """A flag of a command's own; `more` are further fields of its `Flag`."""
    return option(default, help, value, group=group, **{"decides": None, **more})


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
        for own in flags_of(type(self)):
            if own.size:
                self.size(own.name)

    def size(self, name: str) -> int | None:
        """Bytes that a flag says as text, like 2GB; None where it was left out."""
        text = getattr(self, name)
        return None if text is None else parse_size(f"--{name}", text)

    def says(self, name: str) -> bool:
        """Whether a flag was given, or has another value than its default."""
        (own,) = (x for x in flags_of(type(self)) if x.name == name)
        return name in self.given or getattr(self, name) != own.default

    def part(self, config: type) -> dict[str, Any]:
        """Fields of a configuration as this command's flags have them, by their names.

        Fields whose value the command makes of more than a flag are left out.
        """
        own = {x.name for x in flags_of(type(self))}
        out: dict[str, Any] = {}
        for x in flags_of(config):
            for name in (x.name, *x.also):
                if name in own and not x.made:
                    out.setdefault(x.field, x.configured(getattr(self, name)))
        return out

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


def flags_of(config: type) -> tuple[Flag, ...]:
    """Flags of the fields of a class that have one: a configuration, or a command's options."""
    return _flags_of(config)  # pyright: ignore[reportArgumentType]


@functools.cache
def _flags_of(config: type) -> tuple[Flag, ...]:
    found = []
    for f in dataclasses.fields(config):
        if _KEY in f.metadata:
            flag, kind = f.metadata[_KEY], f.type
            if flag.none_at is not None:
                (kind, *_) = (*get_args(kind), kind)
            name = flag.name or f.name
            decides = flag.decides and tuple(x or name for x in flag.decides)
            own = dict(name=name, field=f.name, type=flag.type or kind, decides=decides)
            found.append(dataclasses.replace(flag, **own))
    return tuple(found)


def check_limits(config: Any) -> None:
    """Refuses numbers beyond the limits of a configuration's options, and NaN.

    Raises:
      BadConfig: a field is.
    """
    for x in flags_of(type(config)):
        value = getattr(config, x.field)
        if (x.kind in (int, float) or x.size) and value is not None:
            finite = min(x.high, sys.float_info.max)
            if not x.low <= value <= finite:
                least = f"be at least {x.low}" if x.low else "not be negative"
                within = f"lie in [{x.low}, {x.high}]" if x.most or x.kind is float else least
                raise BadConfig(f"{x.field} is {value}; it must {within}")


def flags_of_config(config: type, *, without: str = "", only: str = "") -> Any:
    """A group of flags, those of a configuration's fields.

    Args:
      config: a dataclass.
      without: names of flags that a command lacks.
      only: names of flags that it has; "" is all.
    """
    fields = []
    for x in flags_of(config):
        if x.name not in without.split() and (not only or x.name in only.split()):
            default = x.none_at if x.default is None and x.none_at is not None else x.default
            kept = dataclasses.replace(x, default=default, owner=f"{config.__name__}.{x.field}")
            field = dataclasses.field(default=default, metadata={_KEY: kept})
            fields.append((x.name, x.type, field))
    # Only its subclasses are made: what a dataclass generates would be compiled at each start.
    return dataclasses.make_dataclass(
        f"{config.__name__}Flags",
        fields,
        bases=(Options,),
        init=False,
        repr=False,
        eq=False,
        frozen=True,
        kw_only=True,
    )


def deciding(
    options: Options, flags: Iterable[Flag], names: Collection[str] = ()
) -> dict[str, Any]:
    """Values of the flags that results depend on, by name: what their digest is of.

    Args:
      options: of a command.
      flags: of which some decide.
      names: flags that count as changed.
    """
    of = {x.name: x for x in flags_of(type(options))}

    def changed(name: str) -> bool:
        if name in ("always", *names):
            return True
        return name in of and getattr(options, name) != of[name].default

    return {
        x.name: getattr(options, x.name)
        for x in flags
        if x.decides is not None and all(map(changed, x.decides))
    }
