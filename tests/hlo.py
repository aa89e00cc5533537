"""Optimized HLO as text: which arrays a program holds, and what its products are made of."""

import dataclasses
import math
import re
from collections.abc import Iterator

# A computation begins with its name and parameters, and may be the entry.
_HEAD = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \((.*)\) -> .* \{$")
_MADE = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (\w+)\[([\d,]*)\]\S* ([\w\-]+)\((.*)$")
_CALLS = re.compile(r"calls=%?([\w.\-]+)")
_TYPE = re.compile(r": (\w+)\[([\d,]*)\]")
_OPERATION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = .*?(?<=[\]})]) ([a-z][\w\-]*)\(")
_INSIDE = re.compile(r"(?:calls|to_apply)=\{?%?([\w.\-]+)")
# Those that only name or regroup arrays do not run.
_FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast"}

Type = tuple[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Made:
    """One instruction, but for those that make tuples.

    Attributes:
      dtype: of its array, as HLO calls it.
      shape: of its array.
      op: what it is.
      inside: whether it is part of a fusion, whose own arrays nobody holds.
      rest: its operands and attributes.
    """

    dtype: str
    shape: tuple[int, ...]
    op: str
    inside: bool
    rest: str

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def instructions(text: str) -> list[Made]:
    """All instructions of a program, those of its fusions included."""
    lines = text.splitlines()
    fused = {m[1] for line in lines if " fusion(" in line and (m := _CALLS.search(line))}
    found, at = [], ""
    for line in lines:
        if head := _HEAD.match(line):
            at = head[1]
        elif made := _MADE.match(line):
            found.append(Made(made[1], _shape(made[2]), made[3], at in fused, made[4]))
    return found


def pieces(text: str, kind: str) -> Iterator[tuple[str, list[Made]]]:
    """The fusions of a kind that XLA hands to a library as one piece, and what is in each."""
    found, at = {}, ""
    for line in text.splitlines():
        if head := _HEAD.match(line):
            at = head[1]
            found[at] = []
        elif made := _MADE.match(line):
            found[at].append(Made(made[1], _shape(made[2]), made[3], True, made[4]))
    for of in list(found.values()):
        for made in of:
            if made.op == "fusion" and f'"{kind}"' in made.rest and (m := _CALLS.search(made.rest)):
                yield m[1], found[m[1]]


def products(text: str, dtype: str) -> Iterator[Type]:
    """Types of the first operand of every product that YNNPACK computes of arrays of dtype."""
    operands = {
        head[1]: [(of, _shape(dims)) for of, dims in _TYPE.findall(head[2])]
        for line in text.splitlines()
        if (head := _HEAD.match(line))
    }
    for made in instructions(text):
        if (
            made.op == "fusion"
            and '"__ynn_fusion"' in made.rest
            and (m := _CALLS.search(made.rest))
        ):
            taken = operands[m[1]]
            if [of for of, _ in taken] == [dtype, dtype]:
                yield taken[0]


def executed(text: str) -> list[str]:
    """Names of the operations that a program runs one by one, not of those inside a fusion."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if head := _HEAD.match(line):
            name = head[1]
        elif operation := _OPERATION.match(line):
            found.setdefault(name, []).append(operation[1])
    inside = set(_INSIDE.findall(text))
    run = [x for name, of in found.items() if name not in inside for x in of]
    return [x for x in run if x not in _FREE]


def _shape(dims: str) -> tuple[int, ...]:
    return tuple(map(int, dims.split(","))) if dims else ()
