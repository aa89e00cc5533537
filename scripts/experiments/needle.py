"""Needles: a pass key, hidden at a depth of a text that says nothing of it, and a question.

Source: arXiv:2305.16300, sec. 4.2; llama.cpp `examples/passkey`.
"""

import dataclasses
import itertools
import random
import re
from collections.abc import Callable, Sequence

import numpy as np

from kvrt import Runtime
from kvrt.errors import UsageError
from scripts.experiments.divergence import log_probs

HEAD = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. "
    "I will quiz you about the important information there. "
)
FILLER = (
    "The grass is green. ",
    "The sky is blue. ",
    "The sun is yellow. ",
    "Here we go. ",
    "There and back again. ",
)
NEEDLE = "The pass key is {key}. Remember it. {key} is the pass key. "
QUESTION = "What is the pass key? The pass key is"

Encode = Callable[[str], list[int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Needle:
    """A prompt's tokens, and the digits that are to be found in it."""

    tokens: list[int]
    key: str


def key_of(seed: int, length: int, depth: float, trial: int) -> str:
    """Five digits; the same for every mode and model, so that all search for the same."""
    return str(random.Random(f"{seed}/{length}/{depth}/{trial}").randint(10000, 99999))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hay:
    """What keys are hidden in: pieces of text, again and again, and how many tokens each is.

    Attributes:
      pieces: sentences or lines, each with the white space behind it.
      sizes: tokens of each; what it is among others may differ by one.
      encode: a model's, of a whole text.
    """

    pieces: Sequence[str]
    sizes: Sequence[int]
    encode: Encode


def hay(pieces: Sequence[str], encode: Encode) -> Hay:
    """Counts the tokens of each piece behind another."""
    n_before = len(encode(HEAD))
    sizes = [len(encode(HEAD + piece)) - n_before for piece in pieces]
    return Hay(pieces=pieces, sizes=sizes, encode=encode)


def hide(key: str, length: int, depth: float, hay: Hay) -> Needle:
    """A prompt of at most length tokens, and of hardly fewer, with the key at the depth.

    Args:
      key: what is hidden.
      length: tokens at most.
      depth: 0 puts it before the filler, 1 after it.
      hay: what it is hidden in.

    Raises:
      UsageError: length leaves no room for filler.
    """
    needle = NEEDLE.format(key=key)
    n_fixed = len(hay.encode(HEAD + needle + QUESTION))
    for n in range(n_fitting(hay.sizes, length - n_fixed), 0, -1):
        pieces = list(itertools.islice(itertools.cycle(hay.pieces), n))
        at = place(list(itertools.islice(itertools.cycle(hay.sizes), n)), depth)
        parts = (HEAD, *pieces[:at], needle, *pieces[at:], QUESTION)
        tokens = hay.encode("".join(parts))
        if len(tokens) <= length:
            return Needle(tokens=tokens, key=key)
    raise UsageError(
        f"a prompt of {length} tokens has no room for filler beside {n_fixed} of its own; "
        "make it longer"
    )


def n_fitting(sizes: Sequence[int], n_tokens: int) -> int:
    """How many pieces, taken again and again, have at most n_tokens."""
    total = itertools.accumulate(itertools.cycle(sizes))
    return sum(1 for _ in itertools.takewhile(lambda n: n <= n_tokens, total))


def place(sizes: Sequence[int], depth: float) -> int:
    """How many pieces come before the depth: those whose middle lies there."""
    middles = np.cumsum(sizes) - np.asarray(sizes) / 2
    return int(np.count_nonzero(middles < depth * sum(sizes)))


def found(answer: str, key: str) -> bool:
    """Whether the first number of an answer is the key."""
    number = re.search(r"\d+", answer)
    return number is not None and number.group() == key


def asking(runtime: Runtime, tokens: Sequence[int], n_asked: int) -> np.ndarray:
    """Reads a prompt whose last n_asked tokens ask; those one by one, for they have to find."""
    runtime.prefill(tokens[:-n_asked])
    logits, *_ = [runtime.append([token]) for token in tokens[-n_asked:]][::-1]
    return np.asarray(logits)[0]


def key_nll(
    runtime: Runtime,
    encode: Encode,
    hidden: Needle,
    read: Callable[[Runtime, Sequence[int], int], np.ndarray] = asking,
) -> float:
    """Minus the logarithm of the probability of a key's tokens behind its question.

    `read` reads a prompt, and gives the logits of its last token.
    """
    asked = encode(QUESTION)
    answer = encode(f"{QUESTION} {hidden.key}")[len(asked) :]
    runtime.clear()
    logits, nll = read(runtime, hidden.tokens, len(asked))[None], 0.0
    for token in answer:
        nll -= float(log_probs(np.asarray(logits))[0, token])
        logits = runtime.append([token])
    return nll
