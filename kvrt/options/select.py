"""Sparse reads: which of a sequence's cells a query reads; frozen, checked when made."""

import dataclasses
import functools
from typing import Any, ClassVar, Literal, get_args

from kvrt.errors import BadConfig
from kvrt.options.option import check_limits, option
from kvrt.whole_numbers import take_whole_numbers

# Cells that are chosen together: a line of 64 bytes of one channel of float32 keys.
UNIT = 16
LabelDtype = Literal["f32", "f16", "int4"]
_select = functools.partial(option, group="Cache", advanced=True)
Channels = tuple[tuple[tuple[int, ...], ...], ...]


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise BadConfig(message)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Select:
    """What all sparse reads have: `Quest` and `DoubleSparsity` are two.

    A step of one token a sequence reads n_cells cached cells of a layer and kv head, chosen by
    labels that lie beside the keys; softmax over those and the token itself is exact. Steps of
    more tokens (prefill) read all, and so do sequences that have no more than n_cells.

    Attributes:
      n_cells: cells that a query reads of the cache, a multiple of 16.
      n_sink: positions below it are read always.
      n_recent: so many newest positions before the token are read always.
      n_dense: the model's first layers that read all.
    """

    name: ClassVar[str] = ""
    n_cells: int = _select(
        dataclasses.MISSING,
        "with --select: cells read, a multiple of 16",
        "N",
        flag="select_cells",
        cli=1024,
        low=1,
        decides=("select",),
    )
    n_sink: int = _select(
        4,
        "with --select: first positions that are always read",
        "N",
        flag="select_sink",
        decides=("select",),
    )
    n_recent: int = _select(
        16,
        "with --select: newest positions that are always read",
        "N",
        flag="select_recent",
        decides=("select",),
    )
    n_dense: int = _select(
        2,
        "with --select: first layers that read all",
        "N",
        flag="select_dense",
        decides=("select",),
    )

    def __post_init__(self) -> None:
        """Refuses budgets that hold no choice."""
        take_whole_numbers(self)
        check_limits(self)
        _check(
            self.n_cells % UNIT == 0,
            f"select reads n_cells = {self.n_cells} cells; give a multiple of {UNIT} above 0",
        )
        # What is kept need not begin where a unit does.
        least = sum(-(-(n - 1) // UNIT) + 1 for n in (self.n_sink, self.n_recent) if n)
        _check(
            self.n_units > least,
            f"select reads n_cells = {self.n_cells}, and n_sink = {self.n_sink} and n_recent = "
            f"{self.n_recent} may lie in {least * UNIT} of them; raise n_cells to "
            f"{(least + 1) * UNIT} or keep fewer",
        )

    @property
    def unit(self) -> int:
        """Cells that are chosen together."""
        return UNIT

    @property
    def n_units(self) -> int:
        """Units that are chosen."""
        return self.n_cells // self.unit

    @property
    def traits(self) -> dict[str, str]:
        """What of them does not go with everything, see `kvrt.options.compose`."""
        found = {"select": str(self.n_dense)}
        if self.unit > 1:
            found["select by unit"] = f"{type(self).__name__} chooses {self.unit} cells at a time"
        return found

    @property
    def said(self) -> dict[str, Any]:
        """Name and settings as a session has them."""
        return {"name": self.name} | {
            f.name: getattr(self, f.name) for f in dataclasses.fields(self)
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quest(Select):
    """Units of 16 cells by an upper bound of their scores, from each channel's extremes.

    A unit's bound for a query is the sum over channels d of max(q_d * min_d, q_d * max_d); those
    of the query heads of a kv head become weights (softmax) that are summed.

    Source: arXiv:2406.10774.
    """

    name: ClassVar[str] = "quest"

    @property
    def traits(self) -> dict[str, str]:
        """Likewise, and what its labels are."""
        return {**super().traits, "extremes": ""}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoubleSparsity(Select):
    """Cells by their scores in a few heavy channels, chosen beforehand for each layer and kv head.

    Weights are softmax of the scores in these channels, summed over the query heads of a kv head;
    of a unit of 16 cells its greatest score counts.

    Attributes:
      channels: ascending channels by layer and kv head, as many of each (r); see
        `kvrt.runtime.heavy_channels`.
      weights: digest of the parameters they were found with; "" is not checked.
      label_type: how labels are kept.
      by_cell: cells are chosen one by one instead of in units of 16 that have the heaviest: as
        many lines are read then as if nearly all cells were.

    Source: arXiv:2408.07092.
    """

    name: ClassVar[str] = "double_sparsity"
    channels: Channels
    weights: str = ""
    label_type: LabelDtype = _select(
        "f32",
        "with --select double_sparsity: dtype of labels",
        "TYPE",
        flag="select_labels",
        decides=("select_channels",),
    )
    by_cell: bool = _select(
        False,
        "with --select double_sparsity: choose cells one by one, not in units of 16",
        flag="select_by_cell",
        decides=("select_channels",),
    )

    def __post_init__(self) -> None:
        """Refuses channels that differ in number, or are named twice."""
        # An explicit base: slots-less dataclasses allow super(), and this reads the same.
        Select.__post_init__(self)
        _check(
            self.label_type in get_args(LabelDtype),
            f"label_type is {self.label_type!r}; one of {', '.join(get_args(LabelDtype))}",
        )
        found = [head for layer in self.channels for head in layer]
        _check(len(found) > 0 and len(found[0]) > 0, "select needs at least one channel a head")
        for head in found:
            ok = len(head) == len(found[0]) and list(head) == sorted(set(head)) and head[0] >= 0
            _check(ok, f"channels {head} of select: ascending, as many for every kv head")
        _check(
            self.label_type != "int4" or self.n_channels % 2 == 0,
            f"labels of int4 need an even number of channels, these are {self.n_channels}",
        )

    @property
    def unit(self) -> int:
        """Cells that are chosen together."""
        return 1 if self.by_cell else UNIT

    @property
    def traits(self) -> dict[str, str]:
        """Likewise, and channels of keys as they are."""
        return {**super().traits, "heavy channels": ""}

    @property
    def said(self) -> dict[str, Any]:
        """Likewise, with the number of channels in place of those of each layer."""
        return {**super().said, "channels": self.n_channels}

    @property
    def n_channels(self) -> int:
        """Channels of a label (r)."""
        return len(self.channels[0][0])
