"""Tile sizes that were measured, by device and kind of work; kernels look them up when traced.

`tiles.json` beside this file is the table; `python -m scripts.gpu_day` finds what goes into it.
What it has no entry for is cut by the kernel's own rule, which knows only shapes.
"""

import dataclasses
import functools
import importlib.resources
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kvrt.attention.pallas.common import KernelWork
from kvrt.errors import BadConfig
from kvrt.kv_types import CODECS, FLOAT_DTYPES
from kvrt.store.codec import KVArray, Quantized

_FORMAT, _ROOM = 1, "kvrt.attention.pallas"
_DTYPES = {dtype: name for name, dtype in FLOAT_DTYPES.items()} | {"uint16": "bf16"}
_CODECS = {codec: name for name, codec in CODECS.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
    """What tile sizes are measured for: rotated keys, any mask, any number of sequences.

    Attributes:
      kernel: module of `kvrt.attention.pallas`, as "gpu".
      device: what JAX calls the device's kind.
      type_q: float type of the queries.
      type_k: KV dtype of keys.
      type_v: KV dtype of values.
      head_dim: channels of a head.
      block_size: cells of a block.
      step: "decode" where each list has one token, else "prefill".
    """

    kernel: str
    device: str
    type_q: str
    type_k: str
    type_v: str
    head_dim: int
    block_size: int
    step: str


# Sizes by what they are for; a kernel says which names it knows.
Sizes = Mapping[str, int]
Table = Mapping[Key, Sizes]


def measured_sizes(
    kernel: str, work: KernelWork, keys: KVArray, values: KVArray, table: Table | None = None
) -> Sizes:
    """Measured sizes for some work, none where the table lacks them.

    Args:
      kernel: as in `Key`.
      work: block lists with their queries.
      keys: of the layer, rotated.
      values: of the layer.
      table: in place of the one that kvrt comes with.
    """
    table = packaged_table() if table is None else table
    return table.get(table_key(kernel, work, keys, values), {}) if table else {}


def table_key(kernel: str, work: KernelWork, keys: KVArray, values: KVArray) -> Key:
    """What some work is looked up as."""
    return Key(
        kernel=kernel,
        device=device_kind(),
        type_q=_name(work.q),
        type_k=_name(keys),
        type_v=_name(values),
        head_dim=work.q.shape[3],
        block_size=work.cell_pos.shape[1],
        step="decode" if work.n_tokens == 1 else "prefill",
    )


def device_kind() -> str:
    """Kind of the device that is traced for, described by a mesh or present."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    return described.device_kind if described else jax.devices()[0].device_kind


@functools.cache
def packaged_table() -> Table:
    """The table that kvrt comes with."""
    return parse_table(importlib.resources.files(_ROOM).joinpath("tiles.json").read_text())


def parse_table(text: str) -> Table:
    """A table from its file.

    Raises:
      BadConfig: it is none, or of another format.
    """
    try:
        held = json.loads(text)
        if held["format"] != _FORMAT:
            raise ValueError(f"format {held['format']}, {_FORMAT} wanted")
        return {Key(**entry["key"]): _sizes(entry["sizes"]) for entry in held["tiles"]}
    except (ValueError, KeyError, TypeError) as error:
        raise BadConfig(f"no table of tile sizes: {error}; make it with scripts.gpu_day") from error


def table_text(table: Table, notes: Mapping[Key, str] | None = None) -> str:
    """A table as its file, an entry a line, with notes on where its figures come from."""
    lines = []
    for at in sorted(table, key=dataclasses.astuple):
        entry: dict[str, Any] = {"key": dataclasses.asdict(at), "sizes": dict(table[at])}
        if notes and at in notes:
            entry["note"] = notes[at]
        lines.append(json.dumps(entry))
    inner = "\n  " + ",\n  ".join(lines) + "\n" if lines else ""
    return f'{{"format": {_FORMAT}, "tiles": [{inner}]}}\n'


def check_names(sizes: Sizes, known: Sequence[str]) -> None:
    """Refuses sizes that a kernel does not know.

    Raises:
      BadConfig: there are others.
    """
    strange = sorted(set(sizes) - set(known))
    if strange:
        raise BadConfig(f"tile sizes {', '.join(strange)} are unknown; of {', '.join(known)}")


def _sizes(found: Any) -> dict[str, int]:
    if not all(isinstance(n, int) and n > 0 for n in found.values()):
        raise ValueError(f"sizes {found}; whole numbers above 0 wanted")
    return dict(found)


def _name(x: KVArray) -> str:
    if isinstance(x, Quantized):
        return _CODECS.get(x.codec, f"{x.codec.bits} bits")
    return _DTYPES[jnp.dtype(x.dtype).name]
