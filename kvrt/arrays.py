"""Axis letters, the `@state` decorator and the few array helpers that both worlds share.

JAX is imported by whoever makes a state, or names `Array`: commands that only look at files do
without it.

Axes: L layer, C cell, T token in a step, S sequence, H kv head, G query heads a kv head, D head
dim, N block, B cell in a block, W mask words a cell, R output rows, V vocabulary, M moves.
"""

import dataclasses
import math
import sys
import typing
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
from jaxtyping import Bool, Float, Float16, Int, Int32, Shaped, UInt8, UInt32

if TYPE_CHECKING:
    from jax import Array as DeviceArray
    from jaxtyping import Array
else:

    class _IsDeviceArray(type):
        """What is an array of JAX, or stands for one in jit."""

        def __instancecheck__(cls, x):
            # Before JAX is imported nothing is.
            jax = sys.modules.get("jax")
            return jax is not None and isinstance(x, jax.Array)

    class DeviceArray(metaclass=_IsDeviceArray):
        """`jax.Array` in annotations of modules that need not import JAX."""


__all__ = [
    "AnyArray",
    "Array",
    "Bool",
    "DeviceArray",
    "Float",
    "Float16",
    "Int",
    "Int32",
    "Shaped",
    "TokenIds",
    "UInt8",
    "UInt32",
    "array_bytes",
    "bytes_of",
    "is_host",
    "namespace",
    "put",
    "state",
]

# Host plans hold NumPy arrays, device state holds JAX arrays; the functions of `cells` take both.
AnyArray = np.ndarray | DeviceArray
# Ids of tokens as callers give them; steps have them as int32[T].
TokenIds = Sequence[SupportsIndex] | Int[AnyArray, " n"]


@typing.dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,)
)
def state(cls: type) -> Any:
    """Frozen, keyword-only dataclass registered as a pytree; metadata `static` marks aux data."""
    import jax

    cls = dataclasses.dataclass(frozen=True, kw_only=True, slots=True)(cls)
    return typing.no_type_check(jax.tree_util.register_dataclass(cls))


def array_bytes(tree: Any) -> int:
    """Bytes of all arrays of a pytree, or of what shapes stand for."""
    import jax

    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def bytes_of(create: Callable[[], Any]) -> int:
    """Bytes of the arrays that a function would create; none is."""
    import jax

    return array_bytes(jax.eval_shape(create))


def namespace(x: AnyArray) -> Any:
    """The array API namespace of x: numpy on the host, jax.numpy on the device and in jit."""
    return x.__array_namespace__()


def is_host(x: AnyArray) -> bool:
    """True for NumPy arrays, whose values can be checked before anything is dispatched."""
    return isinstance(x, np.ndarray)


def put(x: AnyArray, index: AnyArray, value: Any) -> AnyArray:
    """X with `value` at `index` of axis 0; an index equal to the axis size is padding, dropped."""
    if isinstance(x, np.ndarray):
        out = x.copy()
        keep = index < x.shape[0]
        out[index[keep]] = value[keep] if np.ndim(value) else value
        return out
    return x.at[index].set(value, mode="drop")


def __getattr__(name: str) -> Any:
    if name != "Array":
        raise AttributeError(f"module 'kvrt.arrays' has no attribute {name!r}")
    import jax

    return jax.Array
