"""A row for each tensor of a layer: what files call it, its shape, and how it is made."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvrt_models.families.shared.family import Family

# Makes a tensor of this shape of what a folder has; what does not fit is left, to be refused.
Make = Callable[[Sequence[np.ndarray], tuple[int, ...]], np.ndarray]
# `Layer.add`, perhaps with a `make` for all.
Add = Callable[..., None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor of a decoder.

    Attributes:
      shape: that it has, matrices as [outputs, inputs].
      gguf: what a GGUF calls it.
      called: what a folder calls it, or its parts; "{}" stands for the number of an expert.
      n_each: experts that have a tensor each.
      make: of the tensors of a folder, or of `joined`; None takes it as it is stored.
      joined: what a GGUF may have in its place, with its shape.
    """

    shape: tuple[int, ...]
    gguf: str
    called: tuple[str, ...]
    n_each: int = 0
    make: Make | None = None
    joined: tuple[str, tuple[int, ...]] | None = None

    @property
    def hf(self) -> list[str]:
        """What a folder calls it, or the tensors that it is made of."""
        if not self.n_each:
            return list(self.called)
        return [self.called[0].format(i) for i in range(self.n_each)]


class Layer:
    """Collects the tensors of a layer, or those that belong to none."""

    def __init__(self, family: Family, at: tuple[str, str], number: int = -1):
        """Takes the beginnings of its names in a GGUF and in a folder, and the layer's number."""
        self.family, self.at, self.number = family, at, number
        self.rows: dict[str, Tensor] = {}

    def add(
        self,
        kind: str,
        called: str | Sequence[str],
        *shape: int,
        ends: tuple[str, str] = (".weight", ".weight"),
        bias: bool = False,
        **how: Any,
    ) -> None:
        """Adds a tensor and, if it has one, its bias.

        Args:
          kind: its name in a GGUF without layer and end.
          called: its name in a folder, or names of its parts, unless the family has another.
          *shape: sizes.
          ends: what follows the names in a GGUF and in a folder.
          bias: there is a bias too, without the last axis.
          **how: fields of `Tensor`.
        """
        called = self.family.names.get(kind, called)
        parts = (called,) if isinstance(called, str) else tuple(called)
        gguf = f"{self.at[0]}{self.family.gguf_names.get(kind, kind)}{ends[0]}"
        named = tuple(f"{self.at[1]}{part}{ends[1]}" for part in parts)
        self.rows[f"{self.at[0]}{kind}{ends[0]}"] = Tensor(
            shape=shape, gguf=gguf, called=named, **how
        )
        if bias:
            end = "_bias" if not ends[1] else ".bias"
            self.add(kind, called, *shape[:-1], ends=(".bias", end), **how)


def reshaped(parts: Sequence[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """Parts of one size each, one below the other."""
    if {x.size * len(parts) for x in parts} != {math.prod(shape)}:
        return parts[0]
    rows = (shape[0] // len(parts), *shape[1:])
    x = [part.reshape(rows) for part in parts]
    return np.concatenate(x) if x[1:] else x[0]


def decays(parts: Sequence[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """Decays, of which a folder has the logarithm of the negative."""
    return -np.exp(reshaped(parts, shape))
