"""Session files of llama.cpp put together number by number, apart from the code that is tested."""

import struct

import numpy as np


def u32(*values):
    return struct.pack(f"<{len(values)}I", *values)


def i32(*values):
    return struct.pack(f"<{len(values)}i", *values)


def tokens(ids):
    return u32(len(ids)) + i32(*ids)


def slot_tokens(ids, version=1, media=0, rest=()):
    """As a server packs them."""
    return tokens([-1, version, len(ids), *ids, media, *rest])


def whole(ids, arch, *sections, version=10):
    return b"nsgg" + u32(version) + ids + u32(len(arch)) + arch.encode() + b"".join(sections)


def sequence(ids, *sections, version=3):
    return b"qsgg" + u32(version) + ids + b"".join(sections)


def section(cells, k, v, *, trans=False, streams=1, type_id=1, v_flag=None, rotations=None):
    """One cache.

    Args:
      cells: (pos, owners) of each cell.
      k: keys of each layer. `[n, width]`
      v: values of each layer.
      trans: values channel by channel.
      streams: number of streams that the section names.
      type_id: ggml's number of the type of the rows.
      rotations: sizes that the newer version notes.
      v_flag: layout of values that the section names.
    """
    out = u32(streams, len(cells))
    for pos, owners in cells:
        out += i32(pos, len(owners), *owners)
    out += u32(int(trans) if v_flag is None else v_flag, len(k))
    out += u32(*rotations) if rotations else b""
    for rows in k:
        out += i32(type_id) + struct.pack("<Q", rows[0].nbytes) + rows.tobytes()
    for rows in v:
        if trans:
            size, width = rows.dtype.itemsize, rows.shape[1]
            out += i32(type_id) + u32(size, width) + np.ascontiguousarray(rows.T).tobytes()
        else:
            out += i32(type_id) + struct.pack("<Q", rows[0].nbytes) + rows.tobytes()
    return out


def rows(n_layers, n, width, dtype=np.float16, seed=0):
    made = np.random.default_rng(seed).standard_normal((n_layers, n, width))
    return list(made.astype(dtype))
