"""The incremental detokeniser: nothing lost, nothing early, stops where it is told."""

import pytest
import tiny_vocab
from hypothesis import given
from hypothesis import strategies as st

from kvrt.errors import BadToken, UsageError
from kvrt_models.tokenizer.bpe import byte_alphabet
from kvrt_models.tokenizer.encode import tokenizer_from_gguf
from kvrt_models.tokenizer.stream import TextStream

TOKENIZER = tokenizer_from_gguf(tiny_vocab.metadata("bpe-smollm"))
BYTE = {b: TOKENIZER.vocab.texts.index(c) for c, b in byte_alphabet().items()}
TOKENS = st.lists(st.integers(0, TOKENIZER.n_vocab - 1), max_size=30)


def pushes(raw: bytes, stop=()) -> list[str]:
    """What each byte gives, pushed as a token of its own, and the flush at the end."""
    stream = TextStream(TOKENIZER, stop)
    return [*(stream.push(BYTE[b]) for b in raw), stream.flush()]


def test_characters_that_span_tokens():
    assert pushes("a🚀é".encode()) == ["a", "", "", "", "🚀", "", "é", ""]


def test_bytes_that_never_become_a_character():
    assert pushes(b"a\xf0\x9fb") == ["a", "", "", "\ufffdb", ""]
    assert pushes(b"a\xf0\x9f") == ["a", "", "", "\ufffd"]
    assert pushes(b"\xff\x80") == ["\ufffd", "\ufffd", ""]


def test_control_tokens_give_nothing_and_break_nothing():
    stream = TextStream(TOKENIZER)
    raw = "é".encode()
    assert [stream.push(t) for t in (BYTE[raw[0]], 1, BYTE[raw[1]])] == ["", "", "é"]


@given(tokens=TOKENS)
def test_joined_pushes_equal_decode(tokens):
    stream = TextStream(TOKENIZER)
    parts = [stream.push(token) for token in tokens]
    assert "".join(parts) + stream.flush() == TOKENIZER.decode(tokens)
    assert not stream.stopped


@given(tokens=TOKENS, stop=st.lists(st.text("ab\n é", min_size=1, max_size=3), max_size=3))
def test_stops_equal_a_search_in_the_whole_text(tokens, stop):
    stream = TextStream(TOKENIZER, stop)
    parts, used = [], []
    for token in tokens:
        used.append(token)
        parts.append(stream.push(token))
        if stream.stopped:
            break
    got = "".join(parts) + stream.flush()
    text = TOKENIZER.decode(used)
    found = [text.find(s) for s in stop if s in text]
    assert stream.stopped == bool(found)
    assert got == (text[: min(found)] if found else text)


def test_what_could_begin_a_stop_is_held_back():
    assert pushes(b"a</s>b", ["</s>"]) == ["a", "", "", "", "", "", ""]
    assert pushes(b"a</sxb", ["</s>"]) == ["a", "", "", "", "</sx", "b", ""]
    assert pushes(b"a</", ["</s>"]) == ["a", "", "", "</"]
    assert pushes(b"ababac", ["abac"]) == ["", "", "", "ab", "", "", ""]


def test_the_first_stop_that_is_complete_wins():
    stream = TextStream(TOKENIZER, ("abcd", "bc"))
    assert [stream.push(BYTE[b]) for b in b"abc"] == ["", "", "a"]
    assert stream.stopped and stream.push(BYTE[97]) == "" and stream.flush() == ""


def test_a_stop_inside_one_token():
    stream = TextStream(TOKENIZER, ["oo"])
    assert stream.push(TOKENIZER.vocab.texts.index("<tool>")) == "<t" and stream.stopped


def test_a_stop_that_only_the_flush_completes():
    assert pushes(b"a\xf0", ["\ufffd"]) == ["a", "", ""]


def test_bad_calls():
    with pytest.raises(UsageError, match="a stop string is empty"):
        TextStream(TOKENIZER, ["a", ""])
    with pytest.raises(BadToken, match="token id 443"):
        TextStream(TOKENIZER).push(443)
