"""Reads and writes the prompt caches of mlx-lm, of models that are all full attention.

A cache is one safetensors file. `i.0` and `i.1` are keys and values of layer i, `[1, H, n, D]`, for
positions 0 to n - 1, keys turned to them. The metadata hold the tree of a list of three: what each
layer's class adds (`0.i`, empty), what the user noted (`1.name`), the classes (`2.i`). Tokens are
not in it; kvrt notes them as `1.kvrt_tokens`.

Source: mlx-lm `mlx_lm/models/cache.py`, save_prompt_cache and load_prompt_cache.
"""

import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from io import BufferedIOBase
from typing import Any

import numpy as np
import safetensors

from kvrt.cells.text import entries
from kvrt.config import GroupSpec
from kvrt.errors import BadSession, SessionMismatch
from kvrt.session import foreign, source
from kvrt.session.fingerprint import Fingerprint
from kvrt.session.foreign import DTYPES, Owned
from kvrt.session.llama_format import architecture
from kvrt.session.snapshot import GroupPart, Snapshot

ARCH = "llama"
TOKENS = "1.kvrt_tokens"
_KIND = "KVCache"
_MAX_HEADER_BYTES = 16 << 20
_KINDS = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
_CODES = {name: code for code, name in _KINDS.items()}


def read(
    path: str | os.PathLike[str],
    fingerprint: Fingerprint,
    groups: Sequence[GroupSpec],
    *,
    arch: str,
    n_vocab: int,
    tokens: Sequence[int] | None = None,
) -> Snapshot:
    """Reads a prompt cache as sequence 0; rows keep the file's type.

    Args:
      path: of the file.
      fingerprint: of the cache that will go on.
      groups: of the model.
      arch: the model's architecture, of the llama family.
      n_vocab: tokens of the model.
      tokens: what was evaluated; None where the file was written by `write`, which notes them.

    Raises:
      BadSession: the file is damaged or truncated, or the tokens do not fit it.
      SessionMismatch: it is of another model, or of a kind of cache that is not supported.
    """
    _check_model(fingerprint, groups, arch)
    name = str(path)
    with source.opened(path) as at:
        # The library checks offsets and sizes, and would read a header of any size.
        n_bytes = at.number("u8", "the header's size")
        at.need(n_bytes, "the header")
    if n_bytes > _MAX_HEADER_BYTES:
        raise BadSession(
            f"{name}: a header of {n_bytes:,} bytes, the limit is {_MAX_HEADER_BYTES:,}; the file "
            "is damaged, make it again"
        )
    try:
        with safetensors.safe_open(name, framework="numpy") as file:
            notes = file.metadata() or {}
            _check_kinds(name, notes, groups)
            n, types = _check_tensors(name, file, groups)
            parts = [_part(name, file, group, n, types) for group in groups]
    except (OSError, safetensors.SafetensorError) as error:
        raise BadSession(
            f"{name}: cannot be read: {' '.join(str(error).split())}; make it again"
        ) from error
    number = np.arange(n, dtype=np.int32)
    owned = Owned(pos=number, cell=number, seq=np.zeros(n, np.int32))
    ids = _noted(name, notes) if tokens is None else tokens
    return Snapshot(
        fingerprint={**fingerprint, "type_k": types[0], "type_v": types[1]},
        groups=tuple(parts),
        states=None,
        text=foreign.text(name, owned, ids, {}, n_vocab),
        ga_i={},
        logits={},
    )


def write(
    file: BufferedIOBase,
    snapshot: Snapshot,
    groups: Sequence[GroupSpec],
    *,
    arch: str,
    seq_id: int | None = None,
    notes: Mapping[str, str] | None = None,
) -> None:
    """Writes one sequence as a prompt cache, in the types of the rows, with its tokens.

    Args:
      file: open for writing; all checks come before the first byte.
      snapshot: what is written.
      groups: of the model.
      arch: the model's architecture, of the llama family.
      seq_id: the sequence; None is the only one.
      notes: metadata of the user, e.g. mlx-lm's own `model` and `tokenizer_config`.

    Raises:
      UsageError: which sequence is wanted is not said, or it is empty.
      SessionMismatch: mlx-lm has no such cache, or the positions are not 0, 1, 2 and so on.
    """
    _check_model(snapshot.fingerprint, groups, arch)
    chosen = foreign.chosen(snapshot, seq_id, whole=False)
    assert chosen is not None
    ids = _ids(snapshot, chosen)
    types = [_type(snapshot, which) for which in ("type_k", "type_v")]
    header: dict[str, Any] = {"__metadata__": _metadata(groups, ids, notes or {})}
    end = 0
    for layer, g, _ in _places(groups):
        shape = [1, groups[g].n_kv_heads, len(ids), groups[g].head_dim]
        for i, name in enumerate(types):
            start, end = end, end + math.prod(shape) * DTYPES[name].itemsize
            about = {"dtype": _CODES[name], "shape": shape, "data_offsets": [start, end]}
            header[f"{layer}.{i}"] = about
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for _, g, row in _places(groups):
        for values in (False, True):
            rows = _rows(snapshot.groups[g], groups[g], row, chosen, values=values)
            file.write(np.ascontiguousarray(rows).tobytes())


def _check_model(fingerprint: Fingerprint, groups: Sequence[GroupSpec], arch: str) -> None:
    foreign.refuse_frame(fingerprint, "a prompt cache of mlx-lm")
    if architecture(arch) != ARCH:
        raise SessionMismatch(
            f"prompt caches of mlx-lm are not supported for {arch!r}; only for the llama family"
        )
    if any(group.mask.kind != "full" for group in groups):
        raise SessionMismatch(
            "prompt caches of mlx-lm are not supported for layers with windows; only for full "
            "attention"
        )


def _places(groups: Sequence[GroupSpec]) -> list[tuple[int, int, int]]:
    """Layer, group and index in the group of every layer, ascending."""
    return sorted((x, g, row) for g, of in enumerate(groups) for row, x in enumerate(of.layers))


def _check_kinds(name: str, notes: Mapping[str, str], groups: Sequence[GroupSpec]) -> None:
    """Checks that every layer has a plain cache of its own."""
    kinds = {key: kind for key, kind in notes.items() if key.startswith("2.")}
    if not kinds:
        raise BadSession(f"{name}: names no classes of caches; give a file of mlx-lm's")
    for key, kind in kinds.items():
        if kind != _KIND:
            raise SessionMismatch(
                f"{name}: layer {key[2:]} is a {kind!r}, only {_KIND!r} is supported; make it "
                "without quantisation and without a limit on its size"
            )
    if set(kinds) != {f"2.{layer}" for layer, _, _ in _places(groups)}:
        raise SessionMismatch(
            f"{name}: caches of {len(kinds)} layers, the model has {len(_places(groups))}; take "
            "the model that made it"
        )


def _check_tensors(
    name: str, file: Any, groups: Sequence[GroupSpec]
) -> tuple[int, tuple[str, str]]:
    """How many positions there are, and the types of keys and values."""
    wanted = {f"{layer}.{i}": g for layer, g, _ in _places(groups) for i in (0, 1)}
    if set(file.keys()) != set(wanted):
        raise BadSession(
            f"{name}: {len(file.keys())} tensors that are not the {len(wanted)} of its layers; the "
            "file is damaged, make it again"
        )
    sizes, types = set(), (set(), set())
    for key, g in wanted.items():
        about = file.get_slice(key)
        shape, group = about.get_shape(), groups[g]
        if len(shape) != 4 or (shape[0], shape[1], shape[3]) != (
            1,
            group.n_kv_heads,
            group.head_dim,
        ):
            raise SessionMismatch(
                f"{name}: tensor {key} has shape {shape}, (1, {group.n_kv_heads}, n, "
                f"{group.head_dim}) is wanted; take the model that made it"
            )
        sizes.add(shape[2])
        types[int(key[-1])].add(about.get_dtype())
    if len(sizes) > 1 or any(len(found) > 1 for found in types):
        raise BadSession(f"{name}: layers differ in length or type; make the file again")
    found = [of.pop() for of in types]
    for code in found:
        if code not in _KINDS:
            raise SessionMismatch(
                f"{name}: rows of type {code} are not supported, only {', '.join(_KINDS)}"
            )
    return sizes.pop(), (_KINDS[found[0]], _KINDS[found[1]])


def _part(name: str, file: Any, group: GroupSpec, n: int, types: tuple[str, str]) -> GroupPart:
    """The cells and rows of a group."""
    shape = (len(group.layers), n, group.n_kv_heads, group.head_dim)
    k, v = (np.empty(shape, DTYPES[kind]) for kind in types)
    turn = group.rope and foreign.order("neox", group.rope.layout, group)
    for row, layer in enumerate(group.layers):
        for i, to in enumerate((k, v)):
            found = file.get_tensor(f"{layer}.{i}")
            foreign.check_finite(name, f"rows of layer {layer}", found)
            to[row] = found[0].swapaxes(0, 1)
    return GroupPart(
        n_cells=n,
        head=0,
        index=np.arange(n, dtype=np.int32),
        pos=np.arange(n, dtype=np.int32),
        seqs=np.ones((n, 1), np.uint32),
        lost={},
        blocks=foreign.blocks(k if turn is None else k[..., turn], v),
    )


def _noted(name: str, notes: Mapping[str, str]) -> list[int]:
    """Tokens that `write` has noted."""
    if TOKENS not in notes:
        raise BadSession(f"{name}: mlx-lm notes no tokens; give those that were evaluated")
    try:
        found = json.loads(notes[TOKENS])
    except (ValueError, RecursionError) as error:
        raise BadSession(f"{name}: its tokens are no list; make the file again") from error
    if not isinstance(found, list) or not all(type(x) is int and abs(x) < 2**31 for x in found):
        raise BadSession(f"{name}: its tokens are no list of numbers; make the file again")
    return found


def _metadata(
    groups: Sequence[GroupSpec], ids: Sequence[int], notes: Mapping[str, str]
) -> dict[str, str]:
    layers = [layer for layer, _, _ in _places(groups)]
    out = {f"0.{layer}": "" for layer in layers} | {f"2.{layer}": _KIND for layer in layers}
    return out | {f"1.{key}": x for key, x in notes.items()} | {TOKENS: json.dumps(ids)}


def _ids(snapshot: Snapshot, seq_id: int) -> list[int]:
    """Tokens of a sequence, whose rows must stand at 0, 1, 2 and so on."""
    held = entries(snapshot.text, seq_id)
    wanted = np.arange(held.shape[1])
    for part in snapshot.groups:
        owned = foreign.owners_of(part.pos, part.seqs)
        found = owned.pos[owned.of(seq_id)]
        if not (np.array_equal(found, wanted) and np.array_equal(held[0], wanted)):
            raise SessionMismatch(
                f"{len(found)} rows and {len(wanted)} tokens of sequence {seq_id} do not stand at "
                "0, 1, 2 and so on; mlx-lm has no other positions"
            )
    return held[1].tolist()


def _type(snapshot: Snapshot, which: str) -> str:
    name = snapshot.fingerprint[which]
    if name not in _CODES:
        raise SessionMismatch(
            f"rows of type {name} cannot be written for mlx-lm; convert them to one of "
            f"{', '.join(_CODES)}"
        )
    return name


def _rows(part: GroupPart, group: GroupSpec, row: int, seq_id: int, *, values: bool) -> np.ndarray:
    """Rows of a sequence in a layer, `[H, n, D]`, by position."""
    cells = foreign.owners_of(part.pos, part.seqs).of(seq_id)
    found = [np.asarray(block.v if values else block.k)[row] for block in part.blocks]
    rows = np.concatenate(found)[cells].swapaxes(0, 1)
    turn = None if values or group.rope is None else foreign.order(group.rope.layout, "neox", group)
    return rows if turn is None else rows[..., turn]
