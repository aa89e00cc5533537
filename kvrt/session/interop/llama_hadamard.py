"""Whether llama.cpp applied a Hadamard transform before it quantized: what its files say of it.

Since April 2026 it does, keys and values each where they are quantized and all heads are multiples
of 64, unless LLAMA_ATTN_ROT_DISABLE is set; since October 2026 its files tell the sizes.
"""

import dataclasses
import struct
from collections.abc import Sequence

from kvrt.config import GroupSpec
from kvrt.errors import BadSession, SessionMismatch
from kvrt.session import kv_arrays
from kvrt.session.fingerprint import Fingerprint
from kvrt.session.interop.llama_format import ROTATED
from kvrt.store import hadamard


@dataclasses.dataclass(frozen=True, kw_only=True)
class SectionTypes:
    """Types of K and V of a section, and sizes of their rotations; None where it does not say."""

    types: tuple[str, str]
    rotations: tuple[int, int] | None


def found(
    name: str, sections: Sequence[SectionTypes], groups: Sequence[GroupSpec], given: bool | None
) -> bool:
    """Whether keys and values were rotated before they were quantized.

    Raises:
      SessionMismatch: the file does not say so, or they were rotated in another way than here.
    """
    rotated, head_dims = set(), [g.head_dim for g in groups]
    for section in sections:
        quantized = [t == "q8_0" for t in section.types]
        may = any(quantized) and all(d % ROTATED == 0 for d in head_dims)
        if section.rotations is None and may and given is None:
            raise SessionMismatch(
                f"{name}: this version does not say whether q8_0 was rotated before it was "
                "quantized; say so, or save it with a newer llama.cpp"
            )
        k, v = quantized
        sizes = {(hadamard.size_k(d, k), hadamard.size_v(d, v)) for d in head_dims}
        if section.rotations not in (None, (0, 0)) and sizes != {section.rotations}:
            raise SessionMismatch(
                f"{name}: keys and values were rotated by {list(section.rotations or ())} channels "
                f"to be quantized, {sorted(sizes)} is known; save it from a cache of type f16 "
                "(-ctk f16 -ctv f16)"
            )
        rotated.add(section.rotations != (0, 0) if section.rotations else may and bool(given))
    if len(rotated) > 1:
        raise BadSession(f"{name}: sections differ in their rotation; make the file again")
    return rotated.pop() if rotated else False


def written(
    fingerprint: Fingerprint, groups: Sequence[GroupSpec], types: Sequence[str], *, old: bool
) -> bytes:
    """The sizes of rotations as they are written.

    Raises:
      SessionMismatch: llama.cpp does not rotate so, or the older version cannot say it.
    """
    if "q8_0" not in types:
        return bytes(8)
    rotated = bool(fingerprint.get("hadamard"))
    kinds = {kv_arrays.kinds(fingerprint, i) for i in range(len(groups))}
    may = all(g.head_dim % ROTATED == 0 for g in groups)
    if rotated and (not may or len(kinds) > 1):
        raise SessionMismatch(
            "keys and values were rotated before they were quantized, and llama.cpp rotates only "
            f"where all heads have one size, a multiple of {ROTATED}; convert them without rotation"
        )
    if old and may:
        raise SessionMismatch(
            "files for a llama.cpp before 0.6 do not say whether q8_0 was rotated; write the "
            "newer version, or convert the session to f16"
        )
    ((k, v),) = kinds if rotated else [(None, None)]
    return struct.pack("<II", k.n_hadamard if k else 0, v.n_hadamard if v else 0)
