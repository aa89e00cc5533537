"""The tree of texts, against a list of them."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from kvrt.errors import UsageError
from kvrt.reuse.tree import Evicted, RadixTree, SharedPrefix


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


# --- all operations, against a dictionary ------------------------------------------------------


class PlainTree:
    """Tokens by name, least recently used first; the prefix of a scope stands before its tokens."""

    def __init__(self):
        self.held, self.locked = {}, set()

    def insert(self, name, tokens, scope):
        self.held.pop(name, None)
        self.held[name] = (scope, *tokens)
        self.locked.discard(name)

    def extend(self, name, tokens):
        self.held[name] += tuple(tokens)

    def cut(self, name, n):
        self.held[name] = self.held[name][: n + 1]

    def rename(self, name, new):
        self.held[new] = self.held.pop(name)
        self.locked.discard(name)

    def remove(self, name):
        del self.held[name]
        self.locked.discard(name)

    def touch(self, name):
        self.held[name] = self.held.pop(name)

    def lock(self, name):
        self.locked.add(name)

    def unlock(self, name):
        self.locked.discard(name)

    def n_tokens(self, name):
        return len(self.held[name]) - 1

    def n_own(self, name):
        mine = self.held[name]
        others = [n_common(mine, t) for x, t in self.held.items() if x != name]
        return len(mine) - max([1, *others])

    def prefixes(self, name):
        mine = self.held[name]
        return {x for x, t in self.held.items() if x != name and mine[: len(t)] == t}

    def matches(self, tokens, scope):
        """(n_common, names) for each length that some sequence shares, 0 included."""
        wanted, found = (scope, *tokens), {0: []}
        for name in reversed(self.held):
            n = n_common(self.held[name], wanted)
            if n:
                found.setdefault(n - 1, []).append(name)
        return [(n, tuple(found[n])) for n in sorted(found, reverse=True)]

    def evict(self, n):
        name = next((x for x in self.held if x not in self.locked), None)
        if name is None:
            return None
        n_gone = min(n or 0, self.n_own(name))
        if n_gone in (0, self.n_tokens(name)):
            self.remove(name)
            return name, None
        self.held[name] = self.held[name][:-n_gone]
        return name, self.n_tokens(name)


def operate(rng, tree, plain):
    """One random operation on both."""
    what = str(rng.choice([*OPERATIONS, "insert", "extend"]))
    tokens = rng.integers(0, 3, rng.integers(0, 9)).tolist()
    n = int(rng.integers(1, 6))
    if what == "insert":
        name, scope = int(rng.integers(0, 16)), str(rng.integers(0, 2))
        tree.insert(name, tokens, scope=scope)
        plain.insert(name, tokens, scope)
    elif what == "evict":
        some = None if n == 1 else n
        found, wanted = tree.evict(some), plain.evict(some)
        assert (found and (found.name, found.n_tokens)) == wanted
    elif plain.held:
        name = int(rng.choice(list(plain.held)))
        more = {"extend": (tokens,), "cut": (n,), "rename": (name + 16,)}.get(what, ())
        if what != "rename" or name + 16 not in plain.held:
            getattr(tree, what)(name, *more)
            getattr(plain, what)(name, *more)


OPERATIONS = ("insert extend cut rename remove touch lock unlock evict").split()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_operations_leave_what_a_dictionary_has(seed):
    """2,500 operations each: a tree matches, splits, locks and evicts as a dictionary would."""
    rng, tree, plain = np.random.default_rng(seed), RadixTree(), PlainTree()
    for i in range(2500):
        operate(rng, tree, plain)
        assert len(tree) == len(plain.held)
        if i % 4 == 0:
            assert_same(rng, tree, plain)


def assert_same(rng, tree, plain):
    inner = {x for name in plain.held for x in plain.prefixes(name)}
    inner = {x for x in inner if any(is_longer(plain, y, x) for y in plain.held)}
    assert tree.leaves() == tuple(x for x in plain.held if x not in inner)
    for name in plain.held:
        assert name in tree and tree.n_tokens(name) == plain.n_tokens(name)
        assert tree.n_own(name) == plain.n_own(name)
        assert set(tree.prefixes(name)) == plain.prefixes(name)
    tokens, scope = rng.integers(0, 3, 8).tolist(), str(rng.integers(0, 3))
    found = [(x.n_common, x.names) for x in tree.matches(tokens, scope=scope)]
    assert found == plain.matches(tokens, scope)


def is_longer(plain, name, prefix):
    a, b = plain.held[name], plain.held[prefix]
    return a[: len(b)] == b and len(a) > len(b)


def test_what_is_locked_stays_and_a_shared_end_goes_with_its_name():
    tree = RadixTree()
    tree.insert("old", [1, 2, 3, 4])
    tree.insert("new", [1, 2, 5])
    tree.lock("old")
    assert tree.evict(8) == Evicted(name="new", n_tokens=2)
    assert tree.evict(8) == Evicted(name="new", n_tokens=None)
    assert tree.evict(8) is None
    tree.unlock("old")
    assert tree.evict(3) == Evicted(name="old", n_tokens=1)


def test_calls_that_cannot_be():
    tree = RadixTree()
    for call in (tree.n_tokens, tree.n_own, tree.prefixes, tree.lock, tree.unlock):
        with pytest.raises(UsageError, match="no sequence is named 'x'"):
            call("x")
    for call, more in ((tree.extend, [1]), (tree.cut, 1), (tree.rename, "y")):
        with pytest.raises(UsageError, match="no sequence is named 'x'"):
            call("x", more)
    tree.insert("a", [1])
    tree.insert("b", [2])
    with pytest.raises(UsageError, match="named 'b' already"):
        tree.rename("a", "b")
