"""The tree of the prompts that wait, path-compressed, as two lists of integers.

Each prompt is a leaf, cut before its last token, which is computed in any case. Built for one
round and thrown away: what is cached is in the prefix index of the cache.
"""

import dataclasses
from collections.abc import Hashable, Sequence

import numpy as np

_ITEM = 4  # bytes of a token in a prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptTrie:
    """Node 0 is the root; a parent's number is below those of its children.

    Attributes:
      parents: of each node; the root's is 0.
      depths: tokens from the root to a node.
      leaves: of each prompt, its node; a node is the leaf of one prompt or has children.
    """

    parents: list[int]
    depths: list[int]
    leaves: list[int]


def build_trie(prompts: Sequence[tuple[Hashable, bytes]]) -> PromptTrie:
    """The tree of prompts.

    Args:
      prompts: of each one what has to be equal for two to share anything, and its tokens as int32.
    """
    scopes: dict[Hashable, list[int]] = {}
    for i, (scope, _) in enumerate(prompts):
        scopes.setdefault(scope, []).append(i)
    parents, depths, leaves = [0], [0], [0] * len(prompts)
    for members in scopes.values():
        members.sort(key=lambda i: (prompts[i][1][:-_ITEM], i))
        _add_scope(members, [prompts[i][1][:-_ITEM] for i in members], parents, depths, leaves)
    # An inner node is less deep than those below it, or stands before its leaves.
    is_leaf = set(leaves)
    order = sorted(range(len(parents)), key=lambda u: (depths[u], u in is_leaf, u))
    number = {u: i for i, u in enumerate(order)}
    return PromptTrie(
        parents=[number[parents[u]] for u in order],
        depths=[depths[u] for u in order],
        leaves=[number[u] for u in leaves],
    )


def _add_scope(
    members: list[int], texts: list[bytes], parents: list[int], depths: list[int], leaves: list[int]
) -> None:
    """Adds sorted prompts: each one's branch leaves the last one's where they begin to differ."""
    path = [0]  # nodes from the root to the last leaf
    for i, (member, text) in enumerate(zip(members, texts, strict=True)):
        n = _n_common(texts[i - 1], text) if i else 0
        below = path.pop() if i else 0  # a prompt that others begin with stays a leaf
        while depths[path[-1]] > n:
            below = path.pop()
        if depths[path[-1]] < n:
            parents.append(path[-1])
            depths.append(n)
            parents[below] = len(parents) - 1
            path.append(parents[below])
        parents.append(path[-1])
        depths.append(len(text) // _ITEM)
        leaves[member] = len(parents) - 1
        path.append(leaves[member])


def _n_common(a: bytes, b: bytes) -> int:
    n = min(len(a), len(b))
    x, y = np.frombuffer(a[:n], np.int32), np.frombuffer(b[:n], np.int32)
    differ = np.flatnonzero(x != y)
    return int(differ[0]) if differ.size else n // _ITEM
