"""What the devices of a mesh hold of a session, as each process writes it and any reads it.

    rows-<generation>/process-<n>/     an Orbax checkpoint with the shards of process n

An array is a round of 256 cells of every part; of it a process writes the shards of its own devices
and no others, so that an array is whole in none of the checkpoints unless one process wrote all.
"""

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvrt.errors import SaveError
from kvrt.files import atomic
from kvrt.session import expected
from kvrt.session.divided.blocks import DividedBlocks
from kvrt.session.divided.division import pieces
from kvrt.session.kv_file import blobs
from kvrt.session.manifest import Manifest
from kvrt.session.orbax import write
from kvrt.session.orbax.read import Region
from kvrt.session.snapshot import BLOCK_CELLS

Sums = list[tuple[int, int, str]]  # number of a piece among all, bytes, digest


def write_own(rows: Path, groups: Sequence[DividedBlocks], index: int) -> Sums:
    """Writes what the devices of process `index` hold; on the disk when it returns.

    Raises:
      SaveError: the folder of the first process is not to be seen from here.
      OSError: the system refuses.
    """
    if not rows.is_dir():
        raise SaveError(
            f"{rows}: process {index} does not see the folder that process 0 made; give a name "
            "in a folder that all of them share"
        )
    first, sums, tree = 0, Sums(), {}
    for g, group in enumerate(groups):
        mine: dict[str, Any] = {}
        for i, tensors in group.own():
            sums.append((first + i, *blobs.blob_digest(tensors)))
            block = pieces(group.division)[i].block
            mine[str(block)] = dict(group.round_arrays(block))
        first += group.division.n_pieces
        if mine:
            tree[str(g)] = mine
    if tree:
        own = rows / _folder(index)
        with write.told_by_system():
            write.write_own_shards(own, tree)
        make_private(own)
        atomic.sync_tree(own)
    return sums


def sums_in_order(found: Sequence[Sums], groups: Sequence[DividedBlocks]) -> list[tuple[int, str]]:
    """Bytes and digests of all pieces in their order, from those of each process."""
    said = {i: (n_bytes, digest) for i, n_bytes, digest in itertools.chain(*found)}
    return [said[i] for i in range(sum(group.division.n_pieces for group in groups))]


def make_private(folder: Path) -> None:
    """Closes a folder and all in it to others; Orbax's files are open to all."""
    for file in [folder, *folder.rglob("*")]:
        os.chmod(file, 0o700 if file.is_dir() else atomic.MODE)


def regions(found: Manifest, group: int) -> list[dict[str, Region]]:
    """Where the arrays of every piece of a group are, by piece."""
    parts, whole = found.groups[group].parts, expected.round_arrays(found, group)
    out = []
    for i, piece in enumerate(pieces(parts)):
        of = {}
        for x, spec in expected.row_block(found, group, i).items():
            n_layers, _, n_heads, n = spec.shape
            of[x] = Region(
                spec=spec,
                name=f"{group}.{piece.block}.{x}",
                folder=_folder(parts.writer(piece.part, piece.head)),
                start=(0, piece.part * BLOCK_CELLS, piece.head * n_heads, 0),
                whole=whole[x].shape,
                chunk=(n_layers, BLOCK_CELLS, n_heads, n),
            )
        out.append(of)
    return out


def _folder(index: int) -> str:
    return f"process-{index}"
