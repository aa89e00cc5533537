"""The arrays that a session must hold, worked out from its fingerprint before one of them is read.

A manifest can say anything. The shapes of all arrays follow from layers, heads, channels and types
in the fingerprint and from the numbers of cells and tokens, so a file that names other sizes, the
same bytes twice or more bytes than it has is refused before memory is taken for it.
"""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from kvrt.config import MAX_SEQUENCES
from kvrt.errors import DAMAGED, BadConfig, BadSession
from kvrt.kv_types import CODECS, FLOAT_DTYPES
from kvrt.session import described, kv_arrays
from kvrt.session.divided import pieces
from kvrt.session.fingerprint import Fingerprint
from kvrt.session.manifest import Blob, CheckpointEntry, Manifest
from kvrt.session.snapshot import BLOCK_CELLS
from kvrt.store.quantized import data_dtype

# A safetensors header, at most: its frame, and name, type, shape and offsets of an array.
_HEADER_BYTES, _ENTRY_BYTES = 64, 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArraySpec:
    """Shape and NumPy dtype of an array in a file."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def n_bytes(self) -> int:
        """What it takes; exact at any size."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


Arrays = Mapping[str, ArraySpec]


def check_manifest(found: Manifest) -> None:
    """Compares a manifest with its fingerprint: groups, blocks, and the size of every blob.

    Raises:
      BadSession: they contradict each other.
    """
    described.check_fingerprint(found.fingerprint)
    n_groups = len(found.fingerprint["groups"])
    if len(found.groups) != n_groups:
        raise _bad(f"{len(found.groups)} groups of cells, the fingerprint has {n_groups}")
    if (found.held is None) != (found.fingerprint.get("recurrent") is None):
        raise _bad("states are there and no recurrent layers, or the other way round")
    for i, entry in enumerate(found.groups):
        parts = entry.parts
        if sum(parts.cells) != entry.n_used or len(entry.blocks) != parts.n_pieces:
            raise _bad(f"{len(entry.blocks)} blocks for the {entry.n_used} cells of group {i}")
        if described.sizes(found.fingerprint, i)[1] % parts.n_heads:
            raise _bad(f"{parts.n_heads} parts of the kv heads of group {i}")
        for j, blob in enumerate(entry.blocks):
            _check_size(f"block {j} of group {i}", blob, row_block(found, i, j))
    if found.states is not None:
        _check_size("the states", found.states, state_tables(found))
    for entry in found.checkpoints:
        _check_checkpoint(found, entry)
    _check_meta(found)


def row_block(found: Manifest, group: int, block: int) -> Arrays:
    """Arrays of one block of a group, or of one piece of it: up to 256 cells."""
    parts = found.groups[group].parts
    return _rows(found.fingerprint, group, pieces(parts)[block].n, parts.n_heads)


def round_arrays(found: Manifest, group: int) -> Arrays:
    """Arrays of which the devices of a mesh wrote a part each: 256 cells of every part."""
    parts = found.groups[group].parts
    return _rows(found.fingerprint, group, len(parts.cells) * BLOCK_CELLS)


def state_tables(found: Manifest) -> Arrays:
    """Arrays of the states: `<layer>.<array>`, one entry a state that some sequence holds."""
    n = 1 + max((at for held in (found.held or {}).values() for _, at in held), default=-1)
    return {
        f"{i}.{j}": ArraySpec(shape=(n, *x.shape), dtype=x.dtype)
        for i, layer in enumerate(described.state_arrays(found.fingerprint))
        for j, x in enumerate(layer)
    }


def checkpoint_arrays(found: Manifest, said: CheckpointEntry) -> Arrays:
    """Arrays of a context checkpoint: `<group>.<array>` of its tails, `state.<layer>.<array>`."""
    out: dict[str, ArraySpec] = {}
    for i, tail in enumerate(said.tails):
        if tail is not None:
            cells = ArraySpec(shape=(tail.n_used,), dtype="int32")
            out |= {f"{i}.index": cells, f"{i}.pos": cells}
            rows = _rows(found.fingerprint, i, tail.n_used)
            out |= {f"{i}.{name}": x for name, x in rows.items()}
    if found.held is not None:
        for i, layer in enumerate(described.state_arrays(found.fingerprint)):
            out |= {
                f"state.{i}.{j}": ArraySpec(shape=x.shape, dtype=x.dtype)
                for j, x in enumerate(layer)
            }
    return out


def _check_checkpoint(found: Manifest, said: CheckpointEntry) -> None:
    name = f"the checkpoint at position {said.pos}"
    if len(said.tails) != len(found.groups) or not said.seq_ids or said.pos < 1:
        n = len(said.tails)
        raise _bad(f"{name} of {len(said.seq_ids)} sequences, with {n} groups of cells")
    _check_size(name, said.blob, checkpoint_arrays(found, said))


def _rows(found: Fingerprint, group: int, n: int, n_parts: int = 1) -> dict[str, ArraySpec]:
    """Keys and values of n cells of a group, in their order; quantized ones with their scales.

    Of n_parts of the kv heads they are one.
    """
    n_layers, n_heads, dims = described.sizes(found, group)
    n_heads //= n_parts
    out = {}
    for side, head_dim, kind in zip("kv", dims, kv_arrays.kinds(found, group), strict=True):
        shape, coding = (n_layers, n, n_heads), CODECS.get(kind.type)
        if coding is None:
            out[side] = ArraySpec(shape=(*shape, head_dim), dtype=kv_arrays.stored(kind.type))
            continue
        try:
            n_bytes, n_groups = coding.sizes(head_dim)
        except BadConfig as error:
            raise BadSession(f"{error}; {DAMAGED}") from error
        scales = ArraySpec(shape=(*shape, n_groups), dtype=FLOAT_DTYPES[coding.scale])
        out[side] = ArraySpec(shape=(*shape, n_bytes), dtype=np.dtype(data_dtype(coding)).name)
        out[f"{side}.scale"] = scales
        if coding.affine:
            out[f"{side}.low"] = scales
    return out


def _check_meta(found: Manifest) -> None:
    """Cells, tokens and logits; how many words a cell's owners take is the writer's choice."""
    n_used = sum(g.n_used for g in found.groups)
    n_tokens, n_logits = sum(found.n_tokens.values()), len(found.logits)
    n_vocab = described.n_vocab(found.fingerprint) if n_logits else 0
    least = 8 * n_used + 12 * n_tokens + 4 * n_vocab * n_logits
    words = 4 * n_used, 4 * n_used * (MAX_SEQUENCES // 32)
    n_arrays = 3 * len(found.groups) + len(found.n_tokens) + n_logits
    _check_bytes("the cells", found.meta, least + words[0], least + words[1], n_arrays)


def _check_size(name: str, blob: Blob, arrays: Arrays) -> None:
    n = sum(x.n_bytes for x in arrays.values())
    _check_bytes(name, blob, n, n, len(arrays))


def _check_bytes(name: str, blob: Blob, least: int, most: int, n_arrays: int) -> None:
    most += _HEADER_BYTES + n_arrays * _ENTRY_BYTES
    if not least <= blob.n_bytes <= most:
        raise _bad(
            f"{blob.n_bytes} bytes for {name}, from {least} to {most} by the fingerprint and the "
            "number of cells"
        )


def _bad(what: str) -> BadSession:
    return BadSession(f"the manifest names {what}; {DAMAGED}")
