"""SmolLM2 in an Engine: greedy texts with drafts from the prompt are those without, at f32."""

import numpy as np
import pytest

from kvrt import CacheConfig, Engine, EngineConfig, PromptLookup, Request, Speculation
from kvrt_models.load import load

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_layer_a_program")]

N_PREDICT, GAP = 24, 1e-4
# One goes on repeating itself.
PROMPTS = ("1, 2, 3,", "def main():", "Roses are red. " * 6)


def test_the_texts_are_those_without_drafts():
    model = load("smollm2-135m", dtype="f32")
    # Two rounds a step at most: each number of rounds is a program.
    config = CacheConfig(n_ctx=512, n_seq_max=4, block_size=16, n_ubatch=16)
    spec = Speculation(drafter=PromptLookup(n_min=2), n_draft=7)
    asked = [
        Request(id=words, tokens=tuple(model.tokenizer.encode(words)), n_predict=N_PREDICT)
        for words in PROMPTS
    ]
    texts, gaps = [], {words: [] for words in PROMPTS}
    for speculation in (None, spec):
        engine = Engine(model.decoder, config, EngineConfig(speculation=speculation))
        for request in asked:
            engine.add_request(request)
        found = {words: [] for words in PROMPTS}
        while engine.has_work:
            for out in engine.step():
                found[out.id] += out.tokens
                if speculation is None:
                    best = np.sort(np.asarray(engine.logits(out.id)))[-2:]
                    gaps[out.id].append(best[1] - best[0])
        texts.append(found)
    for words in PROMPTS:
        plain, drafted = (found[words] for found in texts)
        at = next((i for i, (a, b) in enumerate(zip(plain, drafted, strict=True)) if a != b), None)
        # Where the best two are all but equal the order of a sum decides; so far nowhere.
        assert at is None or gaps[words][at] < GAP, (words, at)
    assert engine.stats().drafts["accepted"] > 5  # drafts had a part in it
