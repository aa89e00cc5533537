"""on_states="keep": attention drops, states have all tokens, as the matrix's oracle has it."""

import dataclasses

import pytest

from kvrt import CacheConfig, ContextShift, Engine, EngineConfig, Rules, Runtime
from kvrt.errors import BadConfig
from tests.marks import slow
from tests.matrix import build as builds
from tests.matrix.axes import Cell
from tests.matrix.engine_history import EngineHistory
from tests.matrix.history import RuntimeHistory, outcome
from tests.matrix.plainmodel import drawn, pieces
from tests.serving.engines import MODELS, alone, ask, served
from tests.toys import ToyLm

pytestmark = pytest.mark.usefixtures("numpy_device")

CELLS = [
    Cell(policy="context_shift", layers="full+recurrent"),
    slow(Cell(policy="attention_sinks", layers="full+recurrent", rope="read")),
    slow(Cell(policy="attention_sinks", layers="full+delta")),
    slow(Cell(policy="context_shift", layers="full+recurrent", dtype="f16")),
    slow(Cell(policy="context_shift", layers="full+recurrent", state="session")),
    slow(Cell(policy="context_shift", layers="full+recurrent", where="engine_cells")),
    slow(Cell(policy="attention_sinks", layers="full+delta", where="engine_cells", rope="read")),
    slow(Cell(policy="context_shift", layers="full+recurrent", where="engine_paged")),
    slow(Cell(policy="attention_sinks", layers="full+delta", where="engine_paged", dtype="f16")),
    slow(Cell(policy="context_shift", layers="window+recurrent")),
]


def kept_states(cell, made=builds.config_of):
    return dataclasses.replace(made(cell), on_states="keep")


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_attention_drops_and_states_have_all_tokens(cell, monkeypatch):
    monkeypatch.setattr(builds, "config_of", kept_states)
    found = outcome(cell)
    assert found.kind == "equal", found


@pytest.mark.slow
@pytest.mark.parametrize("where", ["runtime", "engine_cells", "engine_paged"])
@pytest.mark.parametrize("policy", ["context_shift", "attention_sinks"])
def test_many_drops_leave_the_newest_state(policy, where, monkeypatch):
    """Drops leave gaps in the tables of a request, of which its states know nothing."""
    monkeypatch.setattr(builds, "config_of", kept_states)
    cell = Cell(policy=policy, layers="full+recurrent", where=where)
    made, sizes = builds.build(cell), builds.sizes_of(cell)
    prompt = drawn(2, sizes.n_prompt)
    if where == "runtime":
        history = RuntimeHistory(cell, made)
        for part in pieces(prompt, sizes.n_step):
            history.append("the prompt", part)
        for i, token in enumerate(drawn(3, 120)):
            history.append(f"decode {i}", [token])
        assert len(made.stats().drops) >= 3
        return
    history = EngineHistory(cell, made)
    history.ask("a", prompt, 150)
    history.finish()
    history.compare("a")
    assert made.stats().drops["events"] >= 3


@pytest.mark.parametrize("mode", ["cell", "paged"])
def test_an_engine_of_one_sequence_serves_whole_contexts(mode):
    """A hit within a block of states copies one beside that which is read and written."""
    config = CacheConfig(n_ctx=128, n_seq_max=1, block_size=16, n_ubatch=8)
    fine = 8 if mode == "paged" else None
    engine = Engine(MODELS["recurrent"](), config, EngineConfig(mode=mode, hash_block_size=fine))
    first = ask("first", list(range(9)), 60)
    text = alone("recurrent", first)
    assert served(engine, [first]) == {("first", 0): text}
    again = ask("again", [*range(9), *text[:30], 5], 60)
    assert served(engine, [again]) == {("again", 0): alone("recurrent", again)}


def test_what_has_no_attention_or_no_states_is_refused():
    config, policy = CacheConfig(n_ctx=64, block_size=16, on_states="keep"), ContextShift()
    with pytest.raises(BadConfig, match="the model has no recurrent layers; leave it out"):
        Runtime(ToyLm(), config)
    cannot = "recurrent layers cannot forget; do without it and raise n_ctx$"
    with pytest.raises(BadConfig, match=cannot):
        Runtime(builds.model_of("recurrent"), config, policy=policy)
    with pytest.raises(BadConfig, match=cannot):
        Engine(builds.model_of("recurrent"), config, EngineConfig(mode="paged"), policy=policy)


@pytest.mark.parametrize("mode", ["cell", "paged"])
def test_a_state_is_found_by_all_of_its_tokens_or_by_none(mode):
    """Others may find what a policy never drops, and no state is that of those tokens alone."""
    config = CacheConfig(n_ctx=256, n_seq_max=4, block_size=16, n_ubatch=8, on_states="keep")
    options = EngineConfig(mode=mode, rules=Rules(n_batch=8, n_ctx_seq=64))
    engine = Engine(MODELS["recurrent"](), config, options, policy=ContextShift(n_keep=5))
    text = list(range(20))
    served(engine, [ask("first", text, 60)])
    other, n_cached = ask("other", [*text[:5], 9, 9, 9], policy="none"), []
    found = served(engine, [other], lambda out: n_cached.append(out.n_cached))
    assert n_cached[0] == 0 and found["other", 0] == alone("recurrent", other)
