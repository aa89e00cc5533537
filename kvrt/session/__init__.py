"""Sessions: files that hold a cache, and refuse to be taken for another."""

from kvrt.session.io import (
    Saved,
    open_session,
    read,
    read_cells,
    read_manifest,
    save,
    start_save,
)
from kvrt.session.opened import OpenedSession
from kvrt.session.snapshot import SamplingState, Snapshot

__all__ = [
    "OpenedSession",
    "SamplingState",
    "Saved",
    "Snapshot",
    "open_session",
    "read",
    "read_cells",
    "read_manifest",
    "save",
    "start_save",
]
