"""The flags of the commands that keep many sequences at once."""

import functools
from typing import Annotated

from msgspec import Meta

from kvrt.cli.flags.evaluate import DraftFlags, LengthFlags, ModelFlags, SamplingFlags
from kvrt.cli.flags.groups import (
    BatchPolicyFlags,
    CompressFlags,
    MeshFlags,
    SelectFlags,
    WindowFlags,
)
from kvrt.cli.flags.session_files import BlendFlags, JsonFlags, QuietFlags
from kvrt.config import MAX_SEQUENCES
from kvrt.errors import UsageError
from kvrt.files import kinds
from kvrt.options.cache import CacheConfig, SelfExtend
from kvrt.options.engine import EngineConfig, Mode, SessionDir
from kvrt.options.option import Options, flag, flag_group, flags_of_config
from kvrt.options.sampling import RANDOM
from kvrt.options.serving import Rules, TierConfig

_cache = functools.partial(flag, "Cache")
_context = functools.partial(flag, "Context")
_files = functools.partial(
    flag, "Files (a request is a JSON object in a line; its keys go before these flags)"
)
_length = functools.partial(flag, "Length")
_line = functools.partial(_length, line=True, decides=("always",))
_memory = functools.partial(flag, "Memory")
_model = functools.partial(flag, "Model")
_serve = functools.partial(flag, "Serving")
_more = functools.partial(flag, "Serving", advanced=True)
# Long blocks are read fast, short ones are shared and released early.
_BLOCK_SIZES: dict[Mode, int] = {"cell": 256, "paged": 16}
_Salt = Annotated[str, Meta(max_length=64)]


@flag_group
class BlockFlags(Options):
    """How tokens get their slots."""

    mode: Mode = _cache("cell", "single cells, or blocks that requests with a common prefix share")
    block_size: int = _cache(
        0, "tokens a block; 0 takes 256 in cell mode, 16 in paged mode", "N", limits=True
    )

    @property
    def block(self) -> int:
        """The block size that is meant."""
        return self.block_size or _BLOCK_SIZES[self.mode]


@flag_group
class AnyModelFlags(Options):
    """Which model, if any."""

    model: str | None = _model(
        None,
        "decide for this model, from its header alone; else for common sizes",
        "NAME",
        short="m",
    )


@flag_group
class DoctorOptions(
    JsonFlags,
    BlockFlags,
    flags_of_config(
        CacheConfig,
        only="n_ctx n_ubatch rope attention cache_type_k cache_type_v hadamard swa_full",
    ),
    AnyModelFlags,
):
    """Values of the flags of `kvrt doctor`."""


@flag_group
class FitOptions(
    JsonFlags,
    BlockFlags,
    SelectFlags,
    WindowFlags,
    BatchPolicyFlags,
    flags_of_config(CacheConfig, without="rope attention defrag_thold on_states"),
    ModelFlags,
):
    """Values of the flags of `kvrt fit`."""

    n_seq_max: int = _memory(
        1,
        "sequences at once, which share the -c tokens",
        "K",
        low=1,
        most=MAX_SEQUENCES,
    )
    budget: str | None = _memory(
        None,
        "memory there is, like 8GiB; left out, what this machine or its accelerator has free",
        "SIZE",
        size=True,
    )
    unified: bool = _memory(
        False, "with --mode paged: also what one page size for all layers would take"
    )
    programs: bool = _memory(
        False, "count the temporary memory of a prompt and a step: compiles their programs"
    )

    def check(self) -> None:
        """Refuses pages in cell mode, and programs of several sequences."""
        super().check()
        if self.unified and self.mode != "paged":
            raise UsageError("--unified compares blocks; add --mode paged")
        if self.programs and (self.mode == "paged" or self.n_seq_max > 1):
            raise UsageError(
                "--programs compiles the programs of `kvrt run`, which has one sequence in cells; "
                "leave --mode paged and --n_seq_max out"
            )

    @property
    def n_ctx_request(self) -> int:
        """Tokens of one sequence: its share of the context."""
        return self.n_ctx // self.n_seq_max


@flag_group
class ServeFlags(
    flags_of_config(SessionDir), flags_of_config(EngineConfig), flags_of_config(Rules)
):
    """How many requests are served at once, and in what order."""

    salt: str | None = _more(
        None,
        "requests of different salts never share a prefix; a line may say its own",
        "TEXT",
        line=_Salt,
    )

    def check(self) -> None:
        """Refuses a step in which not every sequence has its token."""
        super().check()
        if self.budget is not None and not self.n_ctx_seq:
            raise UsageError(
                f"--budget {self.budget}: how much of it one request may take is not said; add "
                "--n_ctx_seq N"
            )
        if self.n_batch < self.n_seq_max:
            raise UsageError(
                f"--n_batch {self.n_batch} is below --n_seq_max {self.n_seq_max}: a step has a "
                "token of each sequence; raise it"
            )


@flag_group
class TierFlags(flags_of_config(TierConfig)):
    """Where blocks go that the device has no room for."""

    def check(self) -> None:
        """Refuses tiers without room, and what says something of tiers where there are none."""
        super().check()
        if self.host_cache is not None:
            return
        if self.disk_cache is not None:
            raise UsageError("--disk_cache takes its blocks from the host; add --host_cache SIZE")
        for name in ("disk_cache_size", "eviction_policy", "always_load"):
            if name in self.given:
                raise UsageError(f"--{name} is for tiers, and there is none; add --host_cache SIZE")
        if getattr(self, "preempt", "") == "swap":
            raise UsageError("--preempt swap offloads to the host; add --host_cache SIZE")


@flag_group
class BatchFiles(Options):
    """Where requests come from and results go to."""

    input: str | None = _files(
        None,
        "the requests, - for standard input",
        "FILE",
        short="i",
        needed=True,
        file=kinds.INPUT,
    )
    output: str | None = _files(
        None,
        "the results, - for standard output; a file that is there is resumed",
        "FILE",
        short="o",
        needed=True,
        file=kinds.RESULTS,
    )
    restart: bool = _files(
        False,
        "recompute results made with another model, other flags or other requests, which are "
        "refused otherwise; the old file is kept as FILE~, or FILE~2 and so on",
    )
    metrics: str | None = _files(
        None,
        "write counters here every few seconds and at the end, as Prometheus reads them",
        "FILE",
        file=kinds.METRICS,
    )
    stats: bool = _files(False, "also print all counters at the end, as a table")


@flag_group
class BatchOptions(
    QuietFlags,
    CompressFlags,
    MeshFlags,
    BlendFlags,
    TierFlags,
    ServeFlags,
    WindowFlags,
    flags_of_config(SelfExtend),
    BatchPolicyFlags,
    BlockFlags,
    SelectFlags,
    flags_of_config(CacheConfig, without="n_ubatch n_rs_seq"),
    SamplingFlags,
    DraftFlags,
    LengthFlags,
    ModelFlags,
    BatchFiles,
):
    """Values of the flags of `kvrt batch`."""

    n_ctx: int = _context(
        8192, "tokens of all sequences together", "N", short="c", low=1, limits=True
    )
    n_predict: int = _line(256, "tokens to write at most", "N", short="n", low=1)
    chat: bool = _line(False, "take prompts as a user's messages, by the model's chat template")
    mode: Mode = _cache(
        "paged", "blocks that requests with a common prefix share, or single cells", limits=True
    )
    draft: str | None = _length(
        None,
        "verify several tokens a step; the text is the same. ngram drafts what followed the newest "
        "tokens before, layerskip:E what the first E layers say, any other name is a smaller "
        "model of the same vocabulary, which takes memory beside --budget",
        "ngram|layerskip:E|MODEL",
        advanced=True,
    )

    @property
    def policy_elsewhere(self) -> bool:
        """Whether a line may say the policy."""
        return True

    def check(self) -> None:
        """Refuses options of blocks where there are none, and of cells where there are blocks."""
        super().check()
        if self.mode == "paged" and "defrag_thold" in self.given:
            raise UsageError(
                "--defrag_thold packs cells, and blocks are never packed; leave it out"
            )
        if self.coordinator is not None and self.draft not in (None, "ngram"):
            raise UsageError(
                f"--draft {self.draft} with --coordinator: each process would draft by itself, and "
                "all have to draft the same; give ngram"
            )
        if self.n_checkpoints and not self.prefix_cache:
            raise UsageError(
                "--n_checkpoints are found in the prefix cache; leave out --noprefix_cache"
            )
        if self.coordinator is not None and "-" in (self.input, self.output):
            raise UsageError("-i and -o are files with --coordinator: each process reads -i")
        if self.coordinator is not None and self.seed == RANDOM:
            raise UsageError("--seed -1 is another one in each process of --coordinator; give it")
        if self.compresses and (self.coordinator is not None or not self.prefix_cache):
            raise UsageError(
                "a prompt that is compressed once goes into the prefix cache of one process; leave "
                "out --coordinator and --noprefix_cache, or take a policy by score that reads "
                "prompts in parts"
            )
        if self.budget is not None and "n_ctx" in self.given:
            raise UsageError("--budget and -c both say how large the cache is; leave one out")
        if self.session_dir is not None and not self.prefix_cache:
            raise UsageError(
                "--session_dir puts sessions into the prefix cache; leave out --noprefix_cache"
            )

    def settled(self) -> Options:
        """The options as they are: each request takes a random seed of its own."""
        return self

    @property
    def n_ctx_request(self) -> int:
        """Tokens of one request in the cache at most."""
        if self.budget is not None:
            return self.n_ctx_seq
        return min(self.n_ctx_seq or self.n_ctx, self.n_ctx)
