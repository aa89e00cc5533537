"""Reads and writes the prompt caches of mlx-lm, of models that are all full attention.

A cache is one safetensors file; tensors and metadata are trees of lists, flattened. Keys, with RoPE
applied, are `i.0` of layer i and values `i.1`, `[1, H, n, D]`, for positions 0 to n - 1.

    since 0.32   `i.2` is how many positions count; metadata `0.name` are the user's notes, `1.i`
                 classes of the layers' caches, `2` says which tensors were numbers
    before       all positions count; metadata `0.i` is "", `1.name` notes, `2.i` classes

Tokens are not in it; kvrt notes them under the name of TOKENS.

Source: mlx-lm `mlx_lm/models/cache.py`, save_prompt_cache and load_prompt_cache.
"""

import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from io import BufferedIOBase
from typing import Annotated, Any

import numpy as np
import safetensors
from msgspec import Meta

from kvrt.cellcache.history import entries
from kvrt.config import GroupSpec
from kvrt.errors import BadSession, SessionMismatch
from kvrt.files.typed_json import json_value, typed
from kvrt.session import owners
from kvrt.session.fingerprint import Fingerprint
from kvrt.session.interop import foreign, source
from kvrt.session.interop.foreign import DTYPES
from kvrt.session.interop.llama_format import architecture
from kvrt.session.interop.rotated_keys import with_rotated_keys
from kvrt.session.owners import Owned
from kvrt.session.snapshot import GroupPart, Snapshot, packed_part

ARCH = "llama"
TOKENS = "kvrt_tokens"
KIND = "KVCache"
_Token = Annotated[int, Meta(gt=-(2**31), lt=2**31)]
_MAX_HEADER_BYTES = 16 << 20
KV_DTYPES = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
_CODES = {name: code for code, name in KV_DTYPES.items()}


def read(
    path: str | os.PathLike[str],
    fingerprint: Fingerprint,
    groups: Sequence[GroupSpec],
    *,
    arch: str,
    n_vocab: int,
    tokens: Sequence[int] | None = None,
) -> Snapshot:
    """Reads a prompt cache as sequence 0; keys and values keep the file's dtype.

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
    foreign.refuse_unrotated(fingerprint, "a prompt cache of mlx-lm")
    check_shared_format(fingerprint, groups, arch)
    name = str(path)
    with source.open_source(path) as at:
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
            new = notes.get("2.0") == ""
            _check_kinds(name, notes, groups, new=new)
            n_positions, types = _check_tensors(name, file, groups, new=new)
            n = _n_used(name, file, groups, n_positions) if new else n_positions
            parts = [_part(name, file, group, n, types) for group in groups]
    except (OSError, safetensors.SafetensorError) as error:
        raise BadSession(
            f"{name}: cannot be read: {' '.join(str(error).split())}; make it again"
        ) from error
    number = np.arange(n, dtype=np.int32)
    owned = Owned(pos=number, cell=number, seq=np.zeros(n, np.int32))
    ids = _noted(name, notes.get(f"{0 if new else 1}.{TOKENS}")) if tokens is None else tokens
    history = foreign.history_of(name, owned, ids, {}, n_vocab)
    owners.check_cells(name, parts, history)
    return Snapshot(
        fingerprint={**fingerprint, "type_k": types[0], "type_v": types[1]},
        groups=tuple(parts),
        states=None,
        history=history,
    )


def check_shared_format(fingerprint: Fingerprint, groups: Sequence[GroupSpec], arch: str) -> None:
    """Refuses models and caches whose keys mlx-lm does not have.

    Raises:
      SessionMismatch: another family, windows or recurrent layers.
    """
    foreign.refuse_states(fingerprint, "a prompt cache of mlx-lm")
    foreign.refuse_latents(groups, "a prompt cache of mlx-lm")
    if architecture(arch) != ARCH:
        raise SessionMismatch(
            f"prompt caches of mlx-lm are not supported for {arch!r}; only for the llama family"
        )
    if any(group.mask.kind != "full" for group in groups):
        raise SessionMismatch(
            "prompt caches of mlx-lm are not supported for layers with windows; only for full "
            "attention"
        )


def places(groups: Sequence[GroupSpec]) -> list[tuple[int, int, int]]:
    """Layer, group and index in the group of every layer, ascending."""
    return sorted((x, g, i) for g, of in enumerate(groups) for i, x in enumerate(of.layers))


def _check_kinds(
    name: str, notes: Mapping[str, str], groups: Sequence[GroupSpec], *, new: bool
) -> None:
    """Checks that every layer has a plain cache of its own."""
    head = "1." if new else "2."
    kinds = {key[2:]: kind for key, kind in notes.items() if key.startswith(head)}
    if not kinds:
        raise BadSession(f"{name}: names no classes of caches; give a file of mlx-lm's")
    for layer, kind in kinds.items():
        if kind != KIND:
            raise SessionMismatch(
                f"{name}: layer {layer[:20]} has a {kind[:60]!r}, only {KIND!r} is supported; make "
                "it without quantisation and without a limit on its size"
            )
    if set(kinds) != {str(layer) for layer, _, _ in places(groups)}:
        raise SessionMismatch(
            f"{name}: caches of {len(kinds)} layers, the model has {len(places(groups))}; take "
            "the model that made it"
        )


def _check_tensors(
    name: str, file: Any, groups: Sequence[GroupSpec], *, new: bool
) -> tuple[int, tuple[str, str]]:
    """How many positions there are, and the types of keys and values."""
    wanted = {f"{layer}.{i}": g for layer, g, _ in places(groups) for i in (0, 1)}
    counts = {f"{layer}.2" for layer, _, _ in places(groups)} if new else set()
    if set(file.keys()) != set(wanted) | counts:
        raise BadSession(
            f"{name}: {len(file.keys())} tensors are not the {len(wanted) + len(counts)} of its "
            "layers; the file is damaged, make it again"
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
        if code not in KV_DTYPES:
            raise SessionMismatch(
                f"{name}: KV dtype {code} is not supported, only {', '.join(KV_DTYPES)}"
            )
    return sizes.pop(), (KV_DTYPES[found[0]], KV_DTYPES[found[1]])


def _n_used(name: str, file: Any, groups: Sequence[GroupSpec], n_positions: int) -> int:
    """How many of the positions count."""
    found = set()
    for layer, _, _ in places(groups):
        about = file.get_slice(f"{layer}.2")
        if about.get_shape() or about.get_dtype() != "I32":
            raise BadSession(f"{name}: tensor {layer}.2 is no number; make the file again")
        found.add(int(file.get_tensor(f"{layer}.2")))
    if len(found) > 1 or not 0 <= min(found) <= n_positions:
        raise BadSession(
            f"{name}: layers hold {sorted(found)[:3]} tokens in {n_positions} positions; make the "
            "file again"
        )
    return found.pop()


def _part(name: str, file: Any, group: GroupSpec, n: int, types: tuple[str, str]) -> GroupPart:
    """The cells, keys and values of a group."""
    shape = (len(group.layers), n, group.n_kv_heads, group.head_dim)
    k, v = (np.empty(shape, DTYPES[kind]) for kind in types)
    order = group.rope and foreign.order("neox", group.rope.layout, group)
    for at, layer in enumerate(group.layers):
        for i, to in enumerate((k, v)):
            found = file.get_tensor(f"{layer}.{i}")
            foreign.check_finite(name, f"keys and values of layer {layer}", found[:, :, :n])
            to[at] = found[0, :, :n].swapaxes(0, 1)
    blocks = foreign.blocks(k if order is None else k[..., order], v, n)
    return packed_part(np.arange(n, dtype=np.int32), {}, blocks)


def _noted(name: str, text: str | None) -> list[int]:
    """Tokens that kvrt has noted."""
    if text is None:
        raise BadSession(
            f"{name}: mlx-lm notes no tokens; give those that were evaluated (--tokens)"
        )
    try:
        return typed(list[_Token], json_value(text))
    except ValueError as error:
        raise BadSession(f"{name}: its tokens: {error}; make the file again") from error


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
