"""Streams of one request each, while somebody else steps, cancels or streams as well."""

from itertools import islice

import pytest

from kvrt.errors import BadRequest
from tests.serving.engines import ask, engine

pytestmark = pytest.mark.usefixtures("numpy_device")

LIMIT = 200  # outputs, so that a stream that never ends fails and does not hang


@pytest.fixture
def at():
    found = engine("full", "paged")
    yield found
    while found.has_work:
        found.step()


def tokens(outputs):
    return [t for x in outputs for t in x.tokens]


def whole(at, request):
    """What a request gives."""
    at.add_request(request)
    return tokens(islice(at.stream(request.id), LIMIT))


def test_a_stream_ends_when_somebody_else_finishes_its_request(at):
    wanted = whole(at, ask("a", [1, 2, 3], 6))
    at.add_request(ask("a", [1, 2, 3], 6))
    stream = at.stream("a")
    found = [next(stream)]
    others = []
    while at.has_work:
        others += at.step()
    assert others == []  # all of it belongs to the stream
    found += islice(stream, LIMIT)
    assert tokens(found) == wanted and len(wanted) == 6
    assert [x.finish_reason for x in found][-2:] == [None, "length"]


def test_a_stream_ends_when_its_request_is_cancelled(at):
    at.add_request(ask("a", [1, 2, 3], 50))
    stream = at.stream("a")
    next(stream)
    at.cancel("a")
    assert [x.finish_reason for x in islice(stream, LIMIT)] == ["cancelled"]
    assert not at.has_work


def test_a_sample_that_ended_before_does_not_end_the_stream_of_the_others(at):
    at.add_request(ask("a", [1, 2, 3], 4, n=2))
    at.step()
    at.cancel("a", 1)
    found = list(islice(at.stream("a"), LIMIT))
    assert {x.sample: x.finish_reason for x in found} == {0: "length", 1: "cancelled"}


def test_streams_in_turn_and_one_after_the_other(at):
    asked = [ask("a", [1, 2, 3], 6), ask("b", [4, 5], 4)]
    wanted = [whole(at, x) for x in asked]
    for x in asked:
        at.add_request(x)
    found = {"a": [], "b": []}
    both = {name: at.stream(name) for name in found}
    for _ in range(LIMIT):
        for name, stream in both.items():
            found[name] += islice(stream, 1)
    assert [tokens(x) for x in found.values()] == wanted
    for x in asked:
        at.add_request(x)
    # What the second one gives comes while the first one is looked at.
    assert [tokens(islice(at.stream(x.id), LIMIT)) for x in asked] == wanted
    assert not at.has_work


def test_what_a_closed_stream_leaves_comes_with_the_next_step(at):
    wanted = whole(at, ask("a", [1, 2, 3], 6))
    at.add_request(ask("a", [1, 2, 3], 6))
    stream = at.stream("a")
    found = [next(stream)]
    at.step()
    at.step()
    stream.close()
    while at.has_work:
        found += at.step()
    assert tokens(found) == wanted


def test_a_second_stream_and_an_id_that_is_still_read_are_refused(at):
    at.add_request(ask("a", [1, 2, 3], 2))
    stream = at.stream("a")
    next(stream)
    with pytest.raises(BadRequest, match="streamed already"):
        next(at.stream("a"))
    at.step()
    with pytest.raises(BadRequest, match="its stream is not read to the end"):
        at.add_request(ask("a", [7, 8], 2))
    assert len(list(islice(stream, LIMIT))) == 1
    with pytest.raises(BadRequest, match="'a' is not being served"):
        next(at.stream("a"))
