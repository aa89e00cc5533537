"""Prompt lookup: what followed the newest n-gram, against a search by hand; and what is refused."""

import numpy as np
import pytest

from kvrt import DraftContext, PromptLookup, Speculation
from kvrt.drafts.prompt_lookup import followed_by
from kvrt.errors import BadConfig


def by_hand(tokens, size, n):
    """Every earlier place of the last `size` tokens, newest first that has n tokens behind it."""
    tokens = list(tokens)
    last = tokens[len(tokens) - size :]
    ends = [i + size for i in range(len(tokens) - size) if tokens[i : i + size] == last]
    whole = [end for end in ends if end + n <= len(tokens)]
    start = whole[-1] if whole else (ends[0] if ends else len(tokens))
    return tokens[start : start + n]


def context(tokens):
    return DraftContext(tokens=np.array(tokens, np.int32), seq_id=0, n_sampled=0)


def test_it_finds_what_a_search_by_hand_finds():
    rng = np.random.default_rng(0)
    n_found = 0
    for _ in range(300):
        tokens = rng.integers(0, 3, int(rng.integers(1, 30))).astype(np.int32)
        size, n = int(rng.integers(1, 5)), int(rng.integers(1, 9))
        wanted = by_hand(tokens, size, n) if size < len(tokens) else []
        assert followed_by(tokens, size, n).tolist() == wanted
        n_found += len(wanted) > 0
    assert n_found > 100


def test_the_longest_n_gram_counts():
    text = [1, 2, 3, 9, 4, 2, 3, 8, 5, 1, 2, 3]
    assert PromptLookup(n_max=3).draft(context(text), 2) == [9, 4]
    assert PromptLookup(n_min=2, n_max=2).draft(context(text), 2) == [8, 5]
    assert list(PromptLookup(n_max=3).draft(context([1, 2, 3]), 2)) == []


def test_a_text_that_repeats_one_token_is_drafted_whole():
    assert PromptLookup().draft(context([7] * 20), 4) == [7] * 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PromptLookup(n_min=3, n_max=2), "n_min is 3 and n_max 2; 1 <= n_min"),
        (lambda: PromptLookup(n_min=0), "n_min is 0 and n_max 4; 1 <= n_min"),
        (lambda: Speculation(drafter=PromptLookup(), n_draft=0), "n_draft is 0; it must lie in"),
        (lambda: Speculation(drafter=PromptLookup(), n_draft=65), "n_draft is 65; it must lie in"),
    ],
)
def test_bad_configurations_are_refused(make, message):
    with pytest.raises(BadConfig, match=message):
        make()
