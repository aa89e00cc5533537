"""Real models with matrices of eight bits: a step's logits do not follow its number of tokens."""

import numpy as np
import pytest

from kvrt import CacheConfig, Runtime
from kvrt_models.load import load
from scripts.experiments import divergence
from tests.models.test_int8_agreement import apart

# A module of this marker alone is optimised; else products of eight bits take five times longer.
pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_layer_a_program")]
# What docs/quantization.md states.
BOUND = 2e-4


@pytest.mark.parametrize(
    "name", ["smollm2-135m", pytest.param("gemma3-270m", marks=pytest.mark.full)]
)
def test_a_step_of_any_size_gives_a_real_model_the_same_logits(name, budget):
    """All tokens at once; the last 8 of them together, and each by itself; all of them by 8."""
    model = load(name, dtype="int8")
    n = budget(128, 512)
    tokens = divergence.pieces(model.tokenizer, "hamlet")[:n]
    at = Runtime(model.decoder, CacheConfig(n_ctx=n))
    whole = np.asarray(at.append(tokens, out_ids=range(n - 8, n)))
    found = {}
    for size in (8, 1):
        at.seq_rm(0, n - 8)
        parts = [tokens[i : i + size] for i in range(n - 8, n, size)]
        found[size] = np.concatenate([at.append(x, out_ids=range(len(x))) for x in parts])
    at.clear()
    for i in range(0, n, 8):
        found["all by 8"] = at.append(tokens[i : i + 8], out_ids=range(8))
    for size, rows in found.items():
        worst = apart(np.asarray(rows), whole)
        print(f"{size} at a time: {worst:.1e} of the spread from {n} at once")
        assert worst < BOUND
