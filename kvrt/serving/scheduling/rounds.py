"""Orders of a round: all who wait when it begins, sorted by the prefixes that they share.

Whoever comes later is of the next round, so that every wait ends.

Source: RadixAttention, arXiv:2312.07104, sec. 3 and theorem 3.1; BatchLLM, arXiv:2412.03594.
"""

from collections.abc import Sequence

from kvrt.serving.request import SeqState
from kvrt.serving.scheduling.one_level import best_groups
from kvrt.serving.scheduling.prompt_trie import PromptTrie, build_trie


def depth_first(states: Sequence[SeqState]) -> list[SeqState]:
    """By a depth-first walk over the tree of their prompts, where most are below first.

    Args:
      states: who wait, by arrival; of equal subtrees the one whose first arrival is earlier goes
        first.
    """
    trie = _trie_of(states)
    n_nodes = len(trie.parents)
    n_below, first = [0] * n_nodes, [len(states)] * n_nodes
    for i, leaf in enumerate(trie.leaves):
        n_below[leaf], first[leaf] = 1, i
    for u in reversed(range(1, n_nodes)):
        p = trie.parents[u]
        n_below[p] += n_below[u]
        first[p] = min(first[p], first[u])
    children: list[list[int]] = [[] for _ in trie.parents]
    for u in range(1, n_nodes):
        children[trie.parents[u]].append(u)
    of_leaf = {leaf: i for i, leaf in enumerate(trie.leaves)}
    order, left = [], [0]
    while left:
        u = left.pop()
        if u in of_leaf:
            order.append(states[of_leaf[u]])
        left += sorted(children[u], key=lambda c: (n_below[c], -first[c]))
    return order


def by_groups(states: Sequence[SeqState], n_least: int) -> list[SeqState]:
    """By groups of one shared prefix each, those that decode most for their prompts first.

    So long decodes run beside the prompts of later groups. How long a request decodes is taken to
    be its n_predict.

    Args:
      states: who wait, by arrival.
      n_least: tokens that a group shares at least.
    """
    trie = _trie_of(states)
    _, group_of = best_groups(trie.parents, trie.depths, n_least)
    groups: dict[int, list[int]] = {}
    for i, leaf in enumerate(trie.leaves):
        groups.setdefault(group_of[leaf] or -leaf, []).append(i)
    ranked = []
    for node, members in groups.items():
        n_shared = trie.depths[node] if node > 0 else 0
        n_decode = sum(states[i].request.n_predict for i in members)
        n_prompt = n_shared + sum(states[i].n_prompt - n_shared for i in members)
        members.sort(key=lambda i: (states[i].request.text, i))
        ranked.append((-n_decode / n_prompt, min(members), members))
    return [states[i] for _, _, members in sorted(ranked) for i in members]


def _trie_of(states: Sequence[SeqState]) -> PromptTrie:
    """Their prompts; those that may share nothing are alone."""
    return build_trie([(_scope(i, s), s.request.text) for i, s in enumerate(states)])


def _scope(i: int, state: SeqState) -> tuple:
    is_alone = not state.request.cache or state.folds
    return (i,) if is_alone else ("salt", state.request.salt)
