"""What a model or a generation does not use is in none of its programs, which are lowered alone."""

import pytest

from kvrt import CacheConfig, Engine, PromptLookup, Runtime, Speculation
from kvrt.attention.step_attention import StepAttention
from kvrt.options.engine import EngineConfig
from kvrt.program.programs import Programs
from kvrt.program.rounds import round as rounds
from kvrt.serving.request import Request
from tests.toys import ToyLm

SIZES = CacheConfig(n_ctx=64, n_seq_max=2, block_size=8, n_ubatch=8)
# What layers that share, skip or recur, drafts and sparse reads call while a step is traced.
UNUSED = ("one_by_one", "keep", "for_tokens", "produce", "shared", "recur", "read_sparsely")
SPECULATION = Speculation(drafter=PromptLookup(), n_draft=3)


class Stopped(Exception):
    """In place of a program's run: its key and text."""


@pytest.fixture
def lowered(monkeypatch):
    """Programs are lowered and not run."""

    def run(programs, program):
        raise Stopped(program.key, programs._traced(program).lower().as_text())

    monkeypatch.setattr(Programs, "run", run)


def text_of(call):
    """The program that a call would run first."""
    with pytest.raises(Stopped) as caught:
        call()
    return caught.value.args


def of_runtime():
    at = Runtime(ToyLm(), SIZES)
    return text_of(lambda: at.append([1, 2, 3]))


def of_engine(mode, speculation=None):
    engine = Engine(ToyLm(), SIZES, EngineConfig(mode=mode, speculation=speculation))
    engine.add_request(Request(id="a", tokens=(1, 2, 3), n_predict=4))
    return text_of(engine.step)


PROGRAMS = {
    "runtime": of_runtime,
    "cells": lambda *of: of_engine("cell", *of),
    "blocks": lambda *of: of_engine("paged", *of),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_plain_model_has_the_programs_that_it_had_without_these_features(
    name, lowered, monkeypatch
):
    """As if nobody had written them: none of them is called, and the text is the same."""
    key, text = PROGRAMS[name]()
    assert key[0] == "forward" and len(text) > 1000
    for unused in UNUSED:
        monkeypatch.delattr(StepAttention, unused)
    for function in ("verify", "accept"):
        monkeypatch.delattr(rounds, function)
    assert PROGRAMS[name]() == (key, text)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cells", "blocks"])
def test_a_step_without_drafts_is_that_of_an_engine_without_them(name, lowered):
    assert PROGRAMS[name](SPECULATION) == PROGRAMS[name]()


def test_what_is_used_is_seen(lowered, monkeypatch):
    """A control: a model that calls one of them has another program, or none without it."""

    class Produces(ToyLm):
        def __call__(self, tokens, attend, out_ids):
            attend.one_by_one()
            return super().__call__(tokens, attend, out_ids)

    monkeypatch.delattr(StepAttention, "one_by_one")
    with pytest.raises(AttributeError, match="one_by_one"):
        Runtime(Produces(), SIZES).append([1, 2, 3])
