"""Changes of a sequence as values, which each part of a cache applies in one function `apply`.

Parts are `Cells`, a group of layers, recurrent states, the token history, logits, and what they
make together. llama.cpp's names are kept beside them: `seq_rm` is `Remove`, `seq_cp` `Copy`,
`seq_keep` `Keep`, `seq_add` `Shift` and `seq_div` `Divide`. Ranges of positions are half-open,
[p0, p1), and p1=None is the end of the sequence.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Remove:
    """Takes positions [p0, p1) from a sequence; with seq_id None from all sequences."""

    seq_id: int | None
    p0: int = 0
    p1: int | None = None

    @property
    def seq_ids(self) -> tuple[int, ...]:
        """Sequences that it names."""
        return () if self.seq_id is None else (self.seq_id,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Copy:
    """Lets sequence dst share positions [p0, p1) of src."""

    src: int
    dst: int
    p0: int = 0
    p1: int | None = None

    @property
    def seq_ids(self) -> tuple[int, ...]:
        """Sequences that it names."""
        return (self.src, self.dst)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keep:
    """Removes every sequence but one."""

    seq_id: int

    @property
    def seq_ids(self) -> tuple[int, ...]:
        """Sequences that it names."""
        return (self.seq_id,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shift:
    """Moves positions [p0, p1) of a sequence by d; those that would be negative are removed."""

    seq_id: int
    p0: int = 0
    p1: int | None = None
    d: int

    @property
    def seq_ids(self) -> tuple[int, ...]:
        """Sequences that it names."""
        return (self.seq_id,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Divide:
    """Divides positions [p0, p1) of a sequence by d, rounding down."""

    seq_id: int
    p0: int = 0
    p1: int | None = None
    d: int

    @property
    def seq_ids(self) -> tuple[int, ...]:
        """Sequences that it names."""
        return (self.seq_id,)


SeqEdit = Remove | Copy | Keep | Shift | Divide
