"""The flags of a cache that no configuration has as a field."""

import functools
from typing import Literal

from kvrt.errors import UsageError
from kvrt.files import kinds
from kvrt.options.option import Options, flag, flag_group, flags_of_config
from kvrt.options.select import DoubleSparsity

_more = functools.partial(flag, "Cache", advanced=True)


@flag_group
class PlacementFlags(Options):
    """How a text gets its cells."""

    blocks: bool = _more(
        False,
        "place the text in blocks of --block_size cells, as paged mode does, and keep it there in "
        "its session; needs --nocontext_shift",
    )


@flag_group
class SelectFlags(flags_of_config(DoubleSparsity)):
    """Which cells a decode step reads."""

    select: Literal["none", "quest", "double_sparsity"] = _more(
        "none",
        "each sampled token reads --select_cells cells of a layer and kv head, chosen by labels "
        "beside the keys, and of a longer text the answer is an approximation; prompts read all",
        "NAME",
        decides=("select",),
    )
    select_channels: str | None = _more(
        None,
        "with --select double_sparsity: the file of heavy channels of this model, which "
        "scripts/calibrate_channels.py writes",
        "FILE",
        file=kinds.INPUT,
        decides=("select_channels",),
    )

    def check(self) -> None:
        """Refuses sizes of no sparse read, and channels that none or too many ask for."""
        super().check()
        given = sorted(x for x in self.given if x.startswith("select_"))
        if self.select == "none" and given:
            raise UsageError(f"--{given[0]} sizes sparse reads; add --select quest")
        by_channel = {"select_channels", "select_labels", "select_by_cell"} & self.given
        if self.select == "quest" and by_channel:
            raise UsageError(
                f"--{min(by_channel)} is for --select double_sparsity; leave it out, or take that"
            )
        if self.select == "double_sparsity" and self.select_channels is None:
            raise UsageError(
                "--select double_sparsity compares heavy channels of the model; add "
                "--select_channels FILE, which scripts/calibrate_channels.py writes"
            )
