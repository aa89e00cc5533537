"""Sizes of policies by score, and their names: what flags need to know without JAX."""

import dataclasses
import functools
from typing import Literal, get_args

from kvrt.files import kinds
from kvrt.options.option import option

ScoredName = Literal[
    "h2o",
    "snapkv",
    "tova",
    "expected_attention",
    "key_norm",
    "key_diff",
    "keyformer",
    "scissorhands",
    "sparse_window",
    "kvzip",
    "duo_attention",
]
BY_SCORE = get_args(ScoredName)
_policy = functools.partial(option, group="Context", advanced=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreSizes:
    """What every policy by score has; see `kvrt.policies.ScoredPolicy`."""

    budget: int = _policy(
        dataclasses.MISSING,
        "what each kv head keeps with a --policy by score (h2o and others): tokens, a part of the "
        "context like 25%, or the memory of all layers like 64MiB",
        "SIZE",
        flag="policy_budget",
        cli="512",
        cli_type=str,
        made=True,
        decides=("by_score",),
    )
    interval: int = _policy(
        64,
        "tokens between two evictions of a --policy by score",
        "N",
        flag="policy_interval",
        low=1,
        decides=("by_score",),
    )
    close_up: bool = _policy(
        False,
        "with a --policy by score: compare keys by their places among those that are kept, so that "
        "a text may be many times the trained length",
        decides=("by_score", "close_up"),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamSizes:
    """Of `duo_attention`: heads that keep a window, and how long it is."""

    streaming: tuple[tuple[int, ...], ...] = _policy(
        dataclasses.MISSING,
        "with --policy duo_attention: the kv heads that keep --n_stream tokens, a file that "
        "scripts/streaming_heads.py writes, or by layer, as [[1],[0,2]]; others keep the budget",
        "FILE",
        flag="streaming_heads",
        cli=None,
        cli_type=str | None,
        file=kinds.INPUT,
        made=True,
        decides=None,  # by its content
    )
    n_stream: int = _policy(
        128,
        "tokens that heads of --streaming_heads keep: sinks and the newest",
        "N",
        low=1,
        decides=("by_score", "streaming_heads"),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseReadSizes:
    """Of `sparse_window`: which of the tokens that it keeps a query reads."""

    n_read: int | None = _policy(
        None,
        "with --policy sparse_window: tokens of the budget that each token reads, half of them the "
        "newest, a multiple of --refresh_every; 0 reads all",
        "N",
        none_at=0,
        decides=("by_score", "n_read"),
    )
    refresh_every: int = _policy(
        32,
        "with --n_read: tokens from one that reads all, by whose attention the others choose, to "
        "the next",
        "N",
        low=1,
        decides=("by_score", "n_read"),
    )


# The policies that have them.
OF_SIZES: dict[type, tuple[str, ...]] = {
    ScoreSizes: BY_SCORE,
    StreamSizes: ("duo_attention",),
    SparseReadSizes: ("sparse_window",),
}
