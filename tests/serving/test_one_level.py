"""Groups of one shared prefix: the dynamic program against all that could be chosen."""

import itertools
import random

from kvrt.serving.request import Request, samples_of
from kvrt.serving.scheduling.one_level import best_groups
from kvrt.serving.scheduling.prompt_trie import build_trie
from kvrt.serving.scheduling.rounds import by_groups, depth_first


def as_text(tokens) -> bytes:
    return Request(id="a", tokens=tuple(tokens), n_predict=1).text


def random_prompts(rng, n):
    """Few tokens and lengths, so that prompts share, begin one another and are equal."""
    return [tuple(rng.choices(range(2), k=rng.randint(1, 8))) for _ in range(n)]


def n_common(a, b):
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def brute_force(prompts, n_least):
    """The most tokens reused: every set of prefixes, each prompt with the longest of them."""
    cut = [p[:-1] for p in prompts]
    ends = {a[:n] for a in cut for n in range(n_least, len(a) + 1)}
    # Prefixes of one prompt alone reuse nothing, and of those with the same members the longest is.
    best = {
        frozenset(i for i, a in enumerate(cut) if a[: len(p)] == p): len(p)
        for p in sorted(ends, key=len)
    }
    shared = [(members, n) for members, n in best.items() if len(members) > 1]
    most = 0
    for n_chosen in range(len(shared) + 1):
        for chosen in itertools.combinations(shared, n_chosen):
            total = -sum(n for _, n in chosen)
            for i in range(len(cut)):
                total += max([0, *(n for members, n in chosen if i in members)])
            most = max(most, total)
    return most


def test_the_dynamic_program_is_exact():
    rng = random.Random(0)
    for i in range(400):
        prompts, n_least = random_prompts(rng, rng.randint(1, 7)), 1 + i % 3
        trie = build_trie([("", as_text(p)) for p in prompts])
        n, group_of = best_groups(trie.parents, trie.depths, n_least)
        assert n == brute_force(prompts, n_least)
        # And it is what the groups reuse.
        groups = [group_of[leaf] for leaf in trie.leaves]
        used = set(groups) - {0}
        assert n == sum(trie.depths[g] for g in groups) - sum(trie.depths[g] for g in used)
        assert all(trie.depths[g] >= n_least for g in used)


def test_a_tree_has_what_prompts_share():
    rng = random.Random(1)
    for _ in range(100):
        prompts = random_prompts(rng, 9)
        scopes = [rng.choice("xy") for _ in prompts]
        trie = build_trie([(s, as_text(p)) for s, p in zip(scopes, prompts, strict=True)])
        assert all(p < u for u, p in enumerate(trie.parents) if u)
        path = []
        for leaf, prompt in zip(trie.leaves, prompts, strict=True):
            assert trie.depths[leaf] == len(prompt) - 1 and leaf not in trie.parents
            up = [leaf]
            while up[-1]:
                up.append(trie.parents[up[-1]])
            path.append(up)
        for a, b in itertools.combinations(range(len(prompts)), 2):
            lowest = next(u for u in path[a] if u in path[b])
            same = scopes[a] == scopes[b]
            assert trie.depths[lowest] == same * n_common(prompts[a][:-1], prompts[b][:-1])


def states_of(*asked):
    return [
        samples_of(Request(id=str(i), tokens=tuple(tokens), n_predict=n))[0]
        for i, (tokens, n) in enumerate(asked)
    ]


def order_of(states):
    return [int(s.request.id) for s in states]


def test_depth_first_takes_the_heaviest_subtree_first():
    texts = [[7, 1], [1, 1, 5, 6], [2, 2, 9], [1, 1, 5, 7], [1, 1, 8], [2, 2, 8]]
    assert order_of(depth_first(states_of(*((t, 1) for t in texts)))) == [1, 3, 4, 2, 5, 0]


def test_groups_that_decode_most_for_their_prompts_go_first():
    """Of 1,1: 4 tokens out for 4 in; of 2,2: 20 for 4; alone: 12 for 3."""
    asked = [([1, 1, 5], 2), ([2, 2, 5], 10), ([3, 3, 3], 12), ([1, 1, 6], 2), ([2, 2, 4], 10)]
    assert order_of(by_groups(states_of(*asked), 2)) == [4, 1, 2, 0, 3]


def test_a_round_of_many_prompts_of_one_tree():
    """Every prompt begins the next one: as deep as a tree can be."""
    states = states_of(*((range(i + 2), 1) for i in range(300)))
    # The last two end alike; then those that are shorter and shorter.
    assert order_of(depth_first(states)) == [298, 299, *range(297, -1, -1)]
    assert sorted(order_of(by_groups(states, 16))) == list(range(300))
