"""Families whose layers share, compress or skip: who judges them, and how far from that they are.

Differences are the largest of any logit (of a log-probability beside llama.cpp) of tiny random
models, f32 weights and cache: what the tests print with `pytest -s -m ''`. Tests allow `LIMIT`.
"""

from typing import NamedTuple

LIMIT = 1e-4
_HF = "tests/models/test_families.py::test_logits_are_those_of_transformers"
_PEER = "tests/peer/test_llama_cpp.py::test_log_probs_are_those_of_llama_cpp"


class Family(NamedTuple):
    """A family, what its layers do, its judge, the largest difference, and the test."""

    name: str
    layers: str
    judge: str
    difference: float
    test: str


FAMILIES = (
    Family("Gemma 3n", "read others' keys and values", "transformers", 3.9e-5, _HF),
    Family("Gemma 4, experts too", "read others' keys and values", "transformers", 1.6e-5, _HF),
    Family("DeepSeek V2, V3", "latents", "transformers", 1.8e-5, _HF),
    Family("DeepSeek V2, V3", "latents", "llama.cpp", 2.0e-5, _PEER),
    Family("DeepSeek V3.2", "latents that an indexer chooses", "transformers", 3.6e-5, _HF),
    Family("Qwen3-Next", "gated delta rule", "transformers", 1.0e-5, _HF),
    Family("Kimi-Linear", "gated delta rule by channel, latents", "transformers", 1.2e-05, _HF),
    Family(
        *("YOCO", "windows, one layer's keys and values", "NumPy, float64", 2.7e-6),
        "tests/runtime/test_yoco.py::test_some_tokens_of_a_step_have_logits",
    ),
    Family(
        *("YOCO", "gated retention, one layer's keys and values", "NumPy, float64", 1.8e-6),
        "tests/runtime/test_yoco_retention.py::test_parts_and_single_steps_are_the_dense_model_and_"
        "so_is_what_follows_a_rollback",
    ),
)
