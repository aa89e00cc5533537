"""The rules of beam search against a transcript of Hugging Face's, on tables of logits."""

import itertools

import numpy as np
import pytest

from kvrt import Sampling
from kvrt.errors import BadRequest
from kvrt.serving.beams.search import BeamSearch
from kvrt.serving.beams.spec import BeamSpec
from tests.serving.engines import ask
from tests.serving.plainbeams import beam_search, log_softmax

V = 11


def spec_of(n_beams, n_predict, stops, penalty, early):
    return BeamSpec(
        num_beams=n_beams,
        n_predict=n_predict,
        stop_ids=frozenset(range(stops)),
        length_penalty=penalty,
        early_stopping=early,
    )


def model(seed, stop_bias=0.0, n_stops=0):
    """Logits that follow from the last two tokens, with more or less love for stop tokens."""
    tables = np.random.default_rng(seed).standard_normal((V, V, V)) * 2
    tables[:, :, :n_stops] += stop_bias
    return lambda texts: np.stack([tables[text[-2], text[-1]] for text in texts])


def searched(next_logits, prompt, spec):
    """What `BeamSearch` finds, and its steps."""
    search, texts, n_steps = BeamSearch(spec), [list(prompt)], 0
    while not search.is_done:
        log_probs = log_softmax(next_logits(texts))
        ids = np.argsort(-log_probs, axis=1, kind="stable")[:, : spec.n_candidates]
        found = np.take_along_axis(log_probs, ids, 1)
        chosen = search.advance(ids.tolist(), found.tolist())
        texts = [[*texts[beam], token] for beam, token in chosen]
        n_steps += 1
    return [(h.score, list(h.tokens)) for h in search.hypotheses], n_steps


CASES = list(
    itertools.product(
        (2, 3, 5), (1, 2, 7), (0, 1, 3), (0.0, 1.0, -0.7, 2.0), (False, True, "never")
    )
)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_it_is_what_hugging_face_generates(seed):
    """Penalties that favour long texts and short ones; no stop token, and several."""
    n_early = 0
    for i, (n_beams, n_predict, stops, penalty, early) in enumerate(CASES):
        spec = spec_of(n_beams, n_predict, stops, penalty, early)
        next_logits = model(1000 * seed + i, stop_bias=i % 4 - 1, n_stops=stops)
        found, n_steps = searched(next_logits, [5, 7], spec)
        wanted = beam_search(next_logits, [5, 7], spec)
        assert [text for _, text in found] == [text for _, text in wanted], spec
        np.testing.assert_allclose([x for x, _ in found], [x for x, _ in wanted], rtol=1e-12)
        n_early += n_steps < n_predict
    assert n_early > 20


def test_beams_enough_for_all_texts_find_the_best_of_all():
    """Of two tokens: every text of two, counted out."""
    next_logits = model(3)
    spec = spec_of(5, 2, 0, 1.0, "never")
    rows = log_softmax(next_logits([[5, 7]]))[0]
    every = {
        (a, b): (rows[a] + log_softmax(next_logits([[5, 7, a]]))[0][b]) / 2
        for a in np.argsort(-rows)[:5].tolist()
        for b in range(V)
    }
    best = sorted(every, key=every.get, reverse=True)[:5]
    found, _ = searched(next_logits, [5, 7], spec)
    assert [tuple(text) for _, text in found] == best


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"num_beams": 0}, r"num_beams is 0; it must be a whole number in \[1, \d+\]"),
        ({"num_beams": 2, "n": 3}, "n is 3, and 2 beams give as many texts; lower n"),
        (
            {"num_beams": 2, "sampling": Sampling(temp=0.5)},
            "num_beams is 2 and temp 0.5: a beam search takes .*; set temp to 0, or num_beams to 1",
        ),
        (
            {"num_beams": 2, "sampling": Sampling(repeat_penalty=1.1)},
            r"num_beams is 2 and repeat_penalty 1.1: .*; set it to 1",
        ),
        ({"length_penalty": 2.0}, "length_penalty and early_stopping are of beams; raise num_b"),
        ({"num_beams": 2, "length_penalty": float("nan")}, "length_penalty is nan; a finite"),
    ],
)
def test_what_is_no_beam_search_is_refused_in_one_line(asked, said):
    with pytest.raises(BadRequest, match=f"request 'a': {said}") as caught:
        ask("a", [1, 2], **asked)
    assert "\n" not in str(caught.value)
