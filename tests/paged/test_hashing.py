"""Chains of hashes: what they tell apart, and that nobody believes a digest alone."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from paged_cases import Cache, full, text

from kvrt.errors import BadConfig, BadToken
from kvrt.paged.hashing import Chain, PrefixHash, extra_keys, root
from kvrt.paged.pool import BlockPool


def chain(tokens, b=4, **extra):
    out = Chain(b, **extra)
    out.extend(tokens)
    return out


def test_a_digest_is_not_believed():
    pool, entry = BlockPool(4), chain(text(8)).hashes[1]
    (block,) = pool.take(1)
    pool.register(block, 0, entry)
    other = chain(text(8, 1)).hashes[1]
    for forged in (
        entry._replace(data=other.data),
        entry._replace(parent=other.parent),
        entry._replace(extra=b"x"),
        entry._replace(digest=other.digest),
    ):
        assert pool.find(0, forged) is None
    assert pool.find(1, entry) is None
    assert pool.find(0, PrefixHash(*entry)) == block


def test_two_blocks_of_one_digest_are_told_apart():
    pool, entry = BlockPool(4), chain(text(4)).hashes[0]
    forged = entry._replace(data=chain(text(4, 1)).hashes[0].data)
    one, two = pool.take(2)
    pool.register(one, 0, forged)
    pool.register(two, 0, entry)
    assert (pool.find(0, forged), pool.find(0, entry)) == (one, two)
    pool.forget([one])
    assert (pool.find(0, forged), pool.find(0, entry)) == (None, two)


def test_all_tokens_of_a_wide_block_are_compared():
    c = Cache([full(4)], 8, hash_block_size=2)
    chain = c.chain(text(9))
    first, second = chain.entries(2)
    assert first.tokens + second.tokens == tuple(text(8))
    assert second.digest == chain.hashes[3].digest
    (block,) = c.pool.take(1)
    # The end is right and so is its digest; the first half is another text's.
    c.pool.register(block, 0, first._replace(data=b"\1" * 8 + first.data[8:]))
    assert c.paged.find_hit(chain).n_tokens == 0
    c.pool.register(block, 0, first)
    assert c.paged.find_hit(chain).n_tokens == 4


def test_a_block_means_all_that_comes_before_it():
    a, b = chain(text(8)), chain([9, *text(8)[1:]])
    assert a.hashes[1].data == b.hashes[1].data
    assert a.hashes[1].digest != b.hashes[1].digest
    assert a.hashes[0].parent == root(4) != root(8)
    assert a.hashes[1].parent == a.hashes[0].digest


def test_salts_are_told_apart():
    extras = [extra_keys(0, salt) for salt in (b"", b"a", b"ab", b"abc", b"a\0")]
    assert len(set(extras)) == len(extras)
    digests = [chain(text(4), salt=s).hashes[0].digest for s in (b"", b"a", b"ab")]
    assert len(set(digests)) == 3


@pytest.mark.parametrize("cuts", [[19], [1] * 19, [3, 5, 0, 8, 3]])
def test_a_chain_does_not_depend_on_how_it_came_to_be(cuts):
    tokens, grown = text(19), Chain(4)
    for start, n in zip(itertools.accumulate([0, *cuts]), cuts, strict=False):
        grown.extend(tokens[start : start + n])
        grown.entries(2)
    whole = chain(tokens)
    assert grown.hashes == whole.hashes
    assert len(grown.hashes) == 4
    assert list(grown.tokens) == tokens
    assert list(grown.entries(2)) == list(whole.entries(2))
    assert len(grown.entries(2)) == 2
    assert whole.part(1, 3).tokens == tuple(tokens[4:16])


def test_a_copy_goes_its_own_way():
    one = chain(text(6), salt=b"s")
    two = one.copy()
    one.extend([1, 2])
    two.extend([3, 4])
    assert one.hashes[0] == two.hashes[0]
    assert one.hashes == chain([*text(6), 1, 2], salt=b"s").hashes
    assert two.hashes == chain([*text(6), 3, 4], salt=b"s").hashes


def test_what_is_no_token_changes_nothing():
    c = chain(text(6))
    with pytest.raises(BadToken, match="int32"):
        c.extend([1, 2**31])
    assert list(c.tokens) == text(6)
    with pytest.raises(BadConfig, match="at least 1"):
        Chain(0)


def test_digests_stay_what_they_are():
    """They are kept on disks and compared by other processes."""
    hashes = chain(range(8), salt=b"s").hashes
    assert [h.digest.hex() for h in hashes] == DIGESTS


DIGESTS = ["a493c93485fdd72a315ffab8e9708d94", "b14b421e26d9ccfaf66e83a52b2180dd"]


def test_the_paged_core_needs_no_jax():
    code = (
        "import sys\n"
        "import kvrt.paged.manager, kvrt.reuse.tree\n"
        "assert 'jax' not in sys.modules, [m for m in sys.modules if 'jax' in m]\n"
    )
    here = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=here)
    assert done.returncode == 0, done.stderr
