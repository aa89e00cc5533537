"""What several tests of sessions share."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

# What a script makes of a file is what its test makes of it.
sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))


@pytest.fixture
def load(tmp_path):
    """Reads the bytes of a file of llama.cpp."""
    # Here, for the modules of this folder are typechecked from the first import on.
    from tests.session.llama_bytes import PLAIN, read

    def at(content, groups=PLAIN, **options):
        path = tmp_path / "session.bin"
        path.write_bytes(content)
        return read(path, groups, **options)

    return at


@pytest.fixture
def library(tmp_path):
    """A new folder of sessions."""
    from kvrt.session.library.library import Library

    return Library(tmp_path / "sessions")


@pytest.fixture
def plain(monkeypatch):
    """Plain files instead of Orbax's, and no waiting for the disk: saves are quick."""
    from kvrt.errors import BadSession
    from kvrt.session.kv_file import blobs
    from kvrt.session.orbax import rows, write

    def save(path, tree):
        path.mkdir()
        for i, tensors in tree.items():
            arrays = {k: np.ascontiguousarray(x) for k, x in tensors.items()}
            (path / i).write_bytes(safetensors.numpy.save(arrays))

    def read_rows(path, found):
        out = []
        for i in range(sum(len(group.blocks) for group in found.groups)):
            try:
                # A digest goes by the order in which they were written, k before v.
                found_here = safetensors.numpy.load((path / str(i)).read_bytes())
                out.append(dict(sorted(found_here.items())))
            except (OSError, safetensors.SafetensorError) as error:
                raise BadSession(f"rows cannot be read: {error}") from error
            if blobs.blob_digest(out[-1]) != (found.blobs[i].n_bytes, found.blobs[i].digest):
                raise BadSession("rows have another digest")
        return out

    monkeypatch.setattr(write, "write_checkpoint", save)
    monkeypatch.setattr(rows, "read_rows", read_rows)
    monkeypatch.setattr(os, "fsync", lambda fd: None)
