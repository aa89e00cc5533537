"""KV dtypes: what cached keys and values may be kept as, and how many bytes they take."""

import dataclasses
from typing import Literal

from kvrt.errors import BadConfig

FloatType = Literal["f32", "bf16", "f16"]
KVDtype = Literal["f32", "bf16", "f16", "fp8", "int8", "q8_0", "int4", "int2"]
# Of all groups of layers, or of each; "auto" is that of the platform, `default_kv_dtype`.
KVDtypes = KVDtype | Literal["auto"] | tuple[KVDtype, ...]
# Keys alone may also be quantized by channel, several cells together.
ChannelDtype = Literal["kivi4", "kivi2"]
KeyDtype = Literal[KVDtype, ChannelDtype]
KeyDtypes = KeyDtype | Literal["auto"] | tuple[KeyDtype, ...]

FLOAT_DTYPES: dict[str, str] = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Codec:
    """How a key or value of one head is quantized to integers of a few bits, or to floats of 8.

    Attributes:
      bits: of an integer, 8, 4 or 2; those below 8 are packed side by side in bytes.
      floating: floats with four bits of exponent and three of mantissa (e4m3), kept as their bits,
        in place of integers.
      group: channels that share a scale; None is all of a head.
      affine: a group has a zero point, its least value, from which its integers count; else they
        are signed.
      scale: float type of scales and zero points.
      cells: consecutive cells that share a scale.
    """

    bits: int
    group: int | None
    affine: bool
    scale: FloatType
    cells: int = 1
    floating: bool = False

    @property
    def top(self) -> int:
        """The greatest integer or float."""
        if self.floating:
            return 448
        return 2**self.bits - 1 if self.affine else 2 ** (self.bits - 1) - 1

    @property
    def n_packed(self) -> int:
        """Integers in a byte."""
        return 8 // self.bits

    def sizes(self, head_dim: int) -> tuple[int, int]:
        """Bytes of integers, and number of groups, of a key or value of one head.

        Raises:
          BadConfig: the groups do not fill a head.
        """
        group = self.group or head_dim
        if head_dim % group or head_dim % self.n_packed:
            raise BadConfig(
                f"a KV dtype of {self.bits} bits has a scale for {group} channels, which do not "
                f"fill a head of {head_dim}; choose int8, or a float type"
            )
        return head_dim // self.n_packed, head_dim // group


CODECS: dict[str, Codec] = {
    "fp8": Codec(bits=8, group=None, affine=False, scale="f32", floating=True),
    "int8": Codec(bits=8, group=None, affine=False, scale="f32"),
    "q8_0": Codec(bits=8, group=32, affine=False, scale="f16"),
    "int4": Codec(bits=4, group=32, affine=True, scale="f16"),
    "int2": Codec(bits=2, group=32, affine=True, scale="f16"),
}
# Keys whose channels have a scale each, see `kvrt.store.per_channel`; cells that share it.
CELLS_OF_SCALE = 32
CHANNEL_CODECS: dict[str, Codec] = {
    name: Codec(bits=bits, group=1, affine=True, scale="f16", cells=CELLS_OF_SCALE)
    for name, bits in (("kivi4", 4), ("kivi2", 2))
}
# Tokens a sequence whose keys are kept as float16 beside those in `CHANNEL_CODECS`.
N_TAIL = 128


def default_kv_dtype(platform: str) -> KVDtype:
    """Default KV dtype of the command and of `CacheConfig`: f16 on CPU, bf16 elsewhere.

    On CPU float16 is as fast as float32 behind 250 tokens and faster behind 2,000
    (docs/quantization.md), and more exact than bfloat16; GPUs and TPUs multiply bfloat16.

    Args:
      platform: of JAX.
    """
    return "f16" if platform == "cpu" else "bf16"


def by_group(dtypes: KeyDtypes) -> tuple[str, ...]:
    """KV dtypes of some groups of layers, of all of them if one is given."""
    return (dtypes,) if isinstance(dtypes, str) else dtypes


def described(type_k: KeyDtypes, type_v: KVDtypes) -> str:
    """Both KV dtypes in a few words: "f16", or "int8 keys, f16 values"."""
    if type_k == type_v and isinstance(type_k, str):
        return type_k
    return f"{', '.join(by_group(type_k))} keys, {', '.join(by_group(type_v))} values"


def any_by_channel(dtypes: KeyDtypes) -> bool:
    """Whether keys of some layers are quantized by channel."""
    return any(t in CHANNEL_CODECS for t in by_group(dtypes))


def portable_dtype(kv_dtype: KeyDtype) -> KVDtype:
    """The KV dtype in which keys and values leave the store, for a session or another cell."""
    return "f16" if kv_dtype in ("kivi4", "kivi2") else kv_dtype


def portable_dtypes(dtypes: KeyDtypes) -> KVDtypes:
    """`portable_dtype` of all groups of layers or of each, of a cache that there is."""
    assert dtypes != "auto", "a cache has types"
    if isinstance(dtypes, str):
        return portable_dtype(dtypes)
    found: tuple[KVDtype, ...] = tuple(portable_dtype(t) for t in dtypes)
    return found


def n_tail_groups(kv_dtype: KeyDtype, n_seq_max: int, run: int = 0) -> int:
    """Groups of cells in the float16 tail; 0 without a tail.

    With a `run` there is one of each sequence, and one that is filled from a session.
    """
    codec = CHANNEL_CODECS.get(kv_dtype)
    if codec is None:
        return 0
    n_cells = (n_seq_max + 1) * run if run else n_seq_max * N_TAIL
    return n_cells // codec.cells
