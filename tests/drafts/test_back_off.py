"""How often a text is drafted for whose drafts are refused: a pure function on counts."""

import pytest

from kvrt.drafts.back_off import BackOff, after_round


def rounds(fared, n_tokens):
    """Tokens of the text at which a round begins, which gives as many tokens as `fared` says."""
    at, back_off, n = [], BackOff(), 0
    while n < n_tokens:
        if n < back_off.n_resume:
            n += 1
            continue
        at.append(n)
        n_drafted, n_accepted = fared(len(at))
        n += n_accepted + 1
        back_off = after_round(back_off, n, n_drafted, n_accepted)
    return at


def test_drafts_that_are_never_right_become_rare():
    at = rounds(lambda i: (8, 0), 64 * 20)
    assert at[:8] == [0, 2, 6, 14, 30, 62, 126, 190]
    assert len(at) <= 6 + 20


@pytest.mark.parametrize(("n_drafted", "n_accepted"), [(8, 8), (8, 3), (3, 1), (1, 1)])
def test_drafts_of_which_a_third_stays_are_never_held_back(n_drafted, n_accepted):
    every = range(0, 100, n_accepted + 1)
    assert rounds(lambda i: (n_drafted, n_accepted), 100) == list(every)


def test_one_good_round_ends_it():
    at = rounds(lambda i: (8, 8 if i == 4 else 0), 60)
    assert at == [0, 2, 6, 14, 23, 25, 29, 37, 53]
