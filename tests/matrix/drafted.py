"""The axis `speculation`: cells whose texts are drafted for, and what drafts for them.

Its values are "none", "wrong" (the oracle's own tokens with a mistake at an index that goes round,
behind the last one as well, so that each is refused somewhere), "ngram" (prompt lookup) and "skip"
(the first layer drafts). It stands beside the pairs of `covering.py`: some cells that have between
them every place, policy, frame of keys, kind of state, way to decode and of programs. Every kind of
layer is in tests/runtime/test_speculation.py and tests/serving/test_engine_drafts.py.
"""

import dataclasses
import functools

from kvrt import LayerSkip, PromptLookup, Speculation
from tests.matrix import plainmodel
from tests.matrix.axes import Cell
from tests.matrix.plaincache import PlainSeq
from tests.matrix.tolerance import Different

N_DRAFT = 3
whole = functools.partial(Cell, programs="whole")
DRAFTED = (
    Cell(policy="context_shift", layers="shared", state="session", speculation="wrong"),
    whole("extend_paper", rope="read", layers="full+recurrent", speculation="wrong"),
    Cell(where="blocks", dtype="int8", layers="full+window", speculation="ngram"),
    Cell(policy="extend_cache", dtype="f16", state="checkpoints", speculation="wrong"),
    whole(
        *("none", "engine_paged", "read", "int4", "full+window"),
        state="tiers",
        speculation="wrong",
    ),
    Cell(
        "none", "engine_cells", dtype="bf16", layers="window", state="prefix", speculation="wrong"
    ),
    Cell(where="engine_paged", dtype="q8_0", decode="shared", speculation="wrong"),
    whole("attention_sinks", "engine_cells", decode="fork", speculation="wrong"),
    Cell("context_shift", "engine_paged", layers="sink_window", speculation="wrong"),
    Cell(where="engine_paged", layers="latent", dtype="int8", speculation="wrong"),
    Cell(rope="read", layers="latent", dtype="int4", speculation="wrong"),
    whole("context_shift", layers="latent", dtype="bf16", speculation="ngram"),
    Cell(layers="delta+full", dtype="int8", state="session", speculation="skip"),
    whole(where="engine_paged", layers="recurrent+full", state="prefix", speculation="skip"),
    Cell("h2o", layers="full+window", speculation="skip"),
)
ON_MESH = (
    Cell(layers="full+recurrent", devices="mesh", speculation="wrong"),
    Cell(layers="recurrent+full", devices="mesh", speculation="skip"),
    whole(where="engine_paged", dtype="int8", devices="mesh", speculation="wrong"),
)
# Refused when the object is made.
NOT_DRAFTED = (Cell(dtype="kivi4", speculation="ngram"),)


def speculation_of(cell):
    """What the generations of a cell are told, or None."""
    if cell.speculation == "none":
        return None
    of = {"ngram": PromptLookup(n_max=2, n_min=1), "skip": LayerSkip(exit_layer=1)}
    return Speculation(drafter=of.get(cell.speculation, Wrong(cell)), n_draft=N_DRAFT)


@dataclasses.dataclass
class Wrong:
    """Drafts what the oracle says of the text so far, but for one index."""

    cell: Cell
    n_asked: int = 0

    def check(self, n_vocab):
        assert n_vocab == plainmodel.N_VOCAB

    def draft(self, context, n):
        at, self.n_asked = N_DRAFT - self.n_asked % (N_DRAFT + 1), self.n_asked + 1
        seq = PlainSeq(self.cell, None, None)
        *held, newest = context.tokens.tolist()
        if held:
            seq.hold(held)
        drafts = []
        for i in range(n):
            newest = int(seq.step([newest])[-1].argmax())
            newest = (newest + 1) % plainmodel.N_VOCAB if i == at else newest
            drafts.append(newest)
        return drafts


def tokens_apart(step, *stays):
    """Where each part of a step's tokens begins, and how many they are: drafts are so many steps.

    Args:
      step: what of it stays.
      stays: of a step with drafts, which tokens.
    """
    for c in step.chunks:
        size = 1 if stays else c.n
        for start in range(c.start, c.start + c.n, size):
            yield c.state.request.id, (start, size)


def generate(at, n):
    """Has a `RuntimeHistory` generate tokens, which the oracle follows one at a time."""
    n_others = sum(len(x.rows) for x in at.seqs[1:])
    tokens = [t.id for t in at.made.generate(n, speculation=speculation_of(at.cell))]
    for i, token in enumerate(tokens):
        if at.last.max() - at.last[token] > 2 * at.judge.limit:
            raise Different(f"token {i} is {token}, wanted {at.last.argmax()}")
        if i < n - 1:
            at.seqs[0].make_room(1, at.n_ctx, n_others)
            at.last = at.seqs[0].step([token])[-1]
    at.append("behind the drafts", [tokens[-1]])
    stats = at.made.stats()
    check(at.cell, stats.n_rounds, stats.n_drafted, stats.n_accepted)


def check(cell, n_rounds, n_drafted, n_accepted):
    """Drafts have to have been made, and of wrong ones some and not all have to have stayed."""
    some = cell.speculation != "wrong" or 0 < n_accepted < n_drafted
    if cell.speculation != "none" and not (n_rounds and some):
        raise Different(f"{n_accepted} of {n_drafted} drafts in {n_rounds} rounds stayed")
