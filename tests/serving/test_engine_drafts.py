"""Speculative decoding in an Engine: what it gives without drafts, in both modes, shared prefixes
and preemption included; whichever drafts are refused, nobody ever sees them."""

import functools
import itertools

import numpy as np
import pytest

from kvrt import CacheConfig, Engine, LayerSkip, PromptLookup, Sampling, Speculation
from kvrt.errors import BadConfig, BadRequest, BadToken
from kvrt.options.engine import EngineConfig
from kvrt.options.serving import Rules
from kvrt.policies import AttentionSinks, ContextShift
from kvrt.program.rounds.round import Drafted, plan_rounds, stays_of
from tests.numpy_device.device import compiled
from tests.serving.engines import MODELS, N_BATCH, N_ROWS, B, ask, drawn, make, served
from tests.serving.soundspace import assert_sound

pytestmark = pytest.mark.usefixtures("numpy_device")

N_DRAFT = 3
# The matrix and program/test_rounds_by_layer.py have others.
LAYERS = [("full", "cell"), ("window", "paged"), ("recurrent", "paged"), ("latent", "cell")]


class Script:
    """Drafts texts that are known, with a mistake at an index that goes round."""

    def __init__(self, n_draft=N_DRAFT, n_vocab=32):
        self.texts, self.n_draft, self.n_vocab = [], n_draft, n_vocab
        self.asked, self.wrong_at = 0, set()

    def check(self, n_vocab):
        pass

    def draft(self, context, n):
        held = context.tokens.tolist()
        mine = [x for x in self.texts if x[: len(held)] == held and len(x) > len(held)]
        if not mine:
            return []
        drafts, at = mine[0][len(held) : len(held) + n], self.asked % (self.n_draft + 1)
        self.asked += 1
        if at < len(drafts):
            drafts[at] = (drafts[at] + 1) % self.n_vocab
            self.wrong_at.add(at)
        return drafts


def never_backs_off(monkeypatch):
    """Every text is drafted for, however its drafts fared."""
    of = "kvrt.serving.drafting.engine_drafts.after_round"
    monkeypatch.setattr(of, lambda before, *_: before)


def pair(kind, mode, n_draft=N_DRAFT, drafter=None, **options):
    """An engine with drafts and one without."""
    script = drafter or Script(n_draft)
    # Room for the drafts of all requests.
    options = {"n_ubatch": N_ROWS * (N_DRAFT + 1)} | options
    drafted = make(kind, mode, speculation=Speculation(drafter=script, n_draft=n_draft), **options)
    return drafted, make(kind, mode, **options), script


def texts_of(requests, found):
    by_id = {r.id: list(r.tokens) for r in requests}
    return [by_id[name] + tokens for (name, _), tokens in found.items()]


def check_same(both, requests):
    """Both engines give the same; the drafter knows what comes and errs at every index."""
    drafted, plain, script = both
    found = served(plain, requests)
    script.texts += texts_of(requests, found)
    after = functools.partial(assert_sound, drafted)
    assert served(drafted, requests, after_step=after) == found
    return found


def test_tokens_of_a_step_stay_but_for_refused_drafts():
    rounds, _ = plan_rounds([Drafted(number=0, first=1, last_n=0, drafts=(5, 6, 7))], (1, 3), 1, 6)
    # The first draft is the token that was sampled, the second is not.
    n = np.array([2], np.int32)
    assert stays_of(rounds, n, 6).tolist() == [True, True, True, False, False, True]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mode"), LAYERS)
def test_text_is_that_without_drafts(kind, mode, monkeypatch):
    """Several requests in one step with different numbers of drafts, and hits on what they left."""
    never_backs_off(monkeypatch)
    rng = np.random.default_rng(3)
    both = pair(kind, mode)
    prompts = drawn(rng, 6, 3, 20)
    requests = [ask(i, x, int(rng.integers(2, 30))) for i, x in enumerate(prompts)]
    whole = texts_of(requests, check_same(both, requests))
    # Requests that begin as texts that drafts have made, and go on otherwise.
    again = [ask(f"b{i}", [*x[: len(x) - i], 7], 12) for i, x in enumerate(whole[:4])]
    check_same(both, again)
    stats = both[0].stats()
    assert set(range(N_DRAFT)) <= both[2].wrong_at
    assert 0 < stats.drafts["accepted"] < stats.drafts["drafted"]
    assert stats.tokens["sampled"] == both[1].stats().tokens["sampled"]
    assert stats.n_steps < both[1].stats().n_steps


@pytest.mark.slow
def test_a_small_pool_preempts_and_changes_no_text(monkeypatch):
    never_backs_off(monkeypatch)
    rng = np.random.default_rng(5)
    both = pair("full", "paged", n_ctx=64)
    requests = [ask(i, rng.integers(0, 32, 11), 24) for i in range(5)]
    check_same(both, requests)
    check_same(both, [ask("again", requests[1].tokens, 24)])
    stats = both[0].stats()
    assert stats.sequences["preempted"] > 0 < stats.drafts["accepted"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("full", "paged"),
        ("window", "cell"),
        ("recurrent", "paged"),
    ],
)
def test_hits_on_what_drafts_have_made_are_as_misses(kind, mode, monkeypatch):
    """Every beginning of a text that was drafted for, rightly and wrongly, goes on as a miss does.

    With blocks of 4 and mistakes at every index, refused drafts stood in the cells of blocks that
    others find later on.
    """
    never_backs_off(monkeypatch)
    drafted, plain, script = pair(kind, mode, n_ctx=512)
    text = [3, 1, 4, 1, 5, 9, 2, 6]
    found = check_same((drafted, plain, script), [ask("a", text, 40)])
    text = [*text, *found["a", 0]]
    alone = make(kind, mode, prefix_cache=False)
    n_hit = 0
    for end in range(9, len(text), 1 if kind == "full" else 5):
        request = ask(end, [*text[:end], 30], 5)
        hits = []
        got = served(drafted, [request], lambda out, hits=hits: hits.append(out.n_cached))
        assert got == served(alone, [request])
        n_hit += hits[0]
    assert n_hit > 100


SAMPLED = Sampling(temp=0.9, top_k=12, repeat_penalty=1.3, repeat_last_n=6, seed=7)


@pytest.mark.slow
def test_sampled_texts_are_those_of_their_seeds(monkeypatch):
    """Samples of one request, penalties token by token, and greedy ones beside them."""
    never_backs_off(monkeypatch)
    both = pair("full", "paged")
    requests = [
        ask("a", [1, 2, 3, 4, 5], 20, sampling=SAMPLED, n=2),
        ask("b", [7, 8, 9], 20),
        ask("c", [4, 4, 4], 20, sampling=Sampling(repeat_penalty=1.5, repeat_last_n=12)),
    ]
    check_same(both, requests)
    assert both[0].stats().drafts["accepted"] > 10


class Always:
    """Drafts the same whatever the text is."""

    def __init__(self, drafts):
        self.drafts, self.n_asked = drafts, 0

    def check(self, n_vocab):
        pass

    def draft(self, context, n):
        self.n_asked += 1
        return self.drafts[:n]


def right(text):
    """A drafter that makes no mistakes."""
    script = Script(n_draft=10**6)
    script.texts.append(text)
    script.asked = N_DRAFT + 1
    return script


@pytest.mark.slow
def test_it_ends_where_it_would_without_drafts():
    """At a stop id that was drafted, and at the number of tokens asked for."""
    plain, prompt = make(), [3, 1, 4, 1, 5]
    (text,) = served(plain, [ask("a", prompt, 40)]).values()
    drafted, _, _ = pair("full", "paged", drafter=right([*prompt, *text]))
    for n in (1, 2, 3, 9):
        assert served(drafted, [ask("a", prompt, n)]) == {("a", 0): text[:n]}
    stop = next(t for i, t in enumerate(text) if i > 8 and t not in text[:i])
    asked = ask("a", prompt, 40, stop_ids=(stop,))
    assert served(drafted, [asked]) == {("a", 0): text[: text.index(stop) + 1]}
    assert drafted.stats().drafts["accepted"] > 8


@pytest.mark.slow
def test_every_token_of_a_round_has_its_logits():
    plain, prompt, rows = make(), [3, 1, 4, 1, 5], []
    (text,) = served(
        plain, [ask("a", prompt, 20)], lambda out: rows.append(plain.logits("a"))
    ).values()
    drafted, _, _ = pair("full", "paged", drafter=right([*prompt, *text]))
    found, sizes = [], []

    def take(out):
        found.extend(drafted.logits("a", 0, i) for i in range(len(out.tokens)))
        sizes.append(len(out.tokens))
        np.testing.assert_array_equal(found[-1], drafted.logits("a"))
        with pytest.raises(BadRequest, match="the last step sampled"):
            drafted.logits("a", 0, len(out.tokens))

    served(drafted, [ask("a", prompt, 20)], take)
    assert max(sizes) == N_DRAFT + 1
    np.testing.assert_allclose(np.stack(found), np.stack(rows), atol=2e-5)


@pytest.mark.slow
def test_policies_cut_rounds_and_change_no_text(monkeypatch):
    never_backs_off(monkeypatch)
    rules = Rules(n_batch=N_BATCH, n_ctx_seq=32)
    both = pair("full", "paged", rules=rules)
    rng = np.random.default_rng(2)
    policies = [ContextShift(n_keep=3), AttentionSinks(n_sink=2, n_window=20, n_drop=8), "none"]
    asked = [
        ask(i, rng.integers(0, 32, 9), 60 if p != "none" else 12, policy=p)
        for i, p in enumerate(policies)
    ]
    check_same(both, asked)
    drafted, plain = (e.stats() for e in both[:2])
    assert drafted.drops == plain.drops and drafted.drops["tokens"] > 0
    assert drafted.drafts["accepted"] > 10


@pytest.mark.slow
def test_searches_and_who_asks_for_none_are_not_drafted_for():
    drafter = Always([1, 2, 3])
    both = pair("full", "paged", drafter=drafter)
    requests = [ask("a", [1, 2, 3], 8, num_beams=2), ask("b", [4, 5], 8, drafts=False)]
    assert served(both[0], requests) == served(both[1], requests)
    assert drafter.n_asked == 0


@pytest.mark.slow
def test_a_text_that_is_drafted_wrongly_is_drafted_for_less_and_less():
    drafter = Always([31, 31, 31])
    drafted, plain, _ = pair("full", "paged", drafter=drafter)
    request = ask("a", [1, 2, 3], 60)
    assert served(drafted, [request]) == served(plain, [request])
    assert drafted.stats().drafts["accepted"] == 0
    assert 4 <= drafted.stats().drafts["rounds"] <= 7


@pytest.mark.parametrize(
    ("options", "speculation", "message"),
    [
        (
            {},
            Speculation(drafter=PromptLookup(), n_draft=16),
            "17 tokens exceeds n_batch",
        ),
        ({"run_ahead": True}, Speculation(drafter=PromptLookup()), "leave out run_ahead"),
        (
            {},
            Speculation(drafter=LayerSkip(exit_layer=2), n_draft=3),
            "the model has 2 layers; some of them",
        ),
    ],
)
def test_what_does_not_fit_is_refused_at_construction(options, speculation, message):
    config = CacheConfig(n_ctx=64, n_seq_max=2, block_size=B, n_ubatch=N_BATCH)
    with pytest.raises(BadConfig, match=message):
        Engine(MODELS["full"](), config, EngineConfig(speculation=speculation, **options))


def test_drafts_outside_the_vocabulary_are_refused():
    drafted, plain, _ = pair("full", "paged", drafter=(drafter := Always([999])))
    with pytest.raises(BadToken, match="token id 999 is not in"):
        served(drafted, [ask("a", [1, 2, 3], 8)])
    drafter.drafts = []
    tokens = [t for out in drafted.stream("a") for t in out.tokens]
    text = served(plain, [ask("a", [1, 2, 3], 8)])["a", 0]
    assert len(tokens) > 4 and tokens == text[-len(tokens) :]


@compiled()
@pytest.mark.slow
def test_few_programs_serve_all_rounds():
    drafted, _, _ = pair("full", "paged", drafter=Always([1, 2]))
    rng = np.random.default_rng(0)
    served(drafted, [ask(i, x, 30) for i, x in enumerate(drawn(rng, 9))])
    keys = [k for k in drafted.programs.compiled() if k.name == "verify_round"]
    # One size of rounds each: 1, 2 or 4 sequences with drafts.
    assert 1 <= len(keys) <= 3


@compiled()
def test_a_call_that_was_interrupted_is_taken_up(monkeypatch):
    """What a step has sampled is read by the next call, though someone was cancelled meanwhile."""
    prompt, plain = [3, 1, 4, 1, 5], make()
    (text,) = served(plain, [ask("a", prompt, 20)]).values()
    drafted, _, _ = pair("full", "paged", drafter=right([*prompt, *text]))
    drafts = drafted._steps._drafts
    drafted.add_request(ask("a", prompt, 20))
    drafted.add_request(ask("b", prompt, 20, drafts=False))
    tokens, read, n_read = [], drafts.read, [0]

    def interrupted(launched):
        n_read[0] += 1
        if n_read[0] == 2:
            raise KeyboardInterrupt
        return read(launched)

    monkeypatch.setattr(drafts, "read", interrupted)
    while drafted.has_work:
        try:
            outputs = drafted.step()
        except KeyboardInterrupt:
            drafted.cancel("b")
            continue
        tokens += [t for out in outputs if out.id == "a" for t in out.tokens]
    assert tokens == text and n_read[0] > 2
    assert served(drafted, [ask("c", [*prompt, *text[:9]], 11)])["c", 0] == text[9:]


@pytest.mark.slow
@pytest.mark.parametrize("fail_at", [2, 3, 4])
def test_a_state_of_a_round_that_nobody_read_is_found_by_nobody(fail_at, monkeypatch):
    """Ctrl-C while a round is read, then the request is cancelled: its state has moved on."""
    never_backs_off(monkeypatch)
    drafted, plain, script = pair("recurrent", "cell")
    first = ask("first", range(10), 20)
    script.texts += texts_of([first], served(plain, [first]))
    read, n_read = drafted._steps._drafts.read, itertools.count(1)

    def interrupted(last):
        if next(n_read) == fail_at:
            raise KeyboardInterrupt
        return read(last)

    monkeypatch.setattr(drafted._steps._drafts, "read", interrupted)
    drafted.add_request(first)
    with pytest.raises(KeyboardInterrupt):
        while drafted.has_work:
            drafted.step()
    (state,) = drafted.running
    begin = state.tokens[: state.n_computed]
    drafted.cancel("first")
    drafted.step()
    other = ask("other", [*begin, 3, 3])
    assert served(drafted, [other]) == served(plain, [other])
