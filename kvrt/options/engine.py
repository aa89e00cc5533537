"""What a user chooses of an engine beside the cache's sizes and types."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from kvrt.errors import BadConfig
from kvrt.files import kinds
from kvrt.kv_types import CELLS_OF_SCALE, any_by_channel
from kvrt.options.cache import CacheConfig
from kvrt.options.compose import check_together
from kvrt.options.option import option
from kvrt.options.serving import Rules, TierConfig
from kvrt.whole_numbers import take_whole_numbers

if TYPE_CHECKING:
    from kvrt.drafts.drafter import Speculation
else:
    Speculation = object  # whose module imports NumPy, which no help text waits for

Mode = Literal["cell", "paged"]

_serve = functools.partial(option, group="Serving", decides=None)
_more = functools.partial(option, group="Serving", decides=None, advanced=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionDir:
    """A folder of sessions, of which each request begins from the best; none of them is written.

    A session that turns out to be damaged, or of which nothing can be used, is left out.

    Attributes:
      path: a folder that `kvrt run --session FOLDER` filled, or `kvrt ls FOLDER --rebuild` indexed.
      tell: called with a line for each session that is left out.
    """

    path: Path = option(
        dataclasses.MISSING,
        "a folder of sessions, as of run --session; each request begins from the best of them",
        "FOLDER",
        group="Serving",
        decides=None,
        flag="session_dir",
        cli=None,
        cli_type=str | None,
        file=kinds.SESSIONS,
    )
    tell: Callable[[str], None] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How an engine serves.

    Attributes:
      mode: "paged" keeps tokens in blocks of block_size; "cell" in single cells, in arrays whose
        blocks have block_size.
      rules: how the scheduler decides; None is first come, first served, n_ubatch a step.
      prefix_cache: whether requests find what others computed: whole blocks, in cell mode tokens.
      hash_block_size: in paged mode, tokens that a hit may end at a multiple of, within a block
        that is then copied; None is whole blocks.
      n_recent: tokens that a repeat penalty may look back.
      tiers: where blocks go beyond the device; call `Engine.close` in the end. Cell mode gives out
        whole blocks then.
      sessions: a folder of sessions that requests begin from.
      budget_bytes: of the cache on all devices together, positions and owners of its cells, and
        tiers in the host's memory; `CacheConfig.n_ctx` is then what there is room for. None takes
        n_ctx as it is.
      run_ahead: whether a step that only decodes is dispatched before the one before it is read;
        None is where the device is not the CPU, on which both want the same cores.
      shared_reads: whether attention of sequences that decode reads what several of them begin with
        once for all, where that is faster, in place of once for each; blocks, or cells in blocks,
        that they share. Results differ in their last bits, as sums are in another order.
      speculation: drafts that samples bring to the steps in which they decode, with the same text.
        No step runs ahead then, for drafts follow what was sampled. None is none.
      identity: what a session must share beside weights and sizes, as for a `Runtime`.
    """

    mode: Mode = option(
        "paged",
        "blocks that requests with a common prefix share, or single cells",
        group="Cache",
        decides=None,
        limits=True,
    )
    rules: Rules | None = None
    prefix_cache: bool = _serve(
        True,
        "reuse a prefix that another request computed: whole blocks, with --mode cell any number "
        "of tokens",
    )
    hash_block_size: int | None = _more(
        None,
        "in paged mode: a prefix hit may end at each multiple of so many tokens, within a block; "
        "0 takes whole blocks",
        "N",
        none_at=0,
    )
    n_recent: int = _more(
        64,
        "tokens that the repeat penalty of any line may look back, at most",
        "N",
        most=1 << 20,
        made=True,
    )
    tiers: TierConfig | None = None
    sessions: SessionDir | None = None
    budget_bytes: int | None = _serve(
        None,
        "memory for the cache, like 2GiB, --host_cache included and weights not: takes the place "
        "of -c, with --n_ctx_seq",
        "SIZE",
        flag="budget",
        cli_type=str | None,
        size=True,
        advanced=True,
    )
    run_ahead: bool | None = None
    shared_reads: bool = _more(
        False,
        "attend to shared prefixes once per step when faster (cascade attention); the last bits "
        "may differ",
    )
    speculation: Speculation | None = None
    identity: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuses unknown modes, and options of blocks in cell mode."""
        take_whole_numbers(self)
        if self.mode not in get_args(Mode):
            raise BadConfig(f"mode {self.mode!r}; 'cell' or 'paged'")
        check_together(self.traits)

    @property
    def traits(self) -> dict[str, str]:
        """Names that the rules of `kvrt.options.compose` refer to, and their words."""
        found = {
            "engine": True,
            "cell mode" if self.mode == "cell" else "paged mode": True,
            "no prefix cache": not self.prefix_cache,
            "hash_block_size": self.hash_block_size is not None,
            "run_ahead": self.run_ahead,
            "sessions": self.sessions is not None,
            "shared reads": self.shared_reads,
        }
        of_drafts = self.speculation.traits if self.speculation else {}
        return {name: "" for name, x in found.items() if x} | of_drafts

    def page(self, config: CacheConfig) -> int | None:
        """Tokens of a block of the manager: in cell mode 1; None is block_size.

        Tiers copy whole blocks of the arrays, and keys by channel share scales in one: then those
        are what a request gets in cell mode too.
        """
        by_block = self.tiers is not None or any_by_channel(config.type_k)
        return 1 if self.mode == "cell" and not by_block else None

    def fine(self, config: CacheConfig) -> int | None:
        """Tokens that hits end at multiples of, within blocks; None is whole blocks."""
        if self.mode == "cell" and any_by_channel(config.type_k):
            return CELLS_OF_SCALE
        return self.page(config) or self.hash_block_size

    def fitted(self, config: CacheConfig) -> "EngineConfig":
        """These options with rules, for a cache that an engine can serve from.

        Raises:
          BadConfig: the cache is of a kind that an engine does not serve from, or too small.
        """
        rules = self.rules or Rules(n_batch=config.n_ubatch)
        if self.budget_bytes is not None and rules.n_ctx_seq is None:
            raise BadConfig(
                f"budget_bytes is {self.budget_bytes}, and nothing says how long one request may "
                "be; set n_ctx_seq of the rules"
            )
        if any_by_channel(config.type_k):
            self._check_by_channel(config)
        check_together(self.traits, config.traits)
        if rules.n_batch > config.n_ubatch:
            raise BadConfig(
                f"n_batch is {rules.n_batch}, above n_ubatch {config.n_ubatch}; raise n_ubatch"
            )
        n_draft = self.speculation.n_draft if self.speculation else 0
        if n_draft + 1 > rules.n_batch:
            raise BadConfig(
                f"n_draft is {n_draft}, and a step of {n_draft + 1} tokens exceeds n_batch "
                f"{rules.n_batch}; lower the one or raise the other"
            )
        return dataclasses.replace(self, rules=rules)

    def _check_by_channel(self, config: CacheConfig) -> None:
        """Refuses keys by channel where cells that share a scale are not one request's tokens."""
        size, n = self.hash_block_size, CELLS_OF_SCALE
        if size is not None and size % n:
            raise BadConfig(
                f"keys of {config.type_k} share a scale by {n} tokens, and a hit at a multiple of "
                f"hash_block_size {size} would cut them; make it a multiple of {n}, or leave it out"
            )
