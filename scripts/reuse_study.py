"""What reuse over edits costs and saves: tokens computed, time, and what the answer loses.

    python -m scripts.reuse_study
    python -m scripts.reuse_study --n_pieces 12 --plot docs/plots/reuse.png

A text of --n_pieces pieces of a play, paragraphs of about --n_piece tokens, is in a session, and
each piece beside it as a chunk that was computed alone. Then the text is edited: a piece is
inserted, one deleted, one replaced, two exchanged; --n_question tokens of the play follow. The
edited text is read in four ways: all of it ("full"), what lies behind the first difference
("prefix"), what no common run of both texts holds ("moved": `plan_reuse(chunks=True)`), and as
chunks of which 15 % and the new piece are computed ("blended"). One JSON line an edit and a way:
tokens computed, those of some layers counted in parts; seconds, the better of two; divergence (KL,
in nats) from "full" over the question's tokens, mean of the plays.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from absl import flags

from kvrt import BlendSpec, CacheConfig, CachedChunk, Runtime
from kvrt.cells.edits import Remove, Shift
from kvrt.reuse.plan import operations, plan_reuse
from kvrt.session.snapshot import Snapshot
from kvrt_models.load import Model, load
from scripts._lib import commands, measure
from scripts.experiments import divergence, plots, texts

_MODEL = flags.DEFINE_string("model", "smollm2-135m", "Known name, file or folder.")
_N_PIECES = flags.DEFINE_integer("n_pieces", 8, "Pieces of the text.", lower_bound=6)
_N_PIECE = flags.DEFINE_integer("n_piece", 120, "Tokens of a piece, at least.", lower_bound=8)
_N_QUESTION = flags.DEFINE_integer("n_question", 50, "Tokens behind it.", lower_bound=2)
_N_TEXTS = flags.DEFINE_integer("n_texts", 3, "Plays.", lower_bound=1, upper_bound=3)
_PLOT = flags.DEFINE_string("plot", None, "File for a picture.")

Ids = list[int]
_SPEC = BlendSpec()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """One text, in a session and as chunks.

    Attributes:
      lead: BOS, if the model has one.
      pieces: of the text, and behind them those that an edit brings.
      question: tokens behind the text.
      held: the session.
      chunks: the text's pieces, each computed alone.
      n_layers: of the model.
    """

    lead: Ids
    pieces: list[Ids]
    question: Ids
    held: Snapshot
    chunks: list[CachedChunk]
    n_layers: int


# Which pieces the edited text has; numbers from n on are new ones.
EDITS: Mapping[str, Callable[[int], list[int]]] = {
    "inserted": lambda n: [0, 1, n, *range(2, n)],
    "deleted": lambda n: [0, 1, *range(3, n)],
    "replaced": lambda n: [0, 1, n, *range(3, n)],
    "exchanged": lambda n: [0, 1, 4, 3, 2, *range(5, n)],
}


def main() -> None:
    found = run()
    if _PLOT.value:
        plot(found, _PLOT.value)


def run() -> list[dict[str, Any]]:
    """All edits in all ways; the figures, as they were printed."""
    model, out = load(_MODEL.value, dtype="f32"), []
    n_most = 3 * (_N_PIECES.value + 1) * _N_PIECE.value + _N_QUESTION.value
    config = CacheConfig(
        n_ctx=-(-n_most // 256) * 256, n_seq_max=2, swa_full=True, type_k="f32", type_v="f32"
    )
    runtime = Runtime(model.decoder, config)
    studies = [study(runtime, model, name) for name in list(texts.PLAYS)[: _N_TEXTS.value]]
    for edit, order in EDITS.items():
        exact: list[np.ndarray] = []
        for name, way in WAYS.items():
            results = [read(runtime, one, order(_N_PIECES.value), way) for one in studies]
            exact = exact or [logits for *_, logits in results]
            kls = [divergence.mean_kl(a, b) for a, (*_, b) in zip(exact, results, strict=True)]
            n, seconds = ([float(x[i]) for x in results] for i in (0, 1))
            figures = {"computed": np.mean(n), "seconds": np.mean(seconds), "kl": np.mean(kls)}
            rounded = {k: float(f"{v:.3g}") for k, v in figures.items()}
            out.append(measure.emit("reuse over edits", edit=edit, way=name, **rounded))
    return out


def study(runtime: Runtime, model: Model, play: str) -> Study:
    """A play's paragraphs as pieces, the text in a session, and its pieces as chunks."""
    pieces: list[Ids] = [[]]
    tokenizer = model.tokenizer
    for paragraph in texts.play(play).split("\n\n")[40:]:
        if len(pieces[-1]) >= _N_PIECE.value:
            pieces.append([])
        if len(pieces) > _N_PIECES.value + 2:
            break
        pieces[-1] += tokenizer.encode(paragraph + "\n\n", add_special=False)
    *pieces, rest = pieces[: _N_PIECES.value + 2]
    lead = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    runtime.clear()
    chunks = [runtime.chunk(piece, lead) for piece in pieces[: _N_PIECES.value]]
    runtime.append([*lead, *(t for piece in pieces[: _N_PIECES.value] for t in piece)])
    question = rest[: _N_QUESTION.value]
    n_layers = sum(len(g.layers) for g in model.spec.groups)
    held = runtime.snapshot()
    return Study(
        lead=lead, pieces=pieces, question=question, held=held, chunks=chunks, n_layers=n_layers
    )


def read(
    runtime: Runtime, one: Study, order: list[int], way: "Way"
) -> tuple[float, float, np.ndarray]:
    """Tokens computed, seconds of the better of two, and logits of the question's tokens."""
    seconds, n, logits = float("inf"), 0.0, np.zeros(0)
    for _ in range(2):
        runtime.restore(one.held)
        jax.block_until_ready(runtime.cache.cells[0].pos)
        start = time.perf_counter()
        n, found = way(runtime, one, order)
        logits = np.asarray(found)
        seconds = min(seconds, time.perf_counter() - start)
    return n, seconds, logits


def full(runtime: Runtime, one: Study, order: list[int]) -> tuple[float, jax.Array]:
    """The whole prompt, into an empty cache."""
    runtime.clear()
    return _append(runtime, _prompt(one, order), one)


def prefix(runtime: Runtime, one: Study, order: list[int]) -> tuple[float, jax.Array]:
    """What lies behind the first difference."""
    return _planned(runtime, one, order, chunks=False)


def moved(runtime: Runtime, one: Study, order: list[int]) -> tuple[float, jax.Array]:
    """What lies in no common run; the others go to where they stand now."""
    return _planned(runtime, one, order, chunks=True)


def blended(runtime: Runtime, one: Study, order: list[int]) -> tuple[float, jax.Array]:
    """Chunks, of which some tokens are computed again; a new piece becomes one."""
    runtime.clear()
    new = {i: runtime.chunk(one.pieces[i], one.lead) for i in order if i >= len(one.chunks)}
    chunks = [new[i] if i in new else one.chunks[i] for i in order]
    first, *rest = one.question
    found = runtime.blend(chunks, [first], _SPEC)
    logits = runtime.append(rest, out_ids=range(len(rest)))
    whole = (_SPEC.check_layer + 1) / one.n_layers
    n = whole * found.n_reused + (1 - whole) * len(found.computed) + len(one.question)
    return n + sum(len(x.tokens) for x in new.values()), logits


Way = Callable[[Runtime, Study, list[int]], tuple[float, jax.Array]]
WAYS: Mapping[str, Way] = {"full": full, "prefix": prefix, "moved": moved, "blended": blended}


def plot(found: list[dict[str, Any]], path: str) -> None:
    """Divergence over tokens computed: a colour a way, a marker an edit."""
    with plots.panels(path, figsize=(6, 4), layout="constrained") as (_, ((axes,),)):
        for n_way, way in enumerate(WAYS):
            for marker, edit in zip("os^D", EDITS, strict=True):
                lines = [x for x in found if x["way"] == way and x["edit"] == edit]
                at = [x["computed"] for x in lines], [x["kl"] for x in lines]
                label = edit if n_way == 0 else None
                axes.plot(*at, marker, color=f"C{n_way}", label=label)
            axes.plot([], [], "-", color=f"C{n_way}", label=way)
        axes.set(xlabel="tokens computed", ylabel="KL from full, nats")
        axes.set_yscale("symlog", linthresh=1e-3)
        axes.legend()


def _prompt(one: Study, order: list[int]) -> Ids:
    return [*one.lead, *(t for i in order for t in one.pieces[i]), *one.question]


def _append(runtime: Runtime, ids: Ids, one: Study) -> tuple[float, jax.Array]:
    """Appends tokens that end with the question; logits of all of it but the first."""
    n = len(one.question) - 1
    return float(len(ids)), runtime.append(ids, out_ids=range(len(ids) - n, len(ids)))


def _planned(
    runtime: Runtime, one: Study, order: list[int], *, chunks: bool
) -> tuple[float, jax.Array]:
    ids, n = _prompt(one, order), 0
    plan = plan_reuse(runtime.token_history(), ids, chunks=chunks, at=runtime.resume_positions())
    spans = []
    for op in operations(plan):
        if isinstance(op, Remove):
            runtime.seq_rm(0, op.p0, op.p1)
        elif isinstance(op, Shift):
            runtime.seq_add(0, op.p0, op.p1, op.d)
        else:
            spans.append((op.start, op.end))
    *holes, (start, end) = spans
    for first, last in holes:
        runtime.fill(ids[first:last], 0, first)
        n += last - first
    n_last, logits = _append(runtime, ids[start:end], one)
    return n + n_last, logits


if __name__ == "__main__":
    commands.run(main)
