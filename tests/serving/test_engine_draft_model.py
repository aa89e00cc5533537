"""A smaller model that drafts in an Engine: what it gives without drafts, however they fare."""

import functools

import pytest

from kvrt import CacheConfig, DraftModel, Runtime, Sampling, Speculation
from kvrt.errors import BadConfig
from tests.serving.engines import MODELS, N_ROWS, B, ask, make, served
from tests.toys import HybridLm, ToyLm

N_DRAFT = 3
LIVELY = Sampling(temp=0.9, top_k=12, repeat_penalty=1.3, repeat_last_n=6, seed=7)
BEGINNING = [3, 1, 4, 1, 5, 9, 2, 6]


def drafter(model, n_ctx=256, **options):
    sizes = dict(n_ctx=n_ctx, n_seq_max=N_ROWS, block_size=8, n_ubatch=8)
    return DraftModel(runtime=Runtime(model, CacheConfig(**sizes, **options)))


def requests():
    """Texts that begin alike, greedy and sampled, two samples of one among them."""
    return [
        ask("a", BEGINNING, 20),
        ask("b", [*BEGINNING[:6], 8, 8], 20, sampling=LIVELY, n=2),
        ask("c", [7, 7, 7], 14, sampling=Sampling(temp=0.5, seed=3)),
    ]


@functools.cache
def plain(kind, mode):
    return served(make(kind, mode), requests())


@pytest.mark.slow
def test_a_model_drafts_for_itself_what_each_request_says():
    """It knows how each is sampled, so that none of its drafts is refused."""
    spec = Speculation(drafter=drafter(MODELS["full"]()), n_draft=N_DRAFT)
    engine = make("full", speculation=spec)
    assert served(engine, requests()) == plain("full", "paged")
    drafts = engine.stats().drafts
    assert drafts["accepted"] == drafts["drafted"] > 30
    again = ask("again", [*BEGINNING, *plain("full", "paged")["a", 0][:9]], 11)
    cached = []
    found = served(engine, [again], lambda out: cached.append(out.n_cached))
    assert found["again", 0] == plain("full", "paged")["a", 0][9:] and cached[-1] >= 12


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mode"), [("full", "cell"), ("recurrent", "paged")])
def test_another_model_changes_no_text(kind, mode):
    n_vocab = MODELS[kind]().n_vocab
    other = HybridLm(seed=7) if kind == "recurrent" else ToyLm(n_vocab=n_vocab, seed=7)
    n_rs_seq = N_DRAFT + 1 if kind == "recurrent" else 0
    spec = Speculation(drafter=drafter(other, n_rs_seq=n_rs_seq), n_draft=N_DRAFT)
    engine = make(kind, mode, speculation=spec)
    assert served(engine, requests()) == plain(kind, mode)
    assert 0 < engine.stats().drafts["drafted"]


@pytest.mark.slow
def test_a_drafter_with_little_room_forgets_whom_it_did_not_draft_for_lately():
    """40 cells hold one text: the others are computed again, or not drafted for at their ends."""
    of = drafter(MODELS["full"](), n_ctx=40)
    engine = make("full", "paged", speculation=Speculation(drafter=of, n_draft=N_DRAFT))
    assert served(engine, requests()) == plain("full", "paged")
    drafts = engine.stats().drafts
    assert drafts["accepted"] == drafts["drafted"] > 30
    assert of.runtime.stats().cells_used <= 40


@pytest.mark.slow
def test_a_drafter_of_one_sequence_follows_whom_it_is_asked_for():
    one = CacheConfig(n_ctx=64, block_size=8, n_ubatch=16)
    of = DraftModel(runtime=Runtime(MODELS["full"](), one))
    engine = make("full", "paged", speculation=Speculation(drafter=of, n_draft=N_DRAFT))
    assert served(engine, requests()[:2]) == {
        k: x for k, x in plain("full", "paged").items() if k[0] != "c"
    }
    assert engine.stats().drafts["accepted"] == engine.stats().drafts["drafted"] > 10


def test_another_vocabulary_is_refused_at_construction():
    spec = Speculation(drafter=drafter(ToyLm(n_vocab=40)), n_draft=N_DRAFT)
    with pytest.raises(BadConfig, match="has 40 tokens in its vocabulary, the model 64") as caught:
        make("full", speculation=spec, block_size=B)
    assert "\n" not in str(caught.value)
