"""Which cells of the matrix are refused: kvrt's own rules, by the traits of the axes' values.

Rules of kind "refused" are errors of kvrt when the object is made, "absent" what an object has no
option for; all other kinds are debts: "mid-run" (an error of kvrt after the object was made),
"missing" (nothing offers it), "different" (another result, without a word).
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator

from kvrt.config import layer_traits
from kvrt.kv_types import CHANNEL_CODECS, CODECS
from kvrt.options import compose
from kvrt.policies import policy_traits
from kvrt.sizes import extent
from tests.matrix import build
from tests.matrix.axes import AXES, Cell

# Traits of what has one of some others, and of what has all of some others.
ANY = {
    "one order": ("some states", "only states", "reused cells", "policy by score"),
    "moving request": ("policy by position",),
    "only slots of heads": ("policy by score",),
}
ALL = {"shared arrays": ("paged mode", "some windows"), "private prefix": ("engine", "chunks")}


@dataclasses.dataclass(frozen=True, eq=False)
class Rule:
    """What happens in the cells that have one of some values for each of its needs.

    Attributes:
      id: of the rule in tables.
      needs: alternatives, each an axis and a value of it; a cell of the rule has one of each.
      kind: refused, absent, mid-run, missing or different.
      says: a regular expression of what is said.
      why: for a reader, a line; of a refusal its sentence, of a debt what happens today.
    """

    id: str
    needs: tuple[tuple[tuple[str, str], ...], ...]
    kind: str
    says: str
    why: str

    def matches(self, cell: Cell) -> bool:
        return all(any(getattr(cell, a) == x for a, x in of) for of in self.needs)

    def combinations(self) -> Iterator[dict[str, str]]:
        """Every choice of one alternative of each of its needs."""
        for chosen in itertools.product(*self.needs):
            if all(a != b or x == y for (a, x), (b, y) in itertools.combinations(chosen, 2)):
                yield dict(chosen)


def traits_of(cell: Cell) -> dict[str, str]:
    """What the parts of a cell state of themselves, and what is done with it."""
    model, config = build.model_of(cell.layers), build.config_of(cell)
    policy = build.policy_of(cell) or build.scored_of(cell)
    found = {
        **config.traits,
        **layer_traits(model.groups, model.recurrent),
        **policy_traits(policy),
        **_of_type(cell.dtype),
    }
    if cell.is_engine:
        found |= build.options_of(cell._replace(state="prefix")).traits
    if spec := build.speculation_of(cell):
        found |= spec.traits
    rolls = [extent(g, config).rolls for g in model.groups]
    more = {
        "full keys by channel": "keys by channel" in found,
        "mesh": cell.devices == "mesh",
        "kernel": cell.attention in ("gpu", "tpu"),
        "TPU kernel": cell.attention == "tpu",
        "reused cells": any(rolls),
        "no complete layer": all(rolls),
        "blocks": cell.where == "blocks",
        "chunks": cell.state == "chunks",
        "modules": cell.state == "modules",
        "filled positions": cell.state == "modules",
    }
    found |= {name: "" for name, x in more.items() if x}
    found |= {name: "" for name, some in ANY.items() if found.keys() & set(some)}
    return found | {name: "" for name, parts in ALL.items() if found.keys() >= set(parts)}


def _of_type(dtype: str) -> dict[str, str]:
    """Traits of arrays of a KV dtype, as kernels look at them."""
    codec = (CODECS | CHANNEL_CODECS).get(dtype)
    found = {
        "float16": dtype == "f16" if codec is None else codec.scale == "f16",
        "fp8": codec is not None and codec.floating,
    }
    return {name: "" for name, x in found.items() if x}


@functools.cache
def _brought_by() -> dict[str, tuple[tuple[str, str], ...]]:
    """By trait, the axes' values that bring it; what every cell has is not among them."""
    values = [(axis, x) for axis, of in AXES.items() for x in of]
    found = {}
    for axis, x in values:
        for trait in traits_of(Cell(**{axis: x})).keys() - traits_of(Cell()).keys():
            found[trait] = (*found.get(trait, ()), (axis, x))
    return found


def _refused() -> Iterator[Rule]:
    """kvrt's rules of which some cell has all traits."""
    usual, n = traits_of(Cell()).keys(), 0
    for rule in compose.RULES:
        wanted = [x for trait in rule.traits for x in ALL.get(trait, (trait,)) if x not in usual]
        needs = tuple(_brought_by().get(trait, ()) for trait in wanted)
        says = re.sub(r"\\{.*?\\}", ".*", re.escape(rule.says))
        found = Rule(f"R{n + 1}", needs, "refused", says, _for_readers(rule))
        if any(found.combinations()):
            n += 1
            yield found


def _for_readers(rule: compose.Rule) -> str:
    return f"{re.sub('{.*?}', '...', rule.says)} ({rule.reason})"


def _absent(id: str, says: str, why: str, *needs: tuple[str, str]) -> Rule:
    """A rule of what has no option, by axis and values separated by spaces."""
    of = tuple(tuple((axis, x) for x in values.split()) for axis, values in needs)
    return Rule(id, of, "absent", f".*unexpected keyword argument '{says}'", why)


_ENGINES, _RUNTIMES = ("where", "engine_cells engine_paged"), ("where", "runtime blocks")
REFUSED = (
    *_refused(),
    _absent(
        *("N1", "tiers", "a Runtime has no tiers: its sequences go to sessions"),
        *(_RUNTIMES, ("state", "tiers")),
    ),
    _absent(
        "N2",
        "prefix_cache",
        "a Runtime has no requests that could hit; `kvrt.reuse` plans what a prompt reuses",
        *(_RUNTIMES, ("state", "prefix")),
    ),
    _absent(
        "N3",
        "decode",
        "a Runtime has no requests; its `seq_cp` shares a sequence, and searches are an Engine's",
        *(_RUNTIMES, ("decode", "fork beams shared")),
    ),
    _absent(
        "N4",
        "modules",
        "a `PromptCache` is of a Runtime; requests share what they begin with by the prefix cache: "
        "an Engine would have to find modules by hashes of their own and compute the arguments in "
        "the gaps between them, where it computes only what follows the cached tokens",
        *(_ENGINES, ("state", "modules")),
    ),
)
# Nothing is owed now; what is goes here.
DEBTS: tuple[Rule, ...] = ()
RULES = REFUSED + DEBTS
