"""Prompts that are built of modules at fixed positions, and where each module's tokens stand.

    <schema name="letter">
      You answer letters.
      <union>
        <module name="polite">Write politely.</module>
        <module name="short">Write to the point.</module>
      </union>
      <module name="to">The letter is for <parameter name="who" length="8"/>, who is busy.</module>
    </schema>

Modules of a union begin at one position, of which a prompt takes one; text outside of modules is in
every prompt. A parameter reserves positions for as many tokens of the prompt's own.

    <prompt><polite/><to who="the mayor"/>Thank them for the bridge.</prompt>

Source: arXiv:2311.04934 (Prompt Cache), sec. 3.2. Departures: modules are not nested, and text of a
prompt stands behind all modules.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from xml.etree import ElementTree

import numpy as np

from kvrt.arrays import Int32
from kvrt.errors import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter:
    """Positions that a prompt fills.

    Attributes:
      name: unique within its module.
      length: tokens that it has room for.
    """

    name: str
    length: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Module:
    """A text whose keys and values are computed once; named "" where every prompt has it."""

    name: str
    parts: tuple[str | Parameter, ...]


# Modules of which a prompt takes at most one; most have no other beside them.
Union = tuple[Module, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacedModule:
    """A module's tokens.

    Attributes:
      name: of the module.
      start: position of its first token.
      ids: its tokens, `placeholder` at the positions of parameters. `[n]`
      reserved: first position and length of each parameter.
      choice: which one of its union it is.
    """

    name: str
    start: int
    ids: Int32[np.ndarray, " n"]
    reserved: Mapping[str, tuple[int, int]]
    choice: int

    @property
    def end(self) -> int:
        """Position behind its last token."""
        return self.start + len(self.ids)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacedSchema:
    """Where all modules stand.

    Attributes:
      lead: tokens at position 0 that every module sees, such as BOS.
      modules: in the schema's order; those of a union share their start.
      end: position behind all of them.
    """

    lead: tuple[int, ...]
    modules: tuple[PlacedModule, ...]
    end: int

    @property
    def n_choices(self) -> int:
        """Modules of the largest union, at least 1."""
        return max((m.choice for m in self.modules), default=0) + 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModulePrompt:
    """What a prompt takes of a schema.

    Attributes:
      modules: names of the modules that it wants.
      arguments: texts of parameters, by module and parameter.
      text: what stands behind the modules.
    """

    modules: tuple[str, ...]
    arguments: Mapping[tuple[str, str], str]
    text: str


def read_schema(text: str) -> tuple[Union, ...]:
    """The modules of a schema, in their order.

    Raises:
      UsageError: it is no XML, or not of the form above.
    """
    root = _parsed(text, "schema")
    found: list[Union] = [*_outside(root.text)]
    for child in root:
        if child.tag == "module":
            found.append((_module(child),))
        elif child.tag == "union":
            inside = [child.text, *(x.tail for x in child)]
            if any(x and x.strip() for x in inside) or any(x.tag != "module" for x in child):
                raise UsageError("a <union> holds modules alone; put its text into one of them")
            found.append(tuple(map(_module, child)))
        else:
            raise UsageError(f"<{child.tag}> in a schema; it holds text, <module> and <union>")
        found += _outside(child.tail)
    found = [union for union in found if union]
    names = [m.name for union in found for m in union if m.name]
    twice = next((x for x in names if names.count(x) > 1), None)
    if twice is not None:
        raise UsageError(f"two modules are named {twice!r}; a name is of one module")
    if not names:
        raise UsageError("the schema has no module; wrap a part of its text in <module name=...>")
    return tuple(found)


def read_request(text: str) -> ModulePrompt:
    """What a prompt wants: modules, their arguments, and the text behind them.

    Raises:
      UsageError: it is no XML, or not of the form above.
    """
    root = _parsed(text, "prompt")
    before = [root.text, *(x.tail for x in root[:-1])] if len(root) else []
    said = next((x.strip() for x in before if x and x.strip()), None)
    if said is not None:
        raise UsageError(
            f"{said[:40]!r} stands before a module, where no position is reserved for it; write "
            "it behind the modules, or give the schema a parameter for it"
        )
    inner = next((x.tag for x in root if len(x) or (x.text or "").strip()), None)
    if inner is not None:
        raise UsageError(
            f"<{inner}> holds something; arguments are attributes: <{inner} name=.../>"
        )
    tail = root[-1].tail if len(root) else root.text
    return ModulePrompt(
        modules=tuple(x.tag for x in root),
        arguments={(x.tag, name): value for x in root for name, value in x.attrib.items()},
        text=(tail or "").strip(),
    )


def lay_out(
    unions: Sequence[Union],
    encode: Callable[[str], Sequence[int]],
    placeholder: int,
    lead: Sequence[int] = (),
) -> PlacedSchema:
    """Where the modules of a schema stand; each is turned into tokens by itself.

    Args:
      unions: from `read_schema`.
      encode: a text's tokens, without BOS.
      placeholder: the token that stands for an argument, such as `<unk>`.
      lead: tokens at position 0 that all modules see.

    Raises:
      UsageError: a module without a token.
    """
    at, found = len(lead), []
    for union in unions:
        placed = [_place(m, at, encode, placeholder) for m in union]
        found += [dataclasses.replace(m, choice=i) for i, m in enumerate(placed)]
        at = max(m.end for m in placed)
    return PlacedSchema(lead=tuple(lead), modules=tuple(found), end=at)


def modules_of(layout: PlacedSchema, names: Sequence[str]) -> tuple[PlacedModule, ...]:
    """The modules that a prompt has: those it names, and those without a name.

    Raises:
      UsageError: an unknown name, one named twice, or two of a union.
    """
    known = {m.name: m for m in layout.modules if m.name}
    for name in names:
        if name not in known:
            raise UsageError(f"no module {name!r}; the schema has {', '.join(known)}")
        if names.count(name) > 1:
            raise UsageError(f"module {name!r} is named twice; it stands at one place")
    found = tuple(m for m in layout.modules if not m.name or m.name in names)
    for one, other in itertools.pairwise(found):
        if one.start == other.start:
            raise UsageError(f"{one.name!r} and {other.name!r} are of one union; take one of them")
    return found


def _parsed(text: str, tag: str) -> ElementTree.Element:
    try:
        root = ElementTree.fromstring(text.strip())
    except ElementTree.ParseError as error:
        raise UsageError(
            f"the {tag} is no XML: {error}; it stands between <{tag}> and </{tag}>, with &lt; for "
            "< and &amp; for &"
        ) from error
    if root.tag != tag:
        raise UsageError(f"<{root.tag}> where a <{tag}> is wanted")
    return root


def _outside(text: str | None) -> list[Union]:
    """Text outside of modules, as a module without a name."""
    return [(Module(name="", parts=(text.strip(),)),)] if text and text.strip() else []


def _module(element: ElementTree.Element) -> Module:
    name = element.get("name", "")
    if not name or not name.isidentifier():
        raise UsageError(f"a module is named {name!r}; take letters, digits and _, for prompts")
    parts: list[str | Parameter] = [element.text or ""]
    for child in element:
        if child.tag != "parameter":
            raise UsageError(f"<{child.tag}> in module {name!r}; it holds text and <parameter>")
        parts += [_parameter(name, child), child.tail or ""]
    names = [x.name for x in parts if isinstance(x, Parameter)]
    if len(set(names)) < len(names):
        raise UsageError(f"module {name!r} has two parameters of one name; rename one")
    # Blanks at the ends are the file's layout; within, they are the text's.
    parts[0] = str(parts[0]).lstrip()
    if isinstance(parts[-1], str):
        parts[-1] = parts[-1].rstrip()
    return Module(name=name, parts=tuple(x for x in parts if x != ""))


def _parameter(module: str, element: ElementTree.Element) -> Parameter:
    name, length = element.get("name", ""), element.get("length", "")
    if not name or not length.isdecimal() or int(length) < 1:
        raise UsageError(
            f"a parameter of module {module!r} has name {name!r} and length {length!r}; it wants a "
            'name, and how many tokens it has room for: <parameter name="who" length="8"/>'
        )
    return Parameter(name=name, length=int(length))


def _place(
    module: Module, start: int, encode: Callable[[str], Sequence[int]], placeholder: int
) -> PlacedModule:
    ids: list[int] = []
    reserved: dict[str, tuple[int, int]] = {}
    for part in module.parts:
        if isinstance(part, Parameter):
            reserved[part.name] = (start + len(ids), part.length)
            ids += [placeholder] * part.length
        else:
            ids += encode(part)
    if not ids:
        raise UsageError(f"module {module.name!r} has no token; give it a text, or leave it out")
    held = np.asarray(ids, np.int32)
    return PlacedModule(name=module.name, start=start, ids=held, reserved=reserved, choice=0)
