"""Prompts of chunks and of modules: what a cell makes of them, and the oracle of what they are.

The model looks keys and values up, so a text computed alone has those of the text in its place:
what is proved is where they stand, how often they were rounded, which were computed again, and
that layers, dtypes, kernels and meshes read them as any others. That blends change answers, and
which tokens they choose, is proved by tests/reuse, of models whose layers feed each other.
"""

import dataclasses
import functools
from typing import Any

import numpy as np

from kvrt import BlendSpec, PrivatePrefix, PromptCache, Runtime
from kvrt.reuse.schema import lay_out, read_schema
from tests.matrix.plaincache import PlainSeq
from tests.matrix.plainmodel import drawn

PROMPT = drawn(2, 40)
ENDS = (12, 24, 32)  # of the chunks; what follows is computed behind them
LEAD = PROMPT[:1]
COMPUTED = tuple(range(3, 32, 4))  # in every layer; a step of 8
SPEC = BlendSpec(check_layer=0, rule=lambda apart, sizes, n: np.array(COMPUTED))
# The whole prompt as modules, but for the suffix; an argument of two tokens leaves a place free.
SCHEMA = (
    "<schema><module name='one'>{}</module><module name='two'>{} <parameter name='x' length='3'/> "
    "{}</module></schema>"
)
STORE = 2  # the sequence of modules


def alone() -> list[list[int]]:
    """The chunks, each behind the lead."""
    first, *rest = (PROMPT[a:b] for a, b in zip((0, *ENDS), ENDS, strict=False))
    return [first, *([*LEAD, *x] for x in rest)]


# --- what a cell makes of it -------------------------------------------------------------------


def refuse(runtime: Runtime) -> None:
    """Refuses what cannot have chunks, by computing the least one."""
    runtime.chunk(LEAD)


def blend(runtime: Runtime, n_suffix: int) -> Any:
    """Blends the chunks in sequence 0; the logits of the last of some tokens behind them."""
    chunks = [runtime.chunk(x[1:], LEAD) for x in alone()]
    return runtime.blend(chunks, PROMPT[ENDS[-1] :][:n_suffix], SPEC).logits


def private_prefix(runtime: Runtime) -> PrivatePrefix:
    """The chunks, blended by a runtime beside an engine when they are wanted."""
    refuse(runtime)

    @functools.cache
    def read():
        blend(runtime, 1)
        return runtime.snapshot()

    return PrivatePrefix(tokens=tuple(PROMPT[: ENDS[-1]]), read=read)


def modules(runtime: Runtime) -> PromptCache:
    """Encodes all modules."""
    texts = (" ".join(map(str, x)) for x in (PROMPT[1:12], PROMPT[12:20], PROMPT[22:31]))
    schema = read_schema(SCHEMA.format(*texts))
    layout = lay_out(schema, lambda text: [int(x) for x in text.split()], 0, LEAD)
    assert layout.end == ENDS[-1]
    return PromptCache.encode(runtime, layout, first_seq=STORE)


def serve(cache: PromptCache) -> Any:
    """Serves them to sequence 0; the logits of the suffix's last token."""
    arguments = {("two", "x"): PROMPT[20:22]}
    return cache.serve(0, ["two", "one"], PROMPT[ENDS[-1] :], arguments).logits


# --- the oracle --------------------------------------------------------------------------------


def place(seq: PlainSeq, tokens: list[int], first: int) -> None:
    """Takes tokens in at positions of its choice."""
    own, _ = seq.own(tokens)
    for i, row in enumerate(own):
        row.pos = first + i
    seq.store(own)


def held_modules(seq: PlainSeq) -> None:
    """The modules and the argument, in the order in which they are computed."""
    for first, end in ((0, 20), (23, 32), (20, 22)):
        place(seq, PROMPT[first - (first == 23) :][: end - first], first)


class BlendedSeq:
    """A layer in front that computes all tokens where they stand, and the cell's layers behind it.

    Those have chunks as they were computed alone, moved and rounded again, but for what is computed
    in every layer.
    """

    def __init__(self, cell: Any, policy: Any, extend: Any):
        self.front = PlainSeq(cell._replace(layers="full"), policy, extend)
        self.behind = PlainSeq(cell, policy, extend)
        self._told = cell, policy, extend

    kept = None  # refused with policies by score

    @property
    def rows(self) -> list:
        return self.behind.rows

    @property
    def n_past(self) -> int:
        return self.behind.n_past

    @property
    def n_whole(self) -> int:
        return self.behind.n_whole

    @n_whole.setter
    def n_whole(self, n: int) -> None:
        self.front.n_whole = self.behind.n_whole = n

    def blend(self, n: int) -> None:
        """Takes in the first n tokens of the chunks."""
        self.front.hold(PROMPT[:n])
        fresh = PlainSeq(*self._told)
        fresh.hold(PROMPT[: ENDS[-1]])
        for i, tokens in enumerate(alone()):
            one, end = PlainSeq(*self._told), len(self.rows)
            one.hold(tokens)
            for row in one.rows[len(LEAD) if i else 0 :]:
                to = end + row.pos - (len(LEAD) if i else 0)
                moved = dataclasses.replace(row, pos=to, delta=to - row.pos, number=to)
                self.behind.rows.append(moved)
        self.behind.settle()
        for i in COMPUTED:
            self.behind.rows[i] = fresh.rows[i]
        self.behind.rows = self.behind.rows[:n]
        self.behind.n_stored = n

    def make_room(self, *told: int) -> None:
        for seq in (self.front, self.behind):
            seq.make_room(*told)

    def hold(self, tokens: list[int]) -> None:
        for seq in (self.front, self.behind):
            seq.hold(tokens)

    def step(self, tokens: list[int]) -> np.ndarray:
        return self.front.step(tokens) + self.behind.step(tokens)
