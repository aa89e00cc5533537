"""What a block holds: its tokens and all before them, as a chain of digests.

A digest only points: the tokens, the digest before them and what else they depend on are compared
before a block is believed to hold them. Salt, adapter and media are tagged and carry their
lengths, so no two different sets of them read alike.

Source: vLLM's prefix caching; arXiv:2309.06180, sec. 4.4.
"""

import functools
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import xxhash

from kvrt.errors import BadConfig, BadToken

_SALT, _ADAPTER, _MEDIA, _BLOCK = b"s", b"a", b"m", b"b"


class Media(NamedTuple):
    """Tokens [start, start + n_tokens) that stand for something that is not text."""

    name: str
    start: int
    n_tokens: int


class PrefixHash(NamedTuple):
    """What one block holds.

    Attributes:
      digest: of parent, data and extra.
      parent: the digest of the block before it.
      data: its tokens, as little-endian int32.
      extra: what its rows depend on beside tokens; `extra_keys`.
    """

    digest: bytes
    parent: bytes
    data: bytes
    extra: bytes = b""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Its tokens."""
        return tuple(_array(self.data))


class Chain:
    """The tokens of one request, and what each of its full blocks holds.

    Attributes:
      block_size: tokens of a block; the finest of all groups.
      tokens: all so far.
      hashes: of all full blocks so far.
    """

    def __init__(
        self,
        block_size: int,
        *,
        salt: bytes = b"",
        adapter: str = "",
        media: Iterable[Media] = (),
    ):
        """Starts with no tokens.

        Args:
          block_size: tokens of a block, at least 1.
          salt: requests of another salt share nothing with this one.
          adapter: name of what changes the weights.
          media: what stands at its tokens, now or later.

        Raises:
          BadConfig: block_size is below 1.
        """
        if block_size < 1:
            raise BadConfig(f"blocks of {block_size} tokens; they have at least 1")
        self.block_size = block_size
        self.tokens = array("i")
        self.hashes: list[PrefixHash] = []
        self._salt, self._adapter, self._media = salt, adapter, tuple(media)
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
        for start in range(self._n_hashed, len(self.tokens) - self.block_size + 1, self.block_size):
            end = start + self.block_size
            self.hashes.append(
                _hash(
                    self.hashes[-1].digest if self.hashes else root(self.block_size),
                    _data(self.tokens[start:end]),
                    extra_keys(
                        start, end, salt=self._salt, adapter=self._adapter, media=self._media
                    ),
                )
            )

    def entries(self, n: int) -> Sequence[PrefixHash]:
        """What blocks of n times the block size hold, of all that are full."""
        if n == 1:
            return self.hashes
        out = self._wide.setdefault(n, [])
        for i in range(len(out) * n, len(self.hashes) - n + 1, n):
            out.append(joined(self.hashes[i : i + n]))
        return out

    def part(self, first: int, n: int) -> PrefixHash:
        """What n blocks hold from the first on."""
        return joined(self.hashes[first : first + n])

    def copy(self) -> "Chain":
        """Another chain with the same tokens, to go on differently."""
        out = Chain(self.block_size, salt=self._salt, adapter=self._adapter, media=self._media)
        out.tokens, out.hashes = self.tokens[:], self.hashes[:]
        return out

    @property
    def _n_hashed(self) -> int:
        return len(self.hashes) * self.block_size


def extra_keys(
    start: int, end: int, *, salt: bytes = b"", adapter: str = "", media: Sequence[Media] = ()
) -> bytes:
    """What the rows of tokens [start, end) depend on beside tokens.

    The salt is in the first block alone; the others differ through their parents. Media count with
    their distance from the block's first token, which is negative if they began before it.
    """
    out = [_tagged(_ADAPTER, adapter.encode())] if adapter else []
    for item in media:
        if item.start < end and item.start + item.n_tokens > start:
            offset = (item.start - start).to_bytes(8, "little", signed=True)
            out.append(_tagged(_MEDIA, item.name.encode()) + offset)
    if salt and not start:
        out.append(_tagged(_SALT, salt))
    return b"".join(out)


def joined(hashes: Sequence[PrefixHash]) -> PrefixHash:
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


def _array(data: bytes) -> array:
    out = array("i", data)
    if sys.byteorder == "big":
        out.byteswap()
    return out
