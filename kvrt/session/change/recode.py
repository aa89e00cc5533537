"""Keys and values of a session in another dtype, or with their channels in another order."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from kvrt.errors import UsageError
from kvrt.kv_types import CODECS, KVDtype
from kvrt.session.kv_arrays import KVKind, on_host, stored
from kvrt.store import codec, hadamard
from kvrt.store.codec import AnyKVArray, Quantized

_encode = jax.jit(codec.encode, static_argnums=2)
_decode = jax.jit(codec.decode, static_argnums=1)


def converted(kv: AnyKVArray, old: KVKind, new: KVKind, group: int) -> AnyKVArray:
    """Keys or values of one kind as another.

    Raises:
      UsageError: a value has no finite counterpart in the type.
      BadConfig: the type's groups do not fill a head.
    """
    if old == new:
        return on_host(kv)
    wide = _wide(kv)
    if old.n_hadamard != new.n_hadamard:
        wide = hadamard.transform(jnp.asarray(wide), old.n_hadamard)
        wide = hadamard.transform(wide, new.n_hadamard)
    if new.type in CODECS:
        out = on_host(_encode(wide, _like(new.type, wide.shape[-1]), -1))
    else:
        with np.errstate(over="ignore"):
            dtype = ml_dtypes.bfloat16 if new.type == "bf16" else stored(new.type)
            out = np.asarray(wide).astype(dtype)
        out = out.view(np.uint16) if new.type == "bf16" else out
    _check_held(np.asarray(wide), out, new.type, group)
    return out


def _wide(kv: AnyKVArray) -> np.ndarray:
    """Keys or values in float32 on the host; only quantized ones need a program, one a shape."""
    kv = on_host(kv)
    if isinstance(kv, Quantized):
        return np.asarray(_decode(kv, -1))
    x = np.asarray(kv)
    return (x.view(ml_dtypes.bfloat16) if x.dtype == np.uint16 else x).astype(np.float32)


@functools.cache
def _like(kv_dtype: KVDtype, n_channels: int) -> codec.KVArray:
    return codec.zeros(kv_dtype, (1, 1, 1, n_channels), 3)


def _check_held(wide: np.ndarray, out: AnyKVArray, kv_dtype: KVDtype, group: int) -> None:
    """Refuses what the dtype made infinite, or cut off."""
    most = float(np.abs(wide).max(initial=0.0))
    if not np.isfinite(most):
        return
    held = np.isfinite(_wide(out)).all()
    if isinstance(out, Quantized) and out.scale.dtype == np.float16:
        held = held and most <= float(np.finfo(np.float16).max)
    if not held:
        raise UsageError(
            f"group {group} holds values up to {most:g}, which {kv_dtype} cannot hold; convert to "
            "bf16"
        )


def reordered(kv: AnyKVArray, order: np.ndarray, n_hadamard: int) -> AnyKVArray:
    """Keys with channels in another order; quantized again, for their groups are others.

    Args:
      kv: on the host.
      order: which channel stands where.
      n_hadamard: size of the Hadamard transform before they were quantized, 0 for none.
    """
    if not isinstance(kv, Quantized):
        return np.asarray(kv)[..., order]
    plain = hadamard.transform(_decode(kv, -1), n_hadamard)[..., order]
    return on_host(_encode(hadamard.transform(plain, n_hadamard), kv, -1))
