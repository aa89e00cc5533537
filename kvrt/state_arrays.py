"""Arrays of the states that some layers keep a sequence; `RecurrentSpec` names them."""

import dataclasses
import itertools
from collections.abc import Sequence

from kvrt.errors import BadConfig
from kvrt.whole_numbers import Count


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateArray:
    """Shape of an array of a state, without the axis of states, and its NumPy dtype by name."""

    shape: tuple[Count, ...]
    dtype: str = "float32"


def check_state(
    layers: Sequence[int],
    shapes: Sequence[Sequence[int]],
    by_layer: Sequence[Sequence[StateArray]],
) -> None:
    """Refuses specs without layers, layers out of order and states of no size.

    Raises:
      BadConfig: as said.
    """
    _check(len(layers) > 0, "recurrent layers need at least one layer")
    _check(
        all(a < b for a, b in itertools.pairwise(layers)), f"recurrent layers {layers} must ascend"
    )
    if by_layer:
        n = len(by_layer)
        _check(not shapes, "shapes are those of all layers, by_layer of each; give one of the two")
        _check(n == len(layers), f"by_layer has states of {n} layers, {len(layers)} are recurrent")
    found = [list(shapes)] if not by_layer else [[x.shape for x in layer] for layer in by_layer]
    for layer in found:
        sizes = [size for shape in layer for size in shape]
        _check(len(layer) > 0, "recurrent layers need a state with at least one axis")
        _check(
            by_layer != () or len(sizes) > 0, "recurrent layers need a state with at least one axis"
        )
        _check(min(sizes, default=1) > 0, f"state shapes {tuple(layer)} must be above 0 everywhere")


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise BadConfig(message)
