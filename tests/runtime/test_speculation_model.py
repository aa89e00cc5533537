"""SmolLM2: greedy text with drafts is that without, token for token, at f32."""

import pytest

from kvrt import CacheConfig, LayerSkip, PromptLookup, Runtime, Speculation
from kvrt_models.load import load

pytestmark = pytest.mark.model

N_PREDICT, GAP = 24, 1e-4
# That of the golden cases, and its programs: it takes longest to compile them.
CONFIG = CacheConfig(n_ctx=1024, n_seq_max=2, swa_full=True, n_ubatch=32)
PROMPTS = ("1, 2, 3,", "def main():", "Roses are red. " * 6)


@pytest.fixture(scope="module")
def real():
    """A tokenizer and a runtime."""
    model = load("smollm2-135m", dtype="f32")
    return model.tokenizer, Runtime(model.decoder, CONFIG)


def check_text(real, words, spec):
    """The greedy text of a prompt with and without drafts; how many stayed and how many were made.

    Where the best two tokens are all but equal the order of a sum decides; so far nowhere.
    """
    tokenizer, runtime = real
    ids, texts, before = tokenizer.encode(words), [], runtime.stats()
    for drafts in (None, spec):
        runtime.clear()
        runtime.prefill(ids)
        texts.append(list(runtime.generate(N_PREDICT, n_best=2, speculation=drafts)))
    plain, drafted = texts
    at = next((i for i, (a, b) in enumerate(zip(*texts, strict=True)) if a.id != b.id), None)
    assert at is None or plain[at].best[0][1] - plain[at].best[1][1] < GAP, (words, at)
    assert len(drafted) == N_PREDICT
    stats = runtime.stats()
    return stats.n_accepted - before.n_accepted, stats.n_drafted - before.n_drafted


def test_the_text_is_that_without_drafts(real):
    """The last prompt goes on repeating itself; drafts of the others are mostly refused."""
    spec = Speculation(drafter=PromptLookup(n_min=2), n_draft=7)
    n_accepted = sum(check_text(real, words, spec)[0] for words in PROMPTS)
    assert n_accepted > 8  # drafts had a part in it


def test_drafts_of_the_first_layers_change_no_text(real):
    """SmolLM2 was not trained to exit early: drafts are refused more often than not."""
    spec = Speculation(drafter=LayerSkip(exit_layer=24), n_draft=3)
    n_accepted, n_drafted = check_text(real, PROMPTS[0], spec)
    assert 0 < n_accepted < n_drafted
