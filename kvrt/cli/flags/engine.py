"""The flags of the commands that keep many sequences at once."""

import dataclasses
from typing import Annotated, Any, Literal

from kvrt.cli.flags.field import Info, Options, rows
from kvrt.cli.flags.mesh import DeviceFlags
from kvrt.cli.flags.run import (
    DrawFlags,
    FrameFlags,
    LengthFlags,
    ModelFlags,
    RowFlags,
    SizeFlags,
    StepFlags,
)
from kvrt.cli.flags.sessions import JsonFlags, QuietFlags
from kvrt.cli.report.size import parse_size
from kvrt.config import MAX_SEQUENCES
from kvrt.errors import UsageError

Mode = Literal["cell", "paged"]

_CACHE = "Cache"
_CONTEXT = "Context"
_FILES = "Files (a request is a JSON object in a line; its keys go before these flags)"
_LENGTH = "Length"
_MEMORY = "Memory"
_SERVE = "Serving"
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
class FitOptions(JsonFlags, PlaceFlags, StepFlags, RowFlags, SizeFlags, ModelFlags):
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeFlags(Options):
    """How many requests are served at once, and in what order."""

    n_seq_max: Annotated[
        int,
        Info(
            _SERVE,
            "sequences at once; the others wait",
            "K",
            low=1,
            high=MAX_SEQUENCES,
            aliases=("n_seq", "parallel"),
        ),
    ] = 16
    n_batch: Annotated[
        int,
        Info(
            _SERVE,
            "tokens of a step, of prompts and of sequences that go on",
            "N",
            short="b",
            low=1,
            high=_INT_MAX,
            aliases=("n_ubatch",),
        ),
    ] = 512
    n_ctx_seq: Annotated[
        int,
        Info(
            _SERVE,
            "tokens of one request at most, its answer included; 0 is all that -c holds",
            "N",
            high=_INT_MAX,
        ),
    ] = 0
    prefix_cache: Annotated[
        bool, Info(_SERVE, "in paged mode: requests find what others computed of their beginning")
    ] = True
    hash_block_size: Annotated[
        int,
        Info(
            _SERVE,
            "in paged mode: tokens that what is found may end at a multiple of, within a block; 0 "
            "takes whole blocks",
            "N",
            high=_INT_MAX,
        ),
    ] = 0
    by_prefix: Annotated[
        bool, Info(_SERVE, "in paged mode: requests that begin alike go together")
    ] = False
    host_cache: Annotated[
        str | None,
        Info(
            _SERVE,
            "in paged mode: memory of the host where blocks are found that gave way, like 2GB",
            "SIZE",
        ),
    ] = None
    disk_cache: Annotated[
        str | None,
        Info(
            _SERVE,
            "with --host_cache: a folder where they are found as well, by later commands too",
            "FOLDER",
        ),
    ] = None
    disk_cache_size: Annotated[
        str, Info(_SERVE, "what the files of --disk_cache may take", "SIZE")
    ] = "10GB"

    def check(self) -> None:
        """Refuses a step in which not every sequence has its token, and tiers without room."""
        super().check()
        self.host_bytes()
        self.disk_bytes()
        if self.disk_cache is not None and self.host_cache is None:
            raise UsageError("--disk_cache takes its blocks from the host; add --host_cache SIZE")
        if self.n_batch < self.n_seq_max:
            raise UsageError(
                f"--n_batch {self.n_batch} is below --n_seq_max {self.n_seq_max}: a step has a "
                "token of each sequence; raise it"
            )

    def host_bytes(self) -> int | None:
        """Memory of the host for blocks; None for none."""
        return None if self.host_cache is None else parse_size("--host_cache", self.host_cache)

    def disk_bytes(self) -> int:
        """Room on the disk for them."""
        return parse_size("--disk_cache_size", self.disk_cache_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchFiles(Options):
    """Where requests come from and results go to."""

    input: Annotated[
        str | None,
        Info(_FILES, "the requests, - for standard input", "FILE", short="i", needed=True),
    ] = None
    output: Annotated[
        str | None,
        Info(
            _FILES,
            "the results, - for standard output; a file that is there is gone on with",
            "FILE",
            short="o",
            needed=True,
        ),
    ] = None
    restart: Annotated[
        bool,
        Info(
            _FILES,
            "take results of another model, other flags or other requests out of -o, where they "
            "are refused otherwise, and compute anew; the former file is kept, with ~ at its name",
        ),
    ] = False
    metrics: Annotated[
        str | None, Info(_FILES, "write counters here at the end, as Prometheus reads them", "FILE")
    ] = None
    stats: Annotated[bool, Info(_FILES, "also print all counters at the end, as a table")] = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchOptions(
    QuietFlags,
    DeviceFlags,
    ServeFlags,
    PlaceFlags,
    FrameFlags,
    RowFlags,
    DrawFlags,
    LengthFlags,
    SizeFlags,
    ModelFlags,
    BatchFiles,
):
    """Values of the flags of `kvrt batch`."""

    n_ctx: Annotated[
        int,
        Info(_CONTEXT, "tokens of all sequences together", "N", short="c", low=1, high=_INT_MAX),
    ] = 8192
    n_predict: Annotated[
        int,
        Info(_LENGTH, "tokens to write at most", "N", short="n", low=1, high=_INT_MAX),
    ] = 256
    chat: Annotated[
        bool, Info(_LENGTH, "take prompts as a user's messages, by the model's chat template")
    ] = False
    mode: Annotated[
        Mode,
        Info(_CACHE, "blocks that requests with one beginning share, or single cells"),
    ] = "paged"

    def check(self) -> None:
        """Refuses tiers of blocks where there are none."""
        super().check()
        if self.host_cache is not None and self.mode == "cell":
            raise UsageError("--host_cache keeps blocks; leave out --mode cell")

    def settled(self) -> Options:
        """The options as they are: each request takes a random seed of its own."""
        return self

    def defaults(self) -> dict[str, Any]:
        """What a line leaves out, by its keys."""
        names = [*(f.name for f in rows(DrawFlags)), "n_predict", "stop", "chat", "ignore_eos"]
        return {name: getattr(self, name) for name in names} | {"n": 1, "priority": 0}
