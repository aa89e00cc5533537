"""Writes prompt caches that mlx-lm reads; see `mlx` for their parts."""

import json
import math
import struct
from collections.abc import Mapping, Sequence
from io import BufferedIOBase
from typing import Any

import numpy as np

from kvrt.cellcache.history import entries
from kvrt.config import GroupSpec
from kvrt.errors import SessionMismatch
from kvrt.session import owners
from kvrt.session.interop import foreign
from kvrt.session.interop.foreign import DTYPES
from kvrt.session.interop.mlx_read import KIND, KV_DTYPES, TOKENS, check_shared_format, places
from kvrt.session.interop.rotated_keys import with_rotated_keys
from kvrt.session.snapshot import GroupPart, Snapshot

_CODES = {name: code for code, name in KV_DTYPES.items()}


def write(
    file: BufferedIOBase,
    snapshot: Snapshot,
    groups: Sequence[GroupSpec],
    *,
    arch: str,
    seq_id: int | None = None,
    notes: Mapping[str, str] | None = None,
    old: bool = False,
) -> None:
    """Writes one sequence as a prompt cache, in the dtypes of its keys and values, with its tokens.

    Args:
      file: open for writing; all checks come before the first byte.
      snapshot: what is written.
      groups: of the model.
      arch: the model's architecture, of the llama family.
      seq_id: the sequence; None is the only one.
      notes: metadata of the user, e.g. mlx-lm's own `model` and `tokenizer_config`.
      old: for an mlx-lm before 0.32.

    Raises:
      UsageError: which sequence is wanted is not said, or it is empty.
      SessionMismatch: mlx-lm has no such cache, or the positions are not 0, 1, 2 and so on.
    """
    check_shared_format(snapshot.fingerprint, groups, arch)
    snapshot = with_rotated_keys(snapshot, groups, "a prompt cache of mlx-lm")
    chosen = foreign.chosen(snapshot, seq_id, whole=False)
    assert chosen is not None
    ids = _ids(snapshot, chosen)
    types = [foreign.kv_dtype(snapshot, which, _CODES, "mlx-lm") for which in ("type_k", "type_v")]
    header = {"__metadata__": _metadata(groups, ids, notes or {}, old=old)}
    header |= _header(groups, types, len(ids), old=old)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for _, g, layer in places(groups):
        for values in (False, True):
            kv = _of_layer(snapshot.groups[g], groups[g], layer, chosen, values=values)
            file.write(np.ascontiguousarray(kv).tobytes())
    if not old:
        file.write(struct.pack("<i", len(ids)) * len(places(groups)))


def _header(
    groups: Sequence[GroupSpec], types: Sequence[str], n: int, *, old: bool
) -> dict[str, Any]:
    """Type, shape and place of every tensor."""
    made: dict[str, Any] = {}
    end = 0

    def add(name: str, code: str, shape: list[int], itemsize: int) -> None:
        nonlocal end
        start, end = end, end + math.prod(shape) * itemsize
        made[name] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}

    for layer, g, _ in places(groups):
        for i, name in enumerate(types):
            shape = [1, groups[g].n_kv_heads, n, groups[g].head_dim]
            add(f"{layer}.{i}", _CODES[name], shape, DTYPES[name].itemsize)
    for layer, _, _ in [] if old else places(groups):
        add(f"{layer}.2", "I32", [], 4)
    return made


def _metadata(
    groups: Sequence[GroupSpec], ids: Sequence[int], notes: Mapping[str, str], *, old: bool
) -> dict[str, str]:
    layers = [layer for layer, _, _ in places(groups)]
    noted = {**notes, TOKENS: json.dumps(ids)}
    if old:
        made = {f"0.{layer}": "" for layer in layers} | {f"2.{layer}": KIND for layer in layers}
        return made | {f"1.{key}": x for key, x in noted.items()}
    made = {f"0.{key}": x for key, x in noted.items()} | {f"1.{layer}": KIND for layer in layers}
    made["2.0"] = ""
    for i, layer in enumerate(layers, 1):
        made |= {f"2.{i}.0": f"{layer}.2", f"2.{i}.1": "scalar"}
    return made


def _ids(snapshot: Snapshot, seq_id: int) -> list[int]:
    """Tokens of a sequence, whose cells must stand at 0, 1, 2 and so on."""
    held = entries(snapshot.history, seq_id)
    wanted = np.arange(held.shape[1])
    for part in snapshot.groups:
        owned = owners.owners_of(part.pos, part.seqs)
        found = owned.pos[owned.of(seq_id)]
        if not (np.array_equal(found, wanted) and np.array_equal(held[0], wanted)):
            raise SessionMismatch(
                f"{len(found)} cells and {len(wanted)} tokens of sequence {seq_id} do not stand at "
                "0, 1, 2 and so on; mlx-lm has no other positions"
            )
    return held[1].tolist()


def _of_layer(
    part: GroupPart, group: GroupSpec, layer: int, seq_id: int, *, values: bool
) -> np.ndarray:
    """Keys or values of a sequence in a layer, `[H, n, D]`, by position."""
    cells = owners.owners_of(part.pos, part.seqs).of(seq_id)
    found = [np.asarray(block.v if values else block.k)[layer] for block in part.blocks]
    kv = np.concatenate(found)[cells].swapaxes(0, 1)
    order = (
        None if values or group.rope is None else foreign.order(group.rope.layout, "neox", group)
    )
    return kv if order is None else kv[..., order]
