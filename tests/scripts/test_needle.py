"""Where a key is hidden, how long the prompt gets, and what counts as found."""

import re

import pytest

from kvrt.errors import UsageError
from scripts.experiments import needle


def words(text):
    """A tokenizer: a first token, then words; what lies between them is no token of its own."""
    return [0, *(1 + hash(word) % 97 for word in re.findall(r"\S+", text))]


HAY = needle.hay(needle.FILLER, words)


def test_a_piece_is_counted_behind_another():
    assert list(HAY.sizes) == [4, 4, 4, 3, 4]


@pytest.mark.parametrize("depth", [0, 0.25, 0.5, 1])
@pytest.mark.parametrize("length", [100, 101, 513])
def test_a_prompt_is_nearly_as_long_as_asked(length, depth):
    hidden = needle.hide("12345", length, depth, HAY)
    assert length - max(HAY.sizes) < len(hidden.tokens) <= length


@pytest.mark.parametrize("depth", [0, 0.25, 0.5, 0.75, 1])
def test_the_key_lies_at_its_depth(depth):
    texts = []

    def encode(text):
        texts.append(text)
        return words(text)

    needle.hide("12345", 1000, depth, needle.hay(needle.FILLER, encode))
    prompt = texts[-1]
    assert prompt.startswith(needle.HEAD) and prompt.endswith(needle.QUESTION)
    filler = prompt[len(needle.HEAD) : -len(needle.QUESTION)]
    before, after = filler.split(needle.NEEDLE.format(key="12345"))
    share = len(words(before)) / (len(words(before)) + len(words(after)))
    assert share == pytest.approx(depth, abs=0.004)
    # Nothing of the filler is lost.
    assert "".join(needle.FILLER * 100).startswith(before + after)


def test_a_prompt_that_tokenises_longer_than_its_pieces_loses_some():
    def encode(text):
        """Every tenth word takes two tokens once a text is long."""
        ids = words(text)
        return ids + ids[200::10]

    hidden = needle.hide("12345", 300, 0.5, needle.hay(needle.FILLER, encode))
    assert 300 - 8 < len(hidden.tokens) <= 300


def test_a_prompt_without_room_for_filler_is_refused():
    n_fixed = len(words(needle.HEAD + needle.NEEDLE + needle.QUESTION))
    needle.hide("12345", n_fixed + 4, 0, HAY)
    with pytest.raises(UsageError, match=f"{n_fixed + 3} tokens has no room .* {n_fixed} of its"):
        needle.hide("12345", n_fixed + 3, 0, HAY)


def test_a_key_belongs_to_its_cell():
    keys = {
        needle.key_of(0, length, depth, t) for length in (1, 2) for depth in (0, 1) for t in (0, 1)
    }
    assert len(keys) == 8 and all(re.fullmatch(r"[1-9]\d{4}", key) for key in keys)
    assert needle.key_of(0, 1, 0.5, 0) == needle.key_of(0, 1, 0.5, 0) != needle.key_of(1, 1, 0.5, 0)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (" 12345. Remember it.", True),
        ("12345", True),
        (" the key 12345", True),
        (" 1234", False),
        (" 123456", False),
        (" 9. 12345", False),
        ("", False),
        (" the grass is green", False),
    ],
)
def test_the_first_number_counts(answer, right):
    assert needle.found(answer, "12345") is right
