"""How far a cheaper model, cache or reading is from the f32 original, over pieces of plays."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvrt import Runtime
from scripts.experiments import texts

# Tokens of a play that are left out: title, persons, the first scenes. Of those that are read the
# first are not scored; so many come in at once at most.
FIRST, N_TOKENS, N_UNSCORED = 3000, 1024, 512
# Tokens that come in at once where nothing else is said.
CHUNK = 64

Logits = np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quality:
    """What something cheaper gives beside the f32 original, over all scored tokens.

    Attributes:
      perplexity: of the scored tokens.
      kl: mean divergence of its distributions from the original's, in nats.
      top1: share of tokens whose most probable one is the same.
    """

    perplexity: float
    kl: float
    top1: float


def log_probs(logits: Logits) -> np.ndarray:
    """Logarithms of probabilities [n, V], in float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))


def kl(exact: np.ndarray, found: np.ndarray) -> np.ndarray:
    """KL divergence of each row [n] of one list of log probabilities [n, V] from another's."""
    return (np.exp(exact) * (exact - found)).sum(axis=1)


def mean_kl(exact: Logits, found: Logits) -> float:
    """Mean KL of two lists of logits."""
    return float(kl(log_probs(exact), log_probs(found)).mean())


def pieces(tokenizer: Any, name: str, n: int = N_TOKENS) -> list[int]:
    """Tokens of a play that are read."""
    return tokenizer.encode(texts.play(name))[FIRST : FIRST + n]


def logits_of(runtime: Runtime, tokens: Sequence[int], n_first: int = 0) -> Logits:
    """Logits of the tokens from the unscored ones on, without the last: [n, V].

    Args:
      runtime: holds the first n_first of the tokens, or something else where that is 0.
      tokens: of a text.
      n_first: how many it holds.
    """
    if not n_first:
        runtime.clear()
    out, chunk = [], runtime.config.n_ubatch
    for start in range(n_first, len(tokens), chunk):
        part = tokens[start : start + chunk]
        logits = runtime.append(part, out_ids=range(len(part)))
        if start >= N_UNSCORED:
            out.append(np.asarray(logits))  # sync: what a chunk gives is kept on the host
    return np.concatenate(out)[:-1]


def compared(
    exact: Sequence[Logits], found: Sequence[Logits], read: Sequence[Sequence[int]]
) -> Quality:
    """Logits of each text beside those of the original."""
    losses, kls, same = [], [], []
    for a, b, tokens in zip(exact, found, read, strict=True):
        for at in range(0, len(a), CHUNK):
            p, q = (log_probs(x[at : at + CHUNK]) for x in (a, b))
            targets = np.asarray(tokens[N_UNSCORED + at + 1 :][: len(p)])
            losses.append(-q[np.arange(len(q)), targets])
            kls.append(kl(p, q))
            same.append(p.argmax(axis=1) == q.argmax(axis=1))
    mean = [float(np.concatenate(x).mean()) for x in (losses, kls, same)]
    return Quality(perplexity=float(np.exp(mean[0])), kl=mean[1], top1=mean[2])
