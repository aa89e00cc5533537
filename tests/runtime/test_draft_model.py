"""Drafts of another model: the same text, whoever drafts; and how often two models agree."""

import functools

import pytest

from kvrt import CacheConfig, DraftModel, Runtime, Sampling, Speculation
from kvrt.errors import BadConfig
from tests.marks import full
from tests.toys import HybridLm, ToyLm

pytestmark = pytest.mark.slow

PROMPT, N, N_DRAFT = [3, 1, 4, 1, 5, 9, 2, 6], 40, 5
LIVELY = Sampling(temp=0.9, top_k=20, repeat_penalty=1.2, repeat_last_n=16, seed=11)


@functools.cache
def runtime(kind, seed=0, n_ctx=128, n_rs_seq=0):
    model = HybridLm(seed=seed) if kind == "hybrid" else ToyLm(n_vocab=32, seed=seed)
    return Runtime(model, CacheConfig(n_ctx=n_ctx, block_size=8, n_ubatch=16, n_rs_seq=n_rs_seq))


def text(at, spec=None, sampling=LIVELY):
    at.clear()
    at.prefill(PROMPT)
    before = at.stats()
    tokens = [t.id for t in at.generate(N, sampling=sampling, recent=PROMPT, speculation=spec)]
    after = at.stats()
    return tokens, after.n_accepted - before.n_accepted, after.n_drafted - before.n_drafted


@pytest.mark.parametrize("sampling", [full(Sampling(temp=0.0)), LIVELY], ids=["greedy", "sampled"])
def test_a_model_drafts_for_itself_what_it_says(sampling):
    at = runtime("full")
    plain, *_ = text(at, sampling=sampling)
    drafter = DraftModel(
        runtime=Runtime(at.programs.kind.model(at.programs.params), at.config), sampling=sampling
    )
    found, n_accepted, n_drafted = text(at, Speculation(drafter=drafter, n_draft=N_DRAFT), sampling)
    assert found == plain
    assert n_accepted == n_drafted > N // 2


@pytest.mark.parametrize(
    ("kind", "n_rs_seq"), [("full", 0), ("hybrid", N_DRAFT + 1), full("hybrid", 0)]
)
def test_another_model_changes_no_text(kind, n_rs_seq):
    at, other = runtime(kind), runtime(kind, 7, n_rs_seq=n_rs_seq)
    other.clear()
    plain, *_ = text(at)
    spec = Speculation(drafter=DraftModel(runtime=other, sampling=LIVELY), n_draft=N_DRAFT)
    found, n_accepted, n_drafted = text(at, spec)
    assert found == plain and 0 <= n_accepted < n_drafted


def test_a_text_that_outgrows_the_drafter_goes_on_without():
    at, other = runtime("full"), runtime("full", 7, n_ctx=24)
    other.clear()
    spec = Speculation(drafter=DraftModel(runtime=other, sampling=LIVELY), n_draft=N_DRAFT)
    assert text(at, spec)[0] == text(at)[0]


def test_another_vocabulary_is_refused():
    other = Runtime(ToyLm(n_vocab=40), CacheConfig(n_ctx=64, n_ubatch=16, block_size=8))
    at = runtime("full")
    at.clear()
    at.prefill(PROMPT)
    spec = Speculation(drafter=DraftModel(runtime=other), n_draft=2)
    with pytest.raises(BadConfig, match="has 40 tokens in its vocabulary, the model 32"):
        at.generate(3, speculation=spec)
