"""Sessions: files that hold a cache, and refuse to be taken for another."""

from kvrt.cellcache.history import TokenHistory
from kvrt.cellcache.saved import SavedCells
from kvrt.session.io import (
    Saved,
    open_session,
    read,
    read_cells,
    read_manifest,
    save,
    start_save,
)
from kvrt.session.manifest import Blob, GroupEntry, Manifest
from kvrt.session.opened import OpenedSession
from kvrt.session.snapshot import Draw, GroupPart, RowBlock, Snapshot, StatePart

__all__ = [
    "Blob",
    "Draw",
    "GroupEntry",
    "GroupPart",
    "Manifest",
    "OpenedSession",
    "RowBlock",
    "Saved",
    "SavedCells",
    "Snapshot",
    "StatePart",
    "TokenHistory",
    "open_session",
    "read",
    "read_cells",
    "read_manifest",
    "save",
    "start_save",
]
