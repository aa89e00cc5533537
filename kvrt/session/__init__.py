"""Sessions: files that hold a cache, and refuse to be taken for another."""

from kvrt.cellcache.history import TokenHistory
from kvrt.cellcache.saved import SavedCells
from kvrt.session.divided import Division
from kvrt.session.io import (
    Saved,
    open_session,
    read,
    read_cells,
    read_manifest,
    save,
    start_save,
)
from kvrt.session.manifest import Blob, CheckpointEntry, GroupEntry, Manifest, TailEntry
from kvrt.session.opened import OpenedSession
from kvrt.session.snapshot import (
    CheckpointPart,
    GroupPart,
    KVBlock,
    SamplingState,
    Snapshot,
    StatePart,
)

__all__ = [
    "Blob",
    "CheckpointEntry",
    "CheckpointPart",
    "Division",
    "GroupEntry",
    "GroupPart",
    "KVBlock",
    "Manifest",
    "OpenedSession",
    "SamplingState",
    "Saved",
    "SavedCells",
    "Snapshot",
    "StatePart",
    "TailEntry",
    "TokenHistory",
    "open_session",
    "read",
    "read_cells",
    "read_manifest",
    "save",
    "start_save",
]
