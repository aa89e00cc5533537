"""Admission by memory: what those who run, and their samples to come, may still ask for."""

from collections.abc import Iterable

from kvrt.serving.request import SeqState


def n_growth(state: SeqState, running: Iterable[SeqState]) -> int:
    """Tokens that have to fit one day beside what is there now and all tokens of one more sample.

    Of those who run, what they lack of their ends; of samples that follow one of them or the new
    one, what comes after the prompt that they share.

    Source: BatchLLM, arXiv:2412.03594, memory-centric token batching.
    """
    n = _n_followers(state)
    for other in running:
        n += max(other.n_whole - other.capacity, 0) + _n_followers(other)
    return n


def _n_followers(state: SeqState) -> int:
    return sum(s.n_whole - s.n_prompt for s in state.followers or ())
