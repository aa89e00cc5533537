"""One level of shared prefixes for a tree of prompts, so that the most tokens are reused.

Every prompt is in one group at most, and the members of a group share all tokens up to one node of
the tree, computed once. With F(u, A) the tokens reused below node u where the nearest group above
it shares A tokens (0 is none):

    F(leaf, A) = A
    F(u, A)    = max(sum of F(c, A), sum of F(c, depth(u)) - depth(u))   over the children c of u

for a group at u computes its prefix once more. The answer is F(root, 0).

Source: BatchLLM, arXiv:2412.03594.
"""

from collections.abc import Sequence


def best_groups(
    parents: Sequence[int], depths: Sequence[int], n_least: int = 1
) -> tuple[int, list[int]]:
    """The grouping that reuses the most tokens.

    Args:
      parents: of each node of a path-compressed tree; the root is node 0 and its own parent,
        others come after their parents.
      depths: tokens from the root to each node.
      n_least: tokens that a group shares at least, 1 or more.

    Returns:
      The tokens reused, and of each node the node whose prefix it shares; 0 is none.
    """
    children: list[list[int]] = [[] for _ in parents]
    for u in range(1, len(parents)):
        children[parents[u]].append(u)
    above: list[list[int]] = [[0]]  # of each node, the nodes that a group may be at above it
    for u in range(1, len(parents)):
        p = parents[u]
        above.append([*above[p], p] if _may_open(p, depths, n_least) else above[p])
    n_reused: list[list[int]] = [[] for _ in parents]  # by what is above
    opens: list[list[bool]] = [[] for _ in parents]
    for u in reversed(range(len(parents))):
        if not children[u]:
            n_reused[u] = [depths[a] for a in above[u]]
            continue
        sums = [sum(column) for column in zip(*(n_reused[c] for c in children[u]), strict=True)]
        for c in children[u]:
            n_reused[c] = []
        own = sums.pop() - depths[u] if _may_open(u, depths, n_least) else -1
        n_reused[u] = [max(n, own) for n in sums]
        opens[u] = [own > n for n in sums]
    return n_reused[0][0], _chosen(parents, above, opens)


def _may_open(u: int, depths: Sequence[int], n_least: int) -> bool:
    return u != 0 and depths[u] >= n_least


def _chosen(
    parents: Sequence[int], above: Sequence[list[int]], opens: Sequence[list[bool]]
) -> list[int]:
    """The nearest group of each node, from the root down."""
    group = [0] * len(parents)
    for u in range(1, len(parents)):
        group[u] = group[parents[u]]
        if opens[u] and opens[u][above[u].index(group[u])]:
            group[u] = u
    return group
