"""A look at what layers compare in a step of which nothing is written."""

from kvrt.arrays import Array
from kvrt.attention.scored.tapped import Tap, TappedAttend
from kvrt.attention.step_attention import StepAttention
from kvrt.program.batch import Batch
from kvrt.program.layers.by_layer import Arrays, StepByLayer, embed_step, tapped_layers
from kvrt.program.programs import ModelKind, Program, Programs
from kvrt.program.step import Cache, in_place


def look(
    programs: Programs, layers: StepByLayer | None, cache: Cache, batch: Batch, tap: Tap
) -> dict[int, Array]:
    """What a tap makes of each layer that keeps keys and values.

    Args:
      programs: of the model and the cache.
      layers: the programs of a step; None is one program.
      cache: stays as it is.
      batch: tokens, which do not see what their slots have.
      tap: a function of a module, for it is part of what programs are known by.
    """
    if layers is None:
        args = programs.params, cache, batch
        return programs.run(Program(tapped_step, (programs.kind, tap), args, n_known=2))
    arrays = Arrays(cache, programs.run)
    args = arrays.cells, layers.rest, batch
    x, _, batch = programs.run(Program(embed_step, (layers.kind,), args, n_known=2))
    runs = layers.split(layers.exit)[0]
    return layers.run(arrays, batch, x, runs, tapped_layers, tap).stream.seen


def tapped_step(
    kind: ModelKind, tap: Tap, params: tuple, cache: Cache, batch: Batch
) -> dict[int, Array]:
    """`look` as one program."""
    model, seen = kind.model(params), dict[int, Array]()

    def tapped(tokens: Array, attend: StepAttention) -> Array:
        shown = TappedAttend(attend, tap)
        logits = model(tokens, shown, batch.out_ids)
        seen.update(shown.seen)
        return logits

    in_place(tapped, cache, batch, kind.spec)
    return seen
