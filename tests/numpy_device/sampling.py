"""Sampling of the NumPy device: the limits of `kvrt.program.sample`, other random numbers.

A draw follows from the logits, the sampler's limits, its seed and its count, as on a device.
"""

import dataclasses

import numpy as np

from kvrt.program.sample import NO_TOKEN, can_sample


def sample_tokens(logits, sampler):
    """The next token of each sequence of logits [S, V], and the sampler that has seen it."""
    columns = [np.asarray(getattr(sampler, f.name)) for f in dataclasses.fields(sampler)]
    names = [f.name for f in dataclasses.fields(sampler)]
    tokens = np.array(
        [
            _one(x, dict(zip(names, row, strict=True)))
            for x, *row in zip(logits, *columns, strict=True)
        ],
        np.int32,
    )
    recent = np.concatenate([np.asarray(sampler.recent)[:, 1:], tokens[:, None]], axis=1)
    n_sampled = np.asarray(sampler.n_sampled) + np.uint32(1)
    return tokens, dataclasses.replace(sampler, recent=recent, n_sampled=n_sampled)


def log_probs(logits, n_best):
    """The n_best most probable tokens of logits [S, V], and their log-probabilities."""
    wide = np.asarray(logits, np.float64)
    top = wide.max(axis=1, keepdims=True)
    values = wide - top - np.log(np.exp(wide - top).sum(axis=1, keepdims=True))
    ids = np.argsort(-wide, axis=1, kind="stable")[:, :n_best].astype(np.int32)
    return ids, np.take_along_axis(values, ids, axis=1).astype(np.float32)


def _one(logits, how):
    if not can_sample(logits):
        return NO_TOKEN
    logits = np.array(logits, np.float64)
    seen = np.unique(how["recent"][how["recent"] >= 0])
    penalty = how["repeat_penalty"]
    logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    if how["temp"] <= 0:
        return int(np.argmax(logits))
    ascending, keep = np.sort(logits), np.ones(len(logits), bool)
    if 0 < how["top_k"] < len(logits):
        keep &= logits >= ascending[-how["top_k"]]
    probs = np.where(keep, np.exp(logits - ascending[-1]), 0.0)
    probs /= probs.sum()
    if how["top_p"] < 1:
        order = np.argsort(-probs, kind="stable")
        mass = np.cumsum(probs[order])
        keep &= logits >= logits[order[np.searchsorted(mass, how["top_p"])]]
    keep &= probs >= how["min_p"] * probs.max()
    noise = np.random.default_rng([how["seed"], how["n_sampled"]]).gumbel(size=len(logits))
    return int(np.argmax(np.where(keep, logits / how["temp"] + noise, -np.inf)))
