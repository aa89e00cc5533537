"""The tree of texts, against a list of them."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from kvrt.errors import UsageError
from kvrt.reuse.tree import RadixTree, SharedPrefix


def n_common(a, b):
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def expected(held, tokens):
    """All texts by their use, oldest first, and what a text shares with them."""
    most = max((n_common(t, tokens) for t in held.values()), default=0)
    names = tuple(n for n in reversed(held) if n_common(held[n], tokens) == most)
    return SharedPrefix(n_common=most, names=names)


def test_the_longest_beginning_wins_and_of_equal_ones_the_last_used():
    tree = RadixTree()
    tree.insert("short", [1, 2, 3])
    tree.insert("long", [1, 2, 3, 4, 5])
    tree.insert("other", [1, 2, 9])
    assert tree.longest([1, 2, 3, 4, 7]) == SharedPrefix(n_common=4, names=("long",))
    assert tree.longest([1, 2, 8]).names == ("other", "long", "short")
    tree.touch("short")
    assert tree.longest([1, 2, 3]) == SharedPrefix(n_common=3, names=("short", "long"))
    assert tree.longest([5]) == SharedPrefix(n_common=0, names=("short", "other", "long"))


def test_leaves_are_what_nothing_goes_on_from():
    tree = RadixTree()
    for name, tokens in {"a": [1, 2], "b": [1, 2, 3], "c": [1, 4], "d": [1, 2, 3]}.items():
        tree.insert(name, tokens)
    assert tree.leaves() == ("b", "c", "d")
    tree.touch("b")
    assert tree.leaves() == ("c", "d", "b")
    tree.remove("b")
    tree.remove("d")
    assert tree.leaves() == ("a", "c")


def test_names_that_are_not_there():
    tree = RadixTree()
    for call in (tree.remove, tree.touch):
        with pytest.raises(UsageError, match="'x'"):
            call("x")
    assert len(tree) == 0
    assert tree.longest([1]) == SharedPrefix(n_common=0, names=())


def test_a_text_is_a_copy():
    tree, tokens = RadixTree(), np.arange(6, dtype=np.int32)
    tree.insert("a", tokens)
    tokens[:] = 9
    assert tree.longest(list(range(6))).n_common == 6


TEXTS = st.lists(st.integers(0, 2), max_size=8)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["insert", "insert", "remove", "touch"]), st.integers(0, 5), TEXTS
        ),
        max_size=20,
    ),
    TEXTS,
)
@settings(max_examples=40)
def test_a_tree_finds_what_a_list_finds(calls, wanted):
    tree, held = RadixTree(), {}
    for what, name, tokens in calls:
        if what == "insert":
            held.pop(name, None)
            held[name] = tokens
            tree.insert(name, tokens)
        elif name in held:
            text = held.pop(name)
            if what == "touch":
                held[name] = text
            getattr(tree, what)(name)
        assert tree.longest(wanted) == expected(held, wanted)
        inner = {n for n, t in held.items() for u in held.values() if u[: len(t)] == t and u != t}
        assert tree.leaves() == tuple(n for n in held if n not in inner)
    assert len(tree) == len(held)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_operations_leave_what_a_list_has(seed):
    """2,500 operations each: a tree splits and joins as often as it takes."""
    rng, tree, held = np.random.default_rng(seed), RadixTree(), {}
    for i in range(2500):
        name, what = int(rng.integers(0, 16)), str(rng.choice(["insert", "remove", "touch"]))
        if what == "insert":
            held.pop(name, None)
            held[name] = rng.integers(0, 3, rng.integers(0, 9)).tolist()
            tree.insert(name, held[name])
        elif name in held:
            text = held.pop(name)
            getattr(tree, what)(name)
            if what == "touch":
                held[name] = text
        assert len(tree) == len(held)
        if i % 4 == 0:
            wanted = rng.integers(0, 3, 8).tolist()
            assert tree.longest(wanted) == expected(held, wanted)
            inner = {
                n for n, t in held.items() if any(u[: len(t)] == t != u for u in held.values())
            }
            assert tree.leaves() == tuple(n for n in held if n not in inner)
