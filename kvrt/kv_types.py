"""Types of rows: what a cache may keep keys and values as, and what they cost."""

import dataclasses
from typing import Literal

from kvrt.errors import BadConfig

FloatType = Literal["f32", "bf16", "f16"]
RowType = Literal["f32", "bf16", "f16", "int8", "q8_0", "int4", "int2"]
RowTypes = RowType | tuple[RowType, ...]  # of all groups of layers, or of each
# Keys alone may also be coded by channel, several cells together.
ChannelType = Literal["kivi4", "kivi2"]
KeyType = Literal[RowType, ChannelType]
KeyTypes = KeyType | tuple[KeyType, ...]

ROW_DTYPES: dict[str, str] = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
_FLOAT_BYTES: dict[str, int] = {"f32": 4, "bf16": 2, "f16": 2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Codec:
    """How a row of one head becomes whole numbers of a few bits.

    Attributes:
      bits: of a code, 8, 4 or 2; codes below 8 lie side by side in bytes.
      group: channels that share a scale; None is all of a head.
      affine: a group has a minimum, from which its codes count; else codes are signed.
      scale: type of scales and minima.
      cells: consecutive cells that share a scale.
    """

    bits: int
    group: int | None
    affine: bool
    scale: FloatType
    cells: int = 1

    @property
    def top(self) -> int:
        """The greatest code."""
        return 2**self.bits - 1 if self.affine else 2 ** (self.bits - 1) - 1

    @property
    def n_packed(self) -> int:
        """Codes in a byte."""
        return 8 // self.bits

    def sizes(self, head_dim: int) -> tuple[int, int]:
        """Bytes of codes, and groups, of a row of one head.

        Raises:
          BadConfig: the groups do not fill a head.
        """
        group = self.group or head_dim
        if head_dim % group or head_dim % self.n_packed:
            raise BadConfig(
                f"rows of {self.bits} bits share a scale by {group} channels, which do not fill a "
                f"head of {head_dim}; choose int8, or rows of a float type"
            )
        return head_dim // self.n_packed, head_dim // group


CODECS: dict[str, Codec] = {
    "int8": Codec(bits=8, group=None, affine=False, scale="f32"),
    "q8_0": Codec(bits=8, group=32, affine=False, scale="f16"),
    "int4": Codec(bits=4, group=32, affine=True, scale="f16"),
    "int2": Codec(bits=2, group=32, affine=True, scale="f16"),
}
# Keys whose channels have a scale each, see `kvrt.store.per_channel`.
CHANNEL_CODECS: dict[str, Codec] = {
    name: Codec(bits=bits, group=1, affine=True, scale="f16", cells=32)
    for name, bits in (("kivi4", 4), ("kivi2", 2))
}
# Tokens a sequence whose keys stay as they are beside those in `CHANNEL_CODECS`.
N_TAIL = 128


def each(types: KeyTypes) -> tuple[KeyType, ...]:
    """Types of some groups of layers, of all of them if one is given."""
    return (types,) if isinstance(types, str) else types


def by_channel(types: KeyTypes) -> bool:
    """Whether keys of some layers are coded by channel."""
    return any(t in CHANNEL_CODECS for t in each(types))


def quantized(types: KeyTypes) -> bool:
    """Whether keys of some layers are stored in few bits, with a scale."""
    return any(t in CODECS or t in CHANNEL_CODECS for t in each(types))


def carried(row_type: KeyType) -> RowType:
    """The type in which rows are taken out, for a session or another place."""
    return "f16" if row_type in ("kivi4", "kivi2") else row_type


def carried_types(types: KeyTypes) -> RowTypes:
    """Likewise, of all groups of layers or of each."""
    if isinstance(types, str):
        return carried(types)
    found: tuple[RowType, ...] = tuple(carried(t) for t in types)
    return found


def row_bytes(row_type: KeyType, head_dim: int) -> int:
    """Bytes of a row of one head, its part of scales included, what is kept beside left out.

    Raises:
      BadConfig: the type's groups do not fill a head.
    """
    codec = CODECS.get(row_type) or CHANNEL_CODECS.get(row_type)
    if codec is None:
        return head_dim * _FLOAT_BYTES[row_type]
    n_codes, n_groups = codec.sizes(head_dim)
    n_scales = n_groups * (2 if codec.affine else 1)
    return n_codes + -(-n_scales * _FLOAT_BYTES[codec.scale] // codec.cells)


def tail_bytes(row_type: KeyType, head_dim: int, n_seq_max: int) -> int:
    """Bytes of one head of a layer that are kept beside rows in codes, for all sequences."""
    codec = CHANNEL_CODECS.get(row_type)
    if codec is None:
        return 0
    n = n_tail_groups(row_type, n_seq_max)
    return n * codec.cells * head_dim * _FLOAT_BYTES[carried(row_type)]


def n_tail_groups(row_type: KeyType, n_seq_max: int) -> int:
    """Groups of cells that are kept as they are beside rows in codes."""
    codec = CHANNEL_CODECS.get(row_type)
    return n_seq_max * N_TAIL // codec.cells if codec else 0
