"""Session files of llama.cpp put together number by number, apart from the code that is tested."""

import io
import struct

import numpy as np

from kvrt import CacheConfig, GroupSpec, MaskSpec, RopeSpec
from kvrt.session.fingerprint import describe
from kvrt.session.interop import llama

WINDOW = MaskSpec(kind="window", size=4)


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


def small(ids, cells=((0, [0]), (1, [0])), **options):
    n = len(cells)
    return whole(ids, "llama", section(cells, *[rows(1, n, 2)] * 2, **options))


def example(trans):
    cells = [(0, [0]), (1, [0]), (2, [0])]
    k, v = rows(2, 3, 64, seed=1), rows(2, 3, 64, seed=2)
    content = whole(tokens([1, 5, 9]), "llama", section(cells, k, v, trans=trans))
    return content, k, v


# --- what is tested ------------------------------------------------------------------------------


def group(layers, heads=2, dim=32, layout="norm", mask=None):
    rope = RopeSpec(n_rot=dim, layout=layout)
    return GroupSpec(
        layers=layers, n_kv_heads=heads, head_dim=dim, rope=rope, mask=mask or MaskSpec()
    )


PLAIN = (group((0, 1)),)
# As in Gemma 3: windowed layers come first, and the file has them last.
MIXED = (group((0, 2), layout="neox", mask=WINDOW), group((1,), layout="neox"))
SMALL = (group((0,), heads=1, dim=2),)


def fingerprint(groups, recurrent=None, **config):
    return describe(groups, recurrent, CacheConfig(**config), 64, "w", {})


def read(path, groups=PLAIN, arch="llama", **options):
    options = {"n_vocab": 64, "fingerprint": fingerprint(groups), **options}
    return llama.read(path, options.pop("fingerprint"), groups, arch=arch, **options)


def written(snapshot, groups=PLAIN, arch="llama", **options):
    file = io.BytesIO()
    llama.write(file, snapshot, groups, arch=arch, **{"old": True, **options})
    return file.getvalue()
