"""The flags of the commands that keep many sequences at once."""

import functools
from typing import Any, Literal

from kvrt.cli.flags.cache import (
    AttentionFlags,
    CheckpointFlags,
    DefragFlags,
    KVFlags,
    RollbackFlags,
    SelectFlags,
    StepFlags,
)
from kvrt.cli.flags.context import (
    BatchPolicyFlags,
    ExtendFlags,
    KeepFlags,
    SizeFlags,
    WindowFlags,
)
from kvrt.cli.flags.declare import Options, flag, flag_group, flags_of
from kvrt.cli.flags.evaluate import RANDOM, LengthFlags, ModelFlags, SamplingFlags
from kvrt.cli.flags.mesh import MeshFlags
from kvrt.cli.flags.scheduling import RuleFlags, TierFlags
from kvrt.cli.flags.session_files import BlendFlags, JsonFlags, QuietFlags
from kvrt.cli.report.size import parse_size
from kvrt.config import MAX_SEQUENCES
from kvrt.errors import UsageError
from kvrt.files import kinds

Mode = Literal["cell", "paged"]

_cache = functools.partial(flag, "Cache")
_context = functools.partial(flag, "Context")
_files = functools.partial(
    flag, "Files (a request is a JSON object in a line; its keys go before these flags)"
)
_length = functools.partial(flag, "Length")
_memory = functools.partial(flag, "Memory")
_model = functools.partial(flag, "Model")
_serve = functools.partial(flag, "Serving")
_more = functools.partial(flag, "Serving", advanced=True)
# Long blocks are read fast, short ones are shared and released early.
_BLOCK_SIZES: dict[Mode, int] = {"cell": 256, "paged": 16}


@flag_group
class BlockFlags(Options):
    """How tokens get their slots."""

    mode: Mode = _cache("cell", "single cells, or blocks that requests with a common prefix share")
    block_size: int = _cache(0, "tokens a block; 0 takes 256 in cell mode, 16 in paged mode", "N")

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
    JsonFlags, BlockFlags, StepFlags, AttentionFlags, KVFlags, SizeFlags, AnyModelFlags
):
    """Values of the flags of `kvrt doctor`."""


@flag_group
class FitOptions(
    JsonFlags,
    BlockFlags,
    CheckpointFlags,
    RollbackFlags,
    StepFlags,
    SelectFlags,
    KVFlags,
    WindowFlags,
    BatchPolicyFlags,
    SizeFlags,
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
    )
    unified: bool = _memory(
        False, "with --mode paged: also what one page size for all layers would take"
    )

    def check(self) -> None:
        """Refuses a size that is none, and pages in cell mode."""
        super().check()
        self.max_bytes()
        if self.unified and self.mode != "paged":
            raise UsageError("--unified compares blocks; add --mode paged")

    @property
    def n_ctx_request(self) -> int:
        """Tokens of one sequence: its share of the context."""
        return self.n_ctx // self.n_seq_max

    def max_bytes(self) -> int | None:
        """The budget in bytes; None where it was left out."""
        return None if self.budget is None else parse_size("--budget", self.budget)


@flag_group
class ServeFlags(Options):
    """How many requests are served at once, and in what order."""

    n_seq_max: int = _serve(
        16,
        "sequences at once; the others wait",
        "K",
        low=1,
        most=MAX_SEQUENCES,
        aliases=("parallel",),
    )
    n_batch: int = _serve(
        512,
        "tokens of a step, prefill and decode together",
        "N",
        short="b",
        low=1,
        aliases=("n_ubatch",),
    )
    n_ctx_seq: int = _serve(
        0, "tokens of one request at most, its answer included; 0 is all that -c holds", "N"
    )
    budget: str | None = _serve(
        None,
        "memory for the cache, like 2GiB, --host_cache included and weights not: takes the place "
        "of -c, with --n_ctx_seq",
        "SIZE",
        advanced=True,
    )
    prefix_cache: bool = _serve(
        True,
        "reuse a prefix that another request computed: whole blocks, with --mode cell any number "
        "of tokens",
    )
    hash_block_size: int = _more(
        0,
        "in paged mode: a prefix hit may end at each multiple of so many tokens, within a block; "
        "0 takes whole blocks",
        "N",
    )
    shared_reads: bool = _more(
        False,
        "attend to shared prefixes once per step when faster (cascade attention); the last bits "
        "may differ",
    )
    salt: str | None = _more(
        None, "requests of different salts never share a prefix; a line may say its own", "TEXT"
    )
    n_recent: int = _more(
        64, "tokens that the repeat penalty of any line may look back, at most", "N", most=1 << 20
    )
    session_dir: str | None = _serve(
        None,
        "a folder of sessions, as of run --session; each request begins from the best of them",
        "FOLDER",
        file=kinds.SESSIONS,
    )

    def check(self) -> None:
        """Refuses a step in which not every sequence has its token."""
        super().check()
        self.budget_bytes()
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

    def budget_bytes(self) -> int | None:
        """Memory for the cache; None where -c sizes it."""
        return None if self.budget is None else parse_size("--budget", self.budget)


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
    MeshFlags,
    BlendFlags,
    TierFlags,
    RuleFlags,
    ServeFlags,
    WindowFlags,
    ExtendFlags,
    BatchPolicyFlags,
    BlockFlags,
    CheckpointFlags,
    DefragFlags,
    AttentionFlags,
    SelectFlags,
    KVFlags,
    SamplingFlags,
    LengthFlags,
    SizeFlags,
    ModelFlags,
    BatchFiles,
):
    """Values of the flags of `kvrt batch`."""

    n_ctx: int = _context(8192, "tokens of all sequences together", "N", short="c", low=1)
    n_predict: int = _length(256, "tokens to write at most", "N", short="n", low=1)
    chat: bool = _length(False, "take prompts as a user's messages, by the model's chat template")
    mode: Mode = _cache("paged", "blocks that requests with a common prefix share, or single cells")
    draft: str | None = _length(
        None,
        "verify several tokens a step; the text is the same. ngram drafts what followed the newest "
        "tokens before, layerskip:E what the first E layers say, any other name is a smaller "
        "model of the same vocabulary, which takes memory beside --budget",
        "ngram|layerskip:E|MODEL",
        advanced=True,
    )
    n_draft: int = _length(
        8, "with --draft: tokens drafted a step", "K", low=1, most=64, advanced=True
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
        if "n_draft" in self.given and self.draft is None:
            raise UsageError(f"--n_draft {self.n_draft} drafts nothing alone; add --draft ngram")
        if self.coordinator is not None and self.draft not in (None, "ngram"):
            raise UsageError(
                f"--draft {self.draft} with --coordinator: each process would draft by itself, and "
                "all have to draft the same; give ngram"
            )
        if self.host_cache is not None and self.mode == "cell":
            raise UsageError("--host_cache keeps blocks; leave out --mode cell")
        if self.n_checkpoints and not self.prefix_cache:
            raise UsageError(
                "--n_checkpoints are found in the prefix cache; leave out --noprefix_cache"
            )
        if self.coordinator is not None and "-" in (self.input, self.output):
            raise UsageError("-i and -o are files with --coordinator: each process reads -i")
        if self.coordinator is not None and self.seed == RANDOM:
            raise UsageError("--seed -1 is another one in each process of --coordinator; give it")
        if self.budget is not None and "n_ctx" in self.given:
            raise UsageError("--budget and -c both say how large the cache is; leave one out")
        if self.session_dir is not None and not self.prefix_cache:
            raise UsageError(
                "--session_dir puts sessions into the prefix cache; leave out --noprefix_cache"
            )

    def settled(self) -> Options:
        """The options as they are: each request takes a random seed of its own."""
        return self

    def defaults(self) -> dict[str, Any]:
        """What a line leaves out, by its keys."""
        names = [
            *(f.name for f in flags_of(SamplingFlags)),
            "n_predict",
            "stop",
            "chat",
            "ignore_eos",
            "policy",
            *(f.name for f in flags_of(KeepFlags)),
        ]
        found = {name: getattr(self, name) for name in names}
        found |= {"n": 1, "priority": 0, "cache": True, "salt": self.salt or ""}
        return found | {"n_window": self.window(self.n_ctx_request)}

    @property
    def n_ctx_request(self) -> int:
        """Tokens of one request in the cache at most."""
        if self.budget is not None:
            return self.n_ctx_seq
        return min(self.n_ctx_seq or self.n_ctx, self.n_ctx)
