"""The flags of the commands that keep many sequences at once."""

import dataclasses
from typing import Annotated, Literal

from kvrt.cli.options import ModelFlags, RowFlags, SizeFlags
from kvrt.cli.session_options import JsonFlags
from kvrt.cli.size import parse_size
from kvrt.cli.table import Info, Options
from kvrt.config import MAX_SEQUENCES
from kvrt.errors import UsageError

Mode = Literal["cell", "paged"]

_CACHE = "Cache"
_MEMORY = "Memory"
_INT_MAX = 2**31 - 1
# Long blocks are read fast, short ones are shared and given back early.
_BLOCK_SIZES: dict[Mode, int] = {"cell": 256, "paged": 16}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlaceFlags(Options):
    """How tokens find their places."""

    mode: Annotated[
        Mode,
        Info(_CACHE, "single cells, or blocks that requests with one beginning share"),
    ] = "cell"
    block_size: Annotated[
        int,
        Info(
            _CACHE,
            "tokens a block; 0 takes 256 in cell mode, 16 in paged mode",
            "N",
            high=_INT_MAX,
        ),
    ] = 0

    @property
    def block(self) -> int:
        """The block size that is meant."""
        return self.block_size or _BLOCK_SIZES[self.mode]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitOptions(JsonFlags, PlaceFlags, RowFlags, SizeFlags, ModelFlags):
    """Values of the flags of `kvrt fit`."""

    n_seq: Annotated[
        int,
        Info(
            _MEMORY,
            "sequences at once, which share the -c tokens",
            "K",
            low=1,
            high=MAX_SEQUENCES,
            aliases=("n_seq_max",),
        ),
    ] = 1
    budget: Annotated[
        str | None,
        Info(
            _MEMORY,
            "memory there is, like 8GiB; left out, what this machine or its accelerator has free",
            "SIZE",
        ),
    ] = None
    unified: Annotated[
        bool,
        Info(_MEMORY, "with --mode paged: also what one page size for all layers would take"),
    ] = False

    def check(self) -> None:
        """Refuses a size that is none, and pages in cell mode."""
        super().check()
        self.max_bytes()
        if self.unified and self.mode != "paged":
            raise UsageError("--unified compares blocks; add --mode paged")

    def max_bytes(self) -> int | None:
        """The budget in bytes; None where it was left out."""
        return None if self.budget is None else parse_size("--budget", self.budget)
