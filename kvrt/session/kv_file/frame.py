"""The first page of a `.kv` file: where its manifest is and where it ends.

    page of 4,096 bytes: slot A at 0, slot B at 512
    blobs, each a safetensors file of its own, and the manifest that names them

Both slots say the same, unless a writer was stopped while it made a file longer: it first notes in
slot B how far it may write, then writes behind the end, then says in slot A where the new manifest
is, then in slot B. Whatever is lost, one slot is whole and names a whole session, and bytes behind
its end are allowed only where a slot announced them.
"""

import dataclasses
import hashlib
import struct

import xxhash

from kvrt.errors import DAMAGED, BadSession
from kvrt.files.kinds import SESSION

PAGE = 4096
VERSION = 1
NO_LIMIT = 2**63 - 1  # of a writer at work, which knows its end last
(_MAGIC,), SLOTS = SESSION.begins, SESSION.offsets
_FORM = struct.Struct("<8sIIQQQQQ32s")
_SLOT_BYTES = _FORM.size + 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Frame:
    """What a slot says.

    Attributes:
      generation: how often the file was written; the greater of two slots is the newer one.
      offset: of the manifest.
      n_bytes: of the manifest.
      sha256: of the manifest, which holds the digests of all blobs.
      end: of the session; the size of the file.
      limit: how far the file may reach; beyond `end` only while a writer is at work.
    """

    generation: int
    offset: int
    n_bytes: int
    sha256: bytes
    end: int
    limit: int


def of_manifest(manifest: bytes, offset: int, generation: int) -> Frame:
    """The frame of a session whose manifest stands last, at an offset."""
    end = offset + len(manifest)
    digest = hashlib.sha256(manifest).digest()
    return Frame(
        generation=generation,
        offset=offset,
        n_bytes=len(manifest),
        sha256=digest,
        end=end,
        limit=end,
    )


def slot(frame: Frame) -> bytes:
    """A slot in bytes."""
    f = frame
    head = _FORM.pack(
        _MAGIC, VERSION, 0, f.generation, f.offset, f.n_bytes, f.end, f.limit, f.sha256
    )
    return head + xxhash.xxh3_128_digest(head)


def page(frame: Frame) -> bytes:
    """The page with two equal slots."""
    out = bytearray(PAGE)
    for at in SLOTS:
        out[at : at + _SLOT_BYTES] = slot(frame)
    return bytes(out)


def is_session(page: bytes) -> bool:
    """Whether a file with this first page was meant to be a session, however damaged."""
    return any(page[at:].startswith(_MAGIC) for at in SLOTS)


def newest_frame(page: bytes, n_file: int) -> Frame:
    """The newest session that a page names.

    Args:
      page: the first bytes of the file, up to 4,096.
      n_file: size of the file.

    Raises:
      BadSession: it is no session, one of a newer format, damaged, or of another length.
    """
    if len(page) < PAGE:
        raise BadSession(
            f"the file has {n_file} bytes, a session at least {PAGE}; it is truncated or no session"
        )
    slots = [page[at : at + _SLOT_BYTES] for at in SLOTS]
    if not is_session(page):
        raise BadSession(
            f"the file begins with {page[:8]!r}, a session with {_MAGIC!r}; it is no session of "
            "kvrt's, convert it"
        )
    found = [f for f in map(_frame, slots) if f is not None]
    if not found:
        raise BadSession(_why(slots))
    frame = max(found, key=lambda f: f.generation)
    limit = max(f.limit for f in found)
    if n_file < frame.end:
        raise BadSession(
            f"the file has {n_file} bytes, its first page says {frame.end}: it is truncated; "
            f"{DAMAGED}"
        )
    if n_file > max(limit, frame.end):
        raise BadSession(
            f"the file has {n_file - frame.end} bytes behind its end at {frame.end}; something was "
            "added to it, and {DAMAGED}"
        )
    if not PAGE <= frame.offset <= frame.offset + frame.n_bytes <= frame.end:
        raise BadSession(f"the manifest at {frame.offset} lies outside the file; {DAMAGED}")
    return frame


def claimed_frames(page: bytes) -> list[Frame]:
    """What the slots of a page say, newest first, whether they are whole or not.

    Only a manifest with its sha256 proves one.
    """
    slots = [page[at : at + _SLOT_BYTES].ljust(_SLOT_BYTES, b"\0") for at in SLOTS]
    found = [f for f in (_frame(x, is_checked=False) for x in slots) if f is not None]
    return sorted(found, key=lambda f: -f.generation)


def _frame(data: bytes, *, is_checked: bool = True) -> Frame | None:
    """The frame in a slot; None if it is not whole, or of another version."""
    head, check = data[: _FORM.size], data[_FORM.size :]
    if is_checked and xxhash.xxh3_128_digest(head) != check:
        return None
    magic, version, _, generation, offset, n_bytes, end, limit, sha256 = _FORM.unpack(head)
    if magic != _MAGIC or version != VERSION:
        return None
    return Frame(
        generation=generation, offset=offset, n_bytes=n_bytes, sha256=sha256, end=end, limit=limit
    )


def _why(slots: list[bytes]) -> str:
    """Why no slot can be used."""
    for data in slots:
        if xxhash.xxh3_128_digest(data[: _FORM.size]) == data[_FORM.size :]:
            version = _FORM.unpack(data[: _FORM.size])[1]
            return f"the session has format version {version}, {VERSION} is known; update kvrt"
    return f"both slots of the first page have other digests than they were written with; {DAMAGED}"
