"""A radix tree of token sequences, whose edges are runs of tokens.

It finds which sequences share the longest prefix with a new one, and what of those that nobody
needs goes first: the end of the least recently used one, as far as no other sequence has it. It
stores names only: keys and values are with its caller.

Source: RadixAttention, arXiv:2312.07104, sec. 3.
"""

import dataclasses
from collections.abc import Hashable, Iterator, Sequence

import numpy as np
from jaxtyping import Int, Int32  # not from arrays: a tree of tokens needs no JAX

from kvrt.errors import UsageError

Tokens = Sequence[int] | Int[np.ndarray, " T"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedPrefix:
    """The longest prefix that a new sequence shares with those of a tree.

    Attributes:
      n_common: its tokens.
      names: of all sequences that share it, most recently used first.
    """

    n_common: int
    names: tuple[Hashable, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evicted:
    """A sequence that was cut back, or removed.

    Attributes:
      name: whose tokens went.
      n_tokens: those that it has left; None if it was removed.
    """

    name: Hashable
    n_tokens: int | None


@dataclasses.dataclass(eq=False)
class _Node:
    """Tokens that follow its parent's; no two children share their first token.

    Below the root a node without a name has two children or more.
    """

    edge: Int32[np.ndarray, " n"]
    parent: "_Node | None" = None
    names: set[Hashable] = dataclasses.field(default_factory=set)
    children: "dict[int, _Node]" = dataclasses.field(default_factory=dict)


class RadixTree:
    """Token sequences by name. Those of different scopes share nothing, whatever their tokens."""

    def __init__(self) -> None:
        """Starts with none."""
        self._roots: dict[Hashable, _Node] = {}
        self._nodes: dict[Hashable, _Node] = {}  # by name, least recently used first
        self._locked: set[Hashable] = set()

    def __len__(self) -> int:
        """How many names there are."""
        return len(self._nodes)

    def __contains__(self, name: Hashable) -> bool:
        """Whether there is a sequence of that name."""
        return name in self._nodes

    def __iter__(self) -> Iterator[Hashable]:
        """All names, least recently used first."""
        return iter(tuple(self._nodes))

    # --- sequences -----------------------------------------------------------------------------

    def insert(self, name: Hashable, tokens: Tokens, *, scope: Hashable = None) -> None:
        """Adds a sequence, in place of what had its name, as the most recently used, unlocked."""
        if name in self._nodes:
            self.remove(name)
        root = self._roots.setdefault(scope, _Node(np.zeros(0, np.int32)))
        self._put(name, root, np.asarray(tokens, np.int32))

    def extend(self, name: Hashable, tokens: Tokens) -> None:
        """Appends tokens to a sequence.

        Raises:
          UsageError: there is none of that name.
        """
        node, ids = self._node(name), np.asarray(tokens, np.int32)
        if not len(ids):
            return
        if node.parent is not None and not node.children and len(node.names) == 1:
            node.edge = np.concatenate([node.edge, ids])
            return
        self._put(name, node, ids)
        self._leave(name, node)

    def cut(self, name: Hashable, n: int) -> None:
        """Keeps the first n tokens of a sequence, or all if it has fewer.

        Raises:
          UsageError: there is none of that name.
        """
        old = node = self._node(name)
        n_over = self.n_tokens(name) - n
        while node.parent is not None and len(node.edge) <= n_over:
            n_over -= len(node.edge)
            node = node.parent
        if n_over > 0:
            node = _split(node, len(node.edge) - n_over)
        if node is not old:
            node.names.add(name)
            self._nodes[name] = node
            self._leave(name, old)

    def rename(self, name: Hashable, new: Hashable) -> None:
        """Gives a sequence another name; it is the most recently used, and not locked.

        Raises:
          UsageError: there is none of that name, or the other one is taken.
        """
        if new in self._nodes:
            raise UsageError(f"a sequence is named {new!r} already; remove it first")
        node = self._node(name)
        del self._nodes[name]
        self._locked.discard(name)
        node.names.remove(name)
        node.names.add(new)
        self._nodes[new] = node

    def remove(self, name: Hashable) -> None:
        """Removes a sequence, locked or not.

        Raises:
          UsageError: there is none of that name.
        """
        node = self._node(name)
        del self._nodes[name]
        self._locked.discard(name)
        self._leave(name, node)

    def touch(self, name: Hashable) -> None:
        """Makes a sequence the most recently used.

        Raises:
          UsageError: there is none of that name.
        """
        node = self._node(name)
        del self._nodes[name]
        self._nodes[name] = node

    # --- what is asked -------------------------------------------------------------------------

    def n_tokens(self, name: Hashable) -> int:
        """Tokens of a sequence.

        Raises:
          UsageError: there is none of that name.
        """
        return sum(len(node.edge) for node in _upward(self._node(name)))

    def n_own(self, name: Hashable) -> int:
        """Tokens at the end of a sequence that no other one has there; 0 if all are another's.

        Raises:
          UsageError: there is none of that name.
        """
        node = self._node(name)
        return 0 if node.children or len(node.names) > 1 else len(node.edge)

    def prefixes(self, name: Hashable) -> tuple[Hashable, ...]:
        """Other sequences all of whose tokens a sequence begins with; equal ones are among them.

        Raises:
          UsageError: there is none of that name.
        """
        return tuple(x for node in _upward(self._node(name)) for x in node.names if x != name)

    def longest(self, tokens: Tokens, *, scope: Hashable = None) -> SharedPrefix:
        """The sequences that share the longest prefix with this one."""
        return next(self.matches(tokens, scope=scope))

    def matches(self, tokens: Tokens, *, scope: Hashable = None) -> Iterator[SharedPrefix]:
        """All sequences by what they share with this one, the longest first, down to nothing.

        The tree may not change meanwhile.
        """
        ids, n = np.asarray(tokens, np.int32), 0
        node = self._roots.get(scope) or _Node(ids[:0])
        path = [(n, node)]
        while child := node.children.get(int(ids[n])) if n < len(ids) else None:
            same = _n_same(child.edge, ids[n:])
            node, n = child, n + same
            path.append((n, node))
            if same < len(child.edge):
                break
        seen: set[Hashable] = set()
        for n, node in reversed(path):
            new = {name for below in _subtree(node) for name in below.names} - seen
            seen |= new
            if new or n == 0:
                names = tuple(x for x in reversed(self._nodes) if x in new)
                yield SharedPrefix(n_common=n, names=names)

    def leaves(self) -> tuple[Hashable, ...]:
        """Sequences that are no prefix of another one, least recently used first."""
        return tuple(name for name, node in self._nodes.items() if not node.children)

    # --- what goes -----------------------------------------------------------------------------

    def lock(self, name: Hashable) -> None:
        """Keeps a sequence from being evicted.

        Raises:
          UsageError: there is none of that name.
        """
        self._node(name)
        self._locked.add(name)

    def unlock(self, name: Hashable) -> None:
        """Lets a sequence be evicted again.

        Raises:
          UsageError: there is none of that name.
        """
        self._node(name)
        self._locked.discard(name)

    def evict(self, n: int | None = None) -> Evicted | None:
        """Takes tokens from the end of the least recently used sequence that is not locked.

        Args:
          n: how many at most, at least 1; fewer where it has fewer of its own, for what others have
            stays. One without tokens of its own is removed. With None it is removed in any case.

        Returns:
          What became of it; None if all are locked.
        """
        name = next((x for x in self._nodes if x not in self._locked), None)
        if name is None:
            return None
        n_gone = 0 if n is None else min(n, self.n_own(name))
        n_left = self.n_tokens(name) - n_gone
        if not n_gone or not n_left:
            self.remove(name)
            return Evicted(name=name, n_tokens=None)
        self.cut(name, n_left)
        return Evicted(name=name, n_tokens=n_left)

    # --- below ---------------------------------------------------------------------------------

    def _node(self, name: Hashable) -> _Node:
        if name not in self._nodes:
            raise UsageError(f"no sequence is named {name!r}; insert it first")
        return self._nodes[name]

    def _put(self, name: Hashable, node: _Node, ids: np.ndarray) -> None:
        """Puts a name at the end of the tokens that follow a node."""
        while len(ids) and (child := node.children.get(int(ids[0]))):
            same = _n_same(child.edge, ids)
            node = child if same == len(child.edge) else _split(child, same)
            ids = ids[same:]
        if len(ids):
            node.children[int(ids[0])] = child = _Node(ids.copy(), node)
            node = child
        node.names.add(name)
        self._nodes[name] = node

    def _leave(self, name: Hashable, node: _Node) -> None:
        """Takes a name from a node, and the node away where nothing needs it any more."""
        node.names.remove(name)
        while node.parent is not None and not node.names and not node.children:
            del node.parent.children[int(node.edge[0])]
            node = node.parent
        if node.names or len(node.children) > 1:
            return
        if node.parent is None:
            if not node.children:
                self._roots = {scope: x for scope, x in self._roots.items() if x is not node}
        elif node.children:
            _join(node)


def _upward(node: _Node) -> Iterator[_Node]:
    """A node and those above it, down from which its tokens are read."""
    at: _Node | None = node
    while at is not None:
        yield at
        at = at.parent


def _join(node: _Node) -> None:
    """Merges a node without a name into its only child."""
    (child,) = node.children.values()
    assert node.parent is not None
    child.edge = np.concatenate([node.edge, child.edge])
    child.parent = node.parent
    node.parent.children[int(child.edge[0])] = child


def _split(node: _Node, n: int) -> _Node:
    """A new parent of a node, with the first n tokens of its edge."""
    assert node.parent is not None
    upper = _Node(node.edge[:n], node.parent, children={int(node.edge[n]): node})
    node.parent.children[int(node.edge[0])] = upper
    node.edge, node.parent = node.edge[n:], upper
    return upper


def _n_same(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if differ.size else n


def _subtree(node: _Node) -> Iterator[_Node]:
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += node.children.values()
