"""Requests: what is refused, and how a sample keeps count of itself."""

import dataclasses
import math

import pytest

from kvrt.errors import BadConfig, BadRequest, UsageError
from kvrt.options.sampling import Sampling
from kvrt.options.serving import Rules
from kvrt.serving import request as requests
from kvrt.serving.limits import Limits
from kvrt.serving.request import Request
from tests.serving.engines import ask, make

LIMITS = Limits(n_vocab=100, n_ctx=64, n_max=32)


def asked(**changes) -> Request:
    return Request(**{"id": "a", "tokens": (1, 2, 3), "n_predict": 4, **changes})


def unchecked(**changes) -> Request:
    """A request as users make it, for whom nobody checks annotations."""
    request = object.__new__(Request)
    for field in dataclasses.fields(Request):
        value = getattr(asked(), field.name)
        object.__setattr__(request, field.name, changes.get(field.name, value))
    request.__post_init__()
    return request


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"id": ""}, "1 to 256 characters"),
        ({"id": "x" * 257}, "1 to 256 characters"),
        ({"tokens": ()}, "the prompt is empty"),
        ({"tokens": (1, 2.0)}, "token 2.0 is no whole number"),
        ({"tokens": (1, True)}, "token True is no whole number"),
        ({"stop_ids": (math.nan,)}, "stop id nan is no whole number"),
        ({"n_predict": 0}, "n_predict is 0"),
        ({"n_predict": math.nan}, "n_predict is nan"),
        ({"n": 0}, "n is 0"),
        ({"n": 5000}, "n is 5000"),
        ({"priority": math.inf}, "priority is inf"),
        ({"priority": 1 << 40}, "priority is 1099511627776"),
    ],
)
def test_what_no_engine_serves_is_refused_on_one_line(changes, told):
    with pytest.raises(BadRequest, match=told) as error:
        unchecked(**changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["temp", "top_p", "min_p", "repeat_penalty"])
def test_a_parameter_that_is_no_number_is_refused(name):
    with pytest.raises(BadConfig, match=f"{name} is nan"):
        asked(sampling=Sampling(**{name: math.nan}))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"tokens": (1, 100)}, r"token 100 is not in \[0, 100\)"),
        ({"tokens": (-1, 3)}, "token -1 is not"),
        ({"stop_ids": (7, 100)}, "stop id 100 is not"),
        ({"n_predict": 63}, "need 65 positions, the cache has n_ctx = 64 .* raise that"),
        ({"n_predict": 31}, "need room for 33 tokens, the cache holds 32"),
        ({"id": "b"}, "request 'b' is being served already"),
        ({"id": "b\nc"}, r"request 'b\\nc' is being served already"),
    ],
)
def test_what_this_engine_cannot_serve_is_refused(changes, told):
    with pytest.raises(BadRequest, match=told) as error:
        LIMITS.check(asked(**changes), {"b", "b\nc"})
    assert "\n" not in str(error.value) and isinstance(error.value, UsageError)


def test_a_request_that_just_fits_is_taken():
    # The last token sampled is never computed: 3 + 30 - 1 = 32 cells.
    LIMITS.check(asked(n_predict=30), set())
    assert asked(n_predict=30).n_whole == 32


def test_samples_differ_by_their_seed_alone():
    states = requests.samples_of(asked(n=3, sampling=Sampling(temp=1.0, seed=2**32 - 1)))
    assert [s.sampling.seed for s in states] == [2**32 - 1, 0, 1]
    assert {s.sampling.temp for s in states} == {1.0}
    assert [s.sample for s in states] == [0, 1, 2]
    states[0].append(9)
    assert [len(s.tokens) for s in states] == [4, 3, 3]
    assert states[0] != requests.samples_of(asked())[0]


def test_a_sample_ends_at_a_stop_or_at_its_length():
    (state,) = requests.samples_of(asked(n_predict=3, stop_ids=(50,)))
    assert state.append(7) is None
    assert state.append(50) == "stop"
    assert (state.output, state.n_sampled, state.n_prompt) == ([7, 50], 2, 3)
    (state,) = requests.samples_of(asked(n_predict=2))
    assert [state.append(50), state.append(8)] == [None, "length"]


@pytest.mark.parametrize("mode", ["cell", "paged"])
def test_a_request_may_be_limited_to_less_than_the_cache(mode):
    at = make("full", mode, rules=Rules(n_batch=8, n_ctx_seq=20))
    with pytest.raises(BadRequest, match=r"the cache holds 20 of one request.*n_ctx_seq"):
        at.add_request(ask("long", range(12), 10))
    at.add_request(ask("fits", range(12), 8))
    if mode == "paged":
        # Block tables are as wide as the longest request needs, with the gap that drops leave.
        assert at.space._arrays._tables[0]._ids.shape[1] == 5 + 2
    at.cancel("fits")
