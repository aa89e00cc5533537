"""Two defects of jaxlib 0.10.2 on CPU, looked for in optimized HLO: ours may have neither.

Both are of what XLA hands to YNNPACK as one piece, a `__ynn_fusion`:

- jax issue 39103: a product and a sum over its result in one piece. From 32,769 outputs on, those
  beyond the last whole 32,768 are wrong without a word (0.10.1 computes them right). XLA makes
  such a piece where 4,096 numbers or more are summed, so that small programs have none.
- jax issues 39257 and 40412: arrays of seven dimensions and more: the process hangs or dies
  (0.10.1 does not; 0.11.0 does).
"""

import functools

import jax
from jax.stages import Compiled, Lowered

from tests import hlo

MOST_DIMENSIONS = 6
# Of later versions nobody has looked whether such a piece is still computed wrongly.
FUSED_SUMS = (0, 10, 2) <= jax.__version_info__ < (0, 11)


class DefectiveProgram(AssertionError):
    """A program that jaxlib may compute wrongly, or never."""


def found(text: str) -> list[str]:
    """The pieces of a program that may go wrong, and why; a line each."""
    wrong = []
    for name, parts in hlo.pieces(text, "__ynn_fusion"):
        ops = {x.op for x in parts}
        rank = max(len(x.shape) for x in parts)
        if FUSED_SUMS and {"dot", "reduce"} <= ops:
            wrong.append(f"{name} sums a product in one piece (jax issue 39103)")
        if rank > MOST_DIMENSIONS:
            wrong.append(f"{name} has {rank} dimensions (jax issue 39257)")
    return wrong


def refuse(text: str) -> None:
    """Raises DefectiveProgram where a program has one of the defects."""
    if wrong := found(text):
        raise DefectiveProgram("; ".join(wrong))


def searched(compiling):
    """`Lowered.compile`, or what takes its place, whose programs are searched."""

    @functools.wraps(compiling)
    def compiled(self: Lowered, *args, **rest) -> Compiled:
        program = compiling(self, *args, **rest)
        refuse(program.as_text() or "")
        return program

    return compiled
