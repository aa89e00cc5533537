"""The flags of how keys, values and states are kept."""

import functools
from typing import Any, Literal

from kvrt.cli.flags.declare import Options, flag, flag_group
from kvrt.cli.report.size import parse_size
from kvrt.config import RopeMode
from kvrt.errors import UsageError
from kvrt.files import kinds
from kvrt.kv_types import KeyDtype, KVDtype
from kvrt.select_spec import LabelDtype

_cache = functools.partial(flag, "Cache")
_more = functools.partial(flag, "Cache", advanced=True)


@flag_group
class KVFlags(Options):
    """What decides how many bytes the KV cache takes."""

    cache_type_k: KeyDtype | tuple[KeyDtype, ...] | None = _cache(
        None,
        "dtype of cached keys, or one for each layer group, by commas; if not given, a session's, "
        "else f16 on CPU and bf16 on GPU and TPU",
        "TYPE",
        several=True,
    )
    cache_type_v: KVDtype | tuple[KVDtype, ...] | None = _cache(
        None, "dtype of cached values, likewise", "TYPE", several=True
    )
    hadamard: bool = _more(
        False, "Hadamard transform before keys and values become fp8, int8, q8_0, int4 or int2"
    )
    swa_full: bool = _more(
        False, "windowed layers get all cells too; otherwise cells outside the window are reused"
    )


@flag_group
class StepFlags(Options):
    """How much a step does."""

    n_ubatch: int = _more(512, "tokens of the prompt that a prefill step takes", "N", low=1)


@flag_group
class AttentionFlags(Options):
    """When RoPE is applied to keys, and what computes attention."""

    rope: RopeMode = _more(
        "write", "apply RoPE to keys when they are written, or when read: shifts are then exact"
    )
    attention: Literal["auto", "chunked", "pallas_gpu", "pallas_tpu", "mosaic_gpu"] = _cache(
        "auto",
        "XLA (chunked) or a kernel; auto takes the device's kernel if a self-test passes "
        "(mosaic_gpu: Ampere and JAX 0.11.1 on)",
        "WAY",
    )


@flag_group
class RollbackFlags(Options):
    """How far recurrent layers can be cut back."""

    n_rs_seq: int = _more(
        0,
        "tokens by which a sequence can be cut back where layers are recurrent: so many states "
        "are kept beside the newest one",
        "N",
    )


@flag_group
class DefragFlags(Options):
    """When a fragmented cache is packed."""

    defrag_thold: float = _more(
        0.1,
        "defragment the cache when more than this share of its used part is empty; 1 is off",
        "X",
        most=1,
    )


@flag_group
class CacheFlags(RollbackFlags, DefragFlags, StepFlags, AttentionFlags, KVFlags):
    """How the cache is kept."""

    block_size: int = _more(256, "cells that attention reads at a time", "N", low=1)


@flag_group
class PlacementFlags(Options):
    """How a text gets its cells."""

    blocks: bool = _more(
        False,
        "place the text in blocks of --block_size cells, as paged mode does, and keep it there in "
        "its session; needs --nocontext_shift",
    )


@flag_group
class CheckpointFlags(Options):
    """Where windowed and recurrent layers can be cut back to."""

    n_checkpoints: int = _more(
        0,
        "context checkpoints of a sequence at most, saved in its session: a prompt that differs "
        "late resumes at the nearest one, where layers are windowed or recurrent; 0 is none",
        "N",
        low=0,
    )
    checkpoint_interval: int | None = _more(
        None,
        "tokens from one to the next, at least those of a step, and whole blocks in paged mode; 0 "
        "makes them only where a prompt begins and ends, without the flag each step may",
        "N",
        low=0,
    )
    checkpoint_bytes: str | None = _more(
        None, "memory of all of them at most, such as 500MB", "SIZE"
    )

    def max_checkpoint_bytes(self) -> int | None:
        """Their budget in bytes; None where it was left out."""
        if self.checkpoint_bytes is None:
            return None
        return parse_size("--checkpoint_bytes", self.checkpoint_bytes)

    def check(self) -> None:
        """Refuses a size that is none."""
        super().check()
        self.max_checkpoint_bytes()


@flag_group
class SelectFlags(Options):
    """Which cells a decode step reads."""

    select: Literal["none", "quest", "double_sparsity"] = _more(
        "none",
        "each sampled token reads --select_cells cells of a layer and kv head, chosen by labels "
        "beside the keys, and of a longer text the answer is an approximation; prompts read all",
        "NAME",
    )
    select_cells: int = _more(1024, "with --select: cells read, a multiple of 16", "N", low=1)
    select_sink: int = _more(4, "with --select: first positions that are always read", "N")
    select_recent: int = _more(16, "with --select: newest positions that are always read", "N")
    select_dense: int = _more(2, "with --select: first layers that read all", "N")
    select_channels: str | None = _more(
        None,
        "with --select double_sparsity: the file of heavy channels of this model, which "
        "scripts/calibrate_channels.py writes",
        "FILE",
        file=kinds.INPUT,
    )
    select_labels: LabelDtype = _more(
        "f32", "with --select double_sparsity: dtype of labels", "TYPE"
    )
    select_by_cell: bool = _more(
        False, "with --select double_sparsity: choose cells one by one, not in units of 16"
    )

    def check(self) -> None:
        """Refuses sizes of no sparse read, and channels that none or too many ask for."""
        super().check()
        given = sorted(x for x in self.given if x.startswith("select_"))
        if self.select == "none" and given:
            raise UsageError(f"--{given[0]} sizes sparse reads; add --select quest")
        by_channel = {"select_channels", "select_labels", "select_by_cell"} & self.given
        if self.select == "quest" and by_channel:
            raise UsageError(
                f"--{min(by_channel)} is for --select double_sparsity; leave it out, or take that"
            )
        if self.select == "double_sparsity" and self.select_channels is None:
            raise UsageError(
                "--select double_sparsity compares heavy channels of the model; add "
                "--select_channels FILE, which scripts/calibrate_channels.py writes"
            )

    @property
    def select_flags(self) -> dict[str, Any]:
        """What decides which cells are read; empty where all are."""
        names = ("select", "select_cells", "select_sink", "select_recent", "select_dense")
        if self.select == "double_sparsity":
            names += ("select_channels", "select_labels", "select_by_cell")
        return {} if self.select == "none" else {name: getattr(self, name) for name in names}
