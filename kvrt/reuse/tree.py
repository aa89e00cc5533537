"""A radix tree of token sequences, whose edges are runs of tokens.

It finds which sequences share the longest prefix with a new one, and which no other one continues.
It stores names only: keys and values are with its caller.

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
    """Token sequences by name."""

    def __init__(self) -> None:
        """Starts with none."""
        self._root = _Node(np.zeros(0, np.int32))
        self._nodes: dict[Hashable, _Node] = {}  # by name, least recently used first

    def __len__(self) -> int:
        """How many names there are."""
        return len(self._nodes)

    # --- sequences -----------------------------------------------------------------------------

    def insert(self, name: Hashable, tokens: Tokens) -> None:
        """Adds a sequence, in place of what had its name, as the most recently used."""
        if name in self._nodes:
            self.remove(name)
        ids, node = np.asarray(tokens, np.int32), self._root
        while len(ids) and (child := node.children.get(int(ids[0]))):
            same = _n_same(child.edge, ids)
            node = child if same == len(child.edge) else _split(child, same)
            ids = ids[same:]
        if len(ids):
            node.children[int(ids[0])] = child = _Node(ids.copy(), node)
            node = child
        node.names.add(name)
        self._nodes[name] = node

    def remove(self, name: Hashable) -> None:
        """Removes a sequence.

        Raises:
          UsageError: there is none of that name.
        """
        node = self._node(name)
        del self._nodes[name]
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

    def longest(self, tokens: Tokens) -> SharedPrefix:
        """The sequences that share the longest prefix with this one."""
        ids, n, node = np.asarray(tokens, np.int32), 0, self._root
        while child := node.children.get(int(ids[n])) if n < len(ids) else None:
            same = _n_same(child.edge, ids[n:])
            node, n = child, n + same
            if same < len(child.edge):
                break
        found = {name for below in _subtree(node) for name in below.names}
        return SharedPrefix(n_common=n, names=tuple(x for x in reversed(self._nodes) if x in found))

    def leaves(self) -> tuple[Hashable, ...]:
        """Sequences that are no prefix of another one, least recently used first."""
        return tuple(name for name, node in self._nodes.items() if not node.children)

    # --- below ---------------------------------------------------------------------------------

    def _node(self, name: Hashable) -> _Node:
        if name not in self._nodes:
            raise UsageError(f"no sequence is named {name!r}; insert it first")
        return self._nodes[name]

    def _leave(self, name: Hashable, node: _Node) -> None:
        """Takes a name from a node, and the node away where nothing needs it any more."""
        node.names.remove(name)
        while node.parent is not None and not node.names and not node.children:
            del node.parent.children[int(node.edge[0])]
            node = node.parent
        if node.parent is not None and not node.names and len(node.children) == 1:
            _join(node)


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
