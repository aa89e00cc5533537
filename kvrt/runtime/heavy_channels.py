"""Calibration of Double Sparsity: which channels of each layer and kv head scores come from."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import jax.numpy as jnp
import numpy as np
from msgspec import Meta

from kvrt.arrays import Array, Float
from kvrt.attention.types import AttendArgs
from kvrt.cells.slots import Places
from kvrt.errors import BadConfig
from kvrt.files import kinds
from kvrt.files.typed_json import read_typed
from kvrt.options.cache import CacheConfig
from kvrt.options.select import Channels
from kvrt.program import step
from kvrt.program.batch import Batch
from kvrt.program.device import dispatched
from kvrt.program.layers.by_layer import StepByLayer
from kvrt.program.layers.taps import look
from kvrt.program.layout import Layout, cell_layout
from kvrt.program.programs import Programs
from kvrt.program.step import StepSpec


def heavy_channels(
    model: Any, texts: Sequence[Sequence[int]], n_channels: int
) -> tuple[Channels, str]:
    """The channels with the greatest mean |q * k| at the same token, ascending, by layer and head.

    A kv head counts all its query heads. Layers that keep no keys have none. Take other texts than
    those that are judged later: some thousand tokens in pieces of 512 will do.

    Args:
      model: a `kvrt.attention.Decoder`.
      texts: tokens of each piece, of one length.
      n_channels: channels a head (r); a quarter of a head keeps what reads find, see
        docs/methods.md.

    Returns:
      `DoubleSparsity.channels`, and the digest of the parameters that they belong to.

    Raises:
      BadConfig: pieces of several lengths or none, or more channels than a head has.

    Source: arXiv:2408.07092, sec. 3.2.
    """
    sizes = {len(text) for text in texts}
    if len(sizes) != 1 or 0 in sizes:
        raise BadConfig("calibration takes pieces of one length, at least one of one token")
    (size,) = sizes
    least = min(g.head_dim for g in model.groups)
    if not 0 < n_channels <= least:
        raise BadConfig(f"{n_channels} channels a head are wanted, heads have {least}; fewer")
    config = CacheConfig(n_ctx=size, attention="chunked", swa_full=True, type_k="f32", type_v="f32")
    layout = cell_layout(model.groups, model.recurrent, config)
    spec = StepSpec(config, layout)
    programs = Programs(model, spec)
    by_layer = dispatched(model, config, is_divided=False)[0] == "by_layer"
    layers = StepByLayer(programs) if by_layer else None
    totals: dict[int, np.ndarray] = {}
    for text in texts:
        batch = _batch(layout, np.asarray(text, np.int32))
        found = look(programs, layers, step.create(spec), batch, products)
        for layer, sums in found.items():
            # sync: a few numbers a piece of text.
            totals[layer] = totals.get(layer, 0) + np.asarray(sums, np.float64)
    none = ((0,),) * max(len(x) for x in totals.values())
    return tuple(
        _greatest(totals[i], n_channels) if i in totals else none for i in range(max(totals) + 1)
    ), programs.weights_digest


def products(args: AttendArgs) -> Float[Array, "H D"]:
    """Sums of |q * k| of tokens, both rotated, by channel."""
    qkv = args[0]
    n_tokens, n_heads, d = qkv.k.shape
    by_head = jnp.sum(jnp.abs(qkv.q).reshape(n_tokens, n_heads, -1, d), axis=2)
    return jnp.sum(by_head * jnp.abs(qkv.k), axis=0, dtype=jnp.float32)


def _greatest(sums: np.ndarray, n: int) -> tuple[tuple[int, ...], ...]:
    order = np.argsort(-sums, axis=1, kind="stable")[:, :n]
    return tuple(tuple(sorted(map(int, head))) for head in order)


def _batch(layout: Layout, tokens: np.ndarray) -> Batch:
    """A step of a text that nothing comes before."""
    n = len(tokens)
    slots = np.arange(n, dtype=np.int32)
    places = tuple(
        Places(
            slots=slots,
            blocks=np.zeros(s.extent.n_blocks, np.int32),
            n_blocks=np.asarray(0, np.int32),
        )
        for s in (layout.stores[i] for i in layout.store_of)
    )
    return Batch(
        tokens=tokens,
        pos=slots,
        seq_ids=np.zeros(n, np.int32),
        places=places,
        states=None,
        out_ids=slots[:1],
    )


def write_channels(path: str, channels: Channels, weights: str) -> None:
    """Writes what `heavy_channels` found as JSON, in place of an older file of the same kind.

    Raises:
      UsageError: the path holds another kind of file.
      SaveError: it cannot be written.
    """
    found = {"kind": "kvrt heavy channels, 1", "weights": weights, "channels": channels}
    data = json.dumps(found).encode()
    kinds.write_whole(path, data, kinds.CHANNELS)


def read_channels(path: str) -> tuple[Channels, str]:
    """What `write_channels` wrote.

    Raises:
      BadConfig: the file cannot be read, or has something else.
    """
    found = read_typed(_File, path, "heavy channels, which scripts.calibrate_channels makes")
    return found.channels, found.weights


@dataclasses.dataclass(frozen=True)
class _File:
    kind: Literal["kvrt heavy channels, 1"]
    weights: str
    channels: Annotated[
        tuple[Annotated[tuple[tuple[int, ...], ...], Meta(min_length=1)], ...], Meta(min_length=1)
    ]
