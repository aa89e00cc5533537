"""One of two processes, with two devices each, that save and load one session together.

`python -m tests.session.two_writers PORT INDEX FOLDER`, by `test_writers.py`: prints what it found
as JSON. The second process fails where it is told to, and both go on.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np

from kvrt import CacheConfig, Runtime, session
from kvrt.errors import KvrtError
from kvrt.program.mesh import MeshSpec
from kvrt.session.orbax import write as orbax_write
from tests.toys import ToyLm

CONFIG = CacheConfig(n_ctx=64, n_ubatch=8, block_size=4, type_k="f32", type_v="f32")
TOKENS = [i % 32 for i in range(40)]


def main(port, index, folder):
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=index)
    many = Runtime(ToyLm(n_layers=1), CONFIG, mesh=MeshSpec(tensor=2, context=2))
    many.append(TOKENS)
    taken, path = many.snapshot(divided=True), folder / "x.kvd"
    found = {"file": said(session.save, folder / "x.kv", taken)}
    found["background"] = said(session.start_save, path, taken, "folder")
    saved = session.save(path, taken, "folder")
    on_disk = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    found["saved"] = saved.n_bytes == on_disk
    whole = many.snapshot()
    if index == 0:
        session.save(folder / "whole.kv", whole)
    many.append([1, 2])
    newer, write = many.snapshot(divided=True), orbax_write.write_own_shards
    if index == 1:
        orbax_write.write_own_shards = no_room
    found["no_room"] = said(session.save, path, newer)
    orbax_write.write_own_shards = write
    found["refused"] = said(session.save, path, newer, before=refuse)
    # A folder whose lead cannot even begin.
    (folder / "mine").mkdir(exist_ok=True)
    (folder / "mine" / "a.txt").write_text("a")
    found["foreign"] = said(session.save, folder / "mine", newer)
    other = Runtime(ToyLm(n_layers=1), CONFIG, mesh=MeshSpec(context=4))
    other.restore(session.read(path))
    found["same"] = rows(other.snapshot()) == rows(session.read(path))
    print(json.dumps(found), flush=True)
    jax.distributed.shutdown()


def no_room(path, tree):
    raise OSError(28, "No space left on device")


def refuse(path):
    raise KvrtError("not now")


def said(do, *args, **options):
    """The error that a call raises."""
    try:
        do(*args, **options)
    except KvrtError as error:
        return str(error)
    return None


def rows(taken):
    return b"".join(np.asarray(x).tobytes() for b in taken.groups[0].blocks for x in (b.k, b.v))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
