"""A runtime and its oracle take the same tokens, and give the same logits."""

import functools

import numpy as np

TEXT = [(7 * i + i // 5) % 32 for i in range(80)]


def read(at, oracle, tokens, seq_id=0, tolerance=1e-4):
    """Both take the tokens; the logits of all of them are equal."""
    found = at.append(tokens, seq_id, out_ids=range(len(tokens)))
    np.testing.assert_allclose(found, oracle.step(tokens), atol=tolerance, rtol=0)


def run_history(at, oracle, tolerance=1e-4):
    """A prompt, decode, a gap that closes, a fork that goes on otherwise, defrag."""
    one = functools.partial(read, at, tolerance=tolerance)
    for start, end in ((0, 16), (16, 23), (23, 24), (24, 25)):
        one(oracle, TEXT[start:end])
    if all(g.mask.kind == "full" for g in oracle.model.groups):
        at.seq_rm(0, 3, 12)
        at.seq_add(0, 12, None, -9)
        oracle.remove(3, 12)
        oracle.move(12, -9)
        one(oracle, TEXT[25:26])
    at.seq_cp(0, 1)
    fork = oracle.copy()
    one(oracle, TEXT[26:30])
    one(fork, TEXT[40:47], 1)
    at.seq_rm(1)
    at.defrag()
    one(oracle, TEXT[30:31])
