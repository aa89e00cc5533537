"""Prefix hashes: the tokens of a block and all before them, as a chain of digests.

A digest is only a hint: the tokens, the digest before them and the salt are compared before a block
is trusted. A salt is tagged and carries its length, so no two different ones read the same.

Source: vLLM's prefix caching; arXiv:2309.06180, sec. 4.4.
"""

import functools
import sys
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import xxhash

from kvrt.errors import BadConfig, BadToken

_SALT, _BLOCK = b"s", b"b"


class PrefixHash(NamedTuple):
    """The prefix hash of one block.

    Attributes:
      digest: of parent, data and extra.
      parent: the digest of the block before it.
      data: its tokens, as little-endian int32.
      extra: what its keys and values depend on beside tokens; `extra_keys`.
    """

    digest: bytes
    parent: bytes
    data: bytes
    extra: bytes = b""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Its tokens."""
        return tuple(ids_in(self.data))


class Chain:
    """The tokens of one request, and the prefix hash of each of its full blocks.

    Attributes:
      block_size: tokens of a block; the finest of all groups.
      tokens: all so far.
      hashes: of all full blocks so far.
    """

    def __init__(self, block_size: int, *, salt: bytes = b""):
        """Starts with no tokens.

        Args:
          block_size: tokens of a block, at least 1.
          salt: requests of another salt share nothing with this one.

        Raises:
          BadConfig: block_size is below 1.
        """
        if block_size < 1:
            raise BadConfig(f"blocks of {block_size} tokens; they have at least 1")
        self.block_size = block_size
        self.tokens = array("i")
        self.hashes: list[PrefixHash] = []
        self._salt = salt
        self._wide: dict[int, list[PrefixHash]] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens, and the hashes of the blocks that become full.

        Raises:
          BadToken: one does not fit int32.
        """
        try:
            self.tokens.extend(array("i", tokens))
        except OverflowError as e:
            raise BadToken("a token id is beyond int32; ids lie in the vocabulary") from e
        start, size = self._n_hashed, self.tokens.itemsize * self.block_size
        end = len(self.tokens) // self.block_size * self.block_size
        parent = self.hashes[-1].digest if self.hashes else root(self.block_size)
        data, extra = _data(self.tokens[start:end]), extra_keys(start, self._salt)
        for i in range(0, len(data), size):
            entry = _hash(parent, data[i : i + size], extra)
            self.hashes.append(entry)
            parent, extra = entry.digest, b""

    def entries(self, n: int) -> Sequence[PrefixHash]:
        """Prefix hashes of all full blocks of n times the block size."""
        if n == 1:
            return self.hashes
        out = self._wide.setdefault(n, [])
        for i in range(len(out) * n, len(self.hashes) - n + 1, n):
            out.append(join_hashes(self.hashes[i : i + n]))
        return out

    def part(self, first: int, n: int) -> PrefixHash:
        """The prefix hash of n blocks from `first` on, as one block."""
        return join_hashes(self.hashes[first : first + n])

    def copy(self) -> "Chain":
        """Another chain with the same tokens, to which others can be appended."""
        out = Chain(self.block_size, salt=self._salt)
        out.tokens, out.hashes = self.tokens[:], self.hashes[:]
        return out

    def beginning(self, n: int) -> "Chain":
        """Another chain, with the first n tokens."""
        out = Chain(self.block_size, salt=self._salt)
        out.tokens, out.hashes = self.tokens[:n], self.hashes[: n // self.block_size]
        return out

    @property
    def _n_hashed(self) -> int:
        return len(self.hashes) * self.block_size


def extra_keys(start: int, salt: bytes) -> bytes:
    """What the keys and values of a block that begins at token `start` depend on beside tokens.

    The salt is in the first block alone; the others differ through their parents.
    """
    return _tagged(_SALT, salt) if salt and not start else b""


def join_hashes(hashes: Sequence[PrefixHash]) -> PrefixHash:
    """Blocks that follow each other, as one that ends where the last does."""
    if len(hashes) == 1:
        return hashes[0]
    return PrefixHash(
        hashes[-1].digest,
        hashes[0].parent,
        b"".join(h.data for h in hashes),
        b"".join(_tagged(_BLOCK, h.extra) for h in hashes),
    )


@functools.cache
def root(block_size: int) -> bytes:
    """The parent of a first block."""
    return xxhash.xxh3_128_digest(b"kvrt paged blocks 1\0%d" % block_size)


def _hash(parent: bytes, data: bytes, extra: bytes) -> PrefixHash:
    return PrefixHash(xxhash.xxh3_128_digest(parent + data + extra), parent, data, extra)


def _tagged(tag: bytes, data: bytes) -> bytes:
    return tag + len(data).to_bytes(4, "little") + data


def _data(tokens: array) -> bytes:
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tobytes()


def ids_in(data: bytes) -> array:
    """The tokens of `PrefixHash.data`."""
    out = array("i", data)
    if sys.byteorder == "big":
        out.byteswap()
    return out
