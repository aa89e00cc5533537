"""Sessions: files that hold a cache, and refuse to be taken for another."""

from kvrt.session.io import Saved, read, read_cells, read_manifest, save, start_save
from kvrt.session.snapshot import Draw, Snapshot

__all__ = [
    "Draw",
    "Saved",
    "Snapshot",
    "read",
    "read_cells",
    "read_manifest",
    "save",
    "start_save",
]
