"""How far a cheaper model or cache is from the f32 original, over pieces of plays."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvrt import Runtime
from scripts._lib import texts
from scripts._lib.measure import kl, log_probs
from scripts.experiments.kinds import N_UNSCORED

# Tokens of a play that are read, of which the first are not scored; CHUNK of them come in at once.
FIRST, N_TOKENS, CHUNK = 3000, 1024, 64

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


def pieces(tokenizer: Any, name: str) -> list[int]:
    """Tokens of a play that are read."""
    return tokenizer.encode(texts.play(name))[FIRST : FIRST + N_TOKENS]


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
