"""What a cache cannot do with layers that choose what they read by an indexer."""

from collections.abc import Sequence

from kvrt.config import GroupSpec
from kvrt.errors import BadConfig
from kvrt.kv_types import any_by_channel
from kvrt.options.cache import CacheConfig
from kvrt.store.shards import Shards


def check_index_reads(
    groups: Sequence[GroupSpec], config: CacheConfig, shards: Shards | None
) -> None:
    """Refuses caches whose cells an indexer does not find.

    Raises:
      BadConfig: a mesh divides them, keys have positions beside their own, or are by channel.
    """
    if not has_indexer(groups):
        return
    if shards is not None:
        raise BadConfig(
            "an indexer ranks all cells of a sequence together, and a mesh has some on each "
            "device; leave mesh out"
        )
    if any_by_channel(config.type_k):
        raise BadConfig(
            "keys by channel change when the last of a group comes, and with them the tokens that "
            "an indexer chooses; use a KV dtype by token"
        )
    if config.self_extend is not None and config.self_extend.kind == "paper":
        raise BadConfig(
            "SelfExtend of kind 'paper' compares far keys by grouped positions, and an indexer was "
            "trained to rank them by exact ones; use the kind cache, or do without it"
        )


def has_indexer(groups: Sequence[GroupSpec]) -> bool:
    """Whether layers of a model choose what they read by an indexer."""
    return any(group.indexed for group in groups)


def refuse_shared_reads(groups: Sequence[GroupSpec]) -> None:
    """Refuses to read a prefix once for several sequences.

    Raises:
      BadConfig: the model has an indexer.
    """
    if has_indexer(groups):
        raise BadConfig(
            "with an indexer each token reads cells of its own choice, so that several sequences "
            "have no prefix to read once; leave shared_reads out"
        )
