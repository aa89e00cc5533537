"""Tokens of a sample as a cache in cells counts them."""

import numpy as np

from kvrt.arrays import Int32
from kvrt.serving.request import SeqState


def n_each(state: SeqState) -> int:
    """Cells of each of the samples that are to be forked from one, beside those that it shares."""
    return state.n_whole - (0 if state.moves else state.n_prompt)


def n_findable(state: SeqState) -> int:
    """Tokens of a sample that others may find: none of one that SelfExtend will move."""
    return state.n_unmoved if state.extend is None else 0


def ids_of(state: SeqState, start: int, end: int) -> Int32[np.ndarray, " n"]:
    """Tokens [start, end) of a sample."""
    n = state.n_prompt
    prompt = np.frombuffer(state.request.text, ">u4")[start:end].astype(np.int32)
    if end <= n:
        return prompt
    return np.concatenate([prompt, np.array(state.tokens[max(start, n) : end], np.int32)])
