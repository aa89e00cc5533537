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
        if self.mode == "cell" and self.hash_block_size is not None:
            raise BadConfig(
                "hash_block_size is for hits within blocks, in cell mode a hit ends at any token; "
                "leave it out"
            )
        if self.speculation is not None and self.run_ahead:
            raise BadConfig(
                "run_ahead dispatches a step before the last one is read, and drafts follow what "
                "that sampled; leave out run_ahead, or speculation"
            )
        if self.sessions is not None and not self.prefix_cache:
            raise BadConfig(
                "sessions go into the prefix cache, and there is none; set prefix_cache"
            )

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
        if config.select is not None and config.select.unit > 1 and self.mode == "cell":
            raise BadConfig(
                f"{type(config.select).__name__} chooses {config.select.unit} cells at a time, and "
                "which lie together in cells depends on other requests, so that a request would "
                "not get what it gets alone; use mode='paged', or DoubleSparsity(by_cell=True)"
            )
        if config.n_rs_seq:
            self._check_rollback(config.n_rs_seq)
        if config.n_checkpoints and not self.prefix_cache:
            raise BadConfig(
                f"n_checkpoints is {config.n_checkpoints}; requests find checkpoints in the prefix "
                "cache, and there is none; set prefix_cache"
            )
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

    def _check_rollback(self, n_rs_seq: int) -> None:
        """Refuses states of the last tokens where nothing could be found by them."""
        if self.mode == "paged":
            raise BadConfig(
                f"n_rs_seq is {n_rs_seq}, in paged mode states are kept by block, a hit ends with "
                "one, and no call of an engine takes tokens back; set it to 0, or use mode='cell'"
            )
        if not self.prefix_cache:
            raise BadConfig(
                f"n_rs_seq is {n_rs_seq}, for hits that end within the last tokens of a text, and "
                "there is no prefix cache; set prefix_cache, or n_rs_seq to 0"
            )
        if self.speculation is not None:
            raise BadConfig(
                f"n_rs_seq is {n_rs_seq}, and a round of drafts keeps one state a request, that of "
                "its last accepted token; set n_rs_seq to 0, or leave out speculation"
            )

    def _check_by_channel(self, config: CacheConfig) -> None:
        """Refuses keys by channel where cells that share a scale are not one request's tokens."""
        size, n = self.hash_block_size, CELLS_OF_SCALE
        if size is not None and size % n:
            raise BadConfig(
                f"keys of {config.type_k} share a scale by {n} tokens, and a hit at a multiple of "
                f"hash_block_size {size} would cut them; make it a multiple of {n}, or leave it out"
            )
