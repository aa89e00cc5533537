"""Whether llama.cpp rotated rows before it quantised them: what its files say of it, and do not.

Since April 2026 it does, keys and values each where they are quantised and all heads are multiples
of 64, unless LLAMA_ATTN_ROT_DISABLE is set; since October 2026 its files tell the sizes.
"""

import dataclasses
import struct
from collections.abc import Sequence

from kvrt.config import GroupSpec
from kvrt.errors import BadSession, SessionMismatch
from kvrt.session import rows as row_kinds
from kvrt.session.fingerprint import Fingerprint
from kvrt.session.interop.llama_format import ROTATED
from kvrt.store import hadamard


@dataclasses.dataclass(frozen=True, kw_only=True)
class Said:
    """Types of K and V of a section, and sizes of their rotations; None where it does not say."""

    types: tuple[str, str]
    turns: tuple[int, int] | None


def found(name: str, said: Sequence[Said], head_dims: Sequence[int], given: bool | None) -> bool:
    """Whether rows in codes were rotated before they were coded.

    Raises:
      SessionMismatch: the file does not say so, or they were rotated in another way than here.
    """
    turned = set()
    for section in said:
        coded = [t == "q8_0" for t in section.types]
        may = any(coded) and all(d % ROTATED == 0 for d in head_dims)
        if section.turns is None and may and given is None:
            raise SessionMismatch(
                f"{name}: this version does not say whether rows of q8_0 were rotated before they "
                "were quantised; say so, or save it with a newer llama.cpp"
            )
        sizes = {(hadamard.size_k(d, coded[0]), hadamard.size_v(d, coded[1])) for d in head_dims}
        if section.turns is not None and section.turns != (0, 0) and sizes != {section.turns}:
            raise SessionMismatch(
                f"{name}: keys and values were rotated by {list(section.turns)} channels to be "
                f"quantised, {sorted(sizes)} is known; save it from a cache of type f16 (-ctk f16 "
                "-ctv f16)"
            )
        turned.add(section.turns != (0, 0) if section.turns else may and bool(given))
    if len(turned) > 1:
        raise BadSession(f"{name}: sections differ in their rotation; make the file again")
    return turned.pop() if turned else False


def written(
    fingerprint: Fingerprint, groups: Sequence[GroupSpec], types: Sequence[str], *, old: bool
) -> bytes:
    """The sizes of rotations as they are written.

    Raises:
      SessionMismatch: llama.cpp does not rotate so, or the older version cannot say it.
    """
    if "q8_0" not in types:
        return bytes(8)
    turned = bool(fingerprint.get("hadamard"))
    kinds = {row_kinds.kinds(fingerprint, i) for i in range(len(groups))}
    may = all(g.head_dim % ROTATED == 0 for g in groups)
    if turned and (not may or len(kinds) > 1):
        raise SessionMismatch(
            "rows were rotated before they were coded, and llama.cpp rotates only where all heads "
            f"have one size, a multiple of {ROTATED}; convert them without rotation"
        )
    if old and may:
        raise SessionMismatch(
            "files for a llama.cpp before 0.6 do not say whether rows of q8_0 were rotated; write "
            "the newer version, or convert the rows to f16"
        )
    ((k, v),) = kinds if turned else [(None, None)]
    return struct.pack("<II", k.n_turn if k else 0, v.n_turn if v else 0)
