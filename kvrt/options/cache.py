"""What a user chooses of a cache: frozen, hashable, checked when it is made."""

import dataclasses
import functools
from typing import Any, Literal, get_args

from kvrt.config import MAX_SEQUENCES
from kvrt.errors import BadConfig
from kvrt.kv_types import (
    CHANNEL_CODECS,
    CODECS,
    KeyDtype,
    KeyDtypes,
    KVDtype,
    KVDtypes,
    by_group,
    default_kv_dtype,
)
from kvrt.options.compose import check_together
from kvrt.options.option import check_limits, option
from kvrt.options.select import UNIT, Select
from kvrt.whole_numbers import take_whole_numbers

RopeMode = Literal["write", "read"]
OnStates = Literal["refuse", "keep"]
Implementation = Literal["chunked", "reference", "pallas_gpu", "pallas_tpu", "mosaic_gpu"]
ExtendKind = Literal["cache", "paper"]
_cache = functools.partial(option, group="Cache")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelfExtend:
    """Reading beyond the trained length: far tokens share positions, ga_n at a time.

    Attributes:
      ga_n: tokens that share a position (G); 1 changes nothing.
      ga_w: window in tokens (w).
      kind: "cache" moves the positions of cells, w tokens at a time, as llama.cpp's completion tool
        does: no cost but a K-shift a round, and between 0 and w tokens with positions of their own.
        "paper" leaves the cache alone and compares a query with keys less than w back by exact
        positions, with others by grouped ones: each key beyond is rotated when it is read, with
        rope="write" by the difference of its two positions.

    Source: arXiv:2401.01325, sec. 3; llama.cpp `-gan`, `-gaw`.
    """

    ga_n: int = option(
        dataclasses.MISSING,
        "SelfExtend: tokens that share a position, so that a model reads so many times "
        "further; 1 is off",
        "N",
        group="Context",
        flag="grp_attn_n",
        cli=1,
        short="gan",
        low=1,
        decides=("grp_attn_n",),
    )
    ga_w: int = option(
        dataclasses.MISSING,
        "SelfExtend: window of tokens with positions of their own",
        "N",
        group="Context",
        flag="grp_attn_w",
        cli=512,
        short="gaw",
        low=1,
        advanced=True,
        decides=("grp_attn_n",),
    )
    kind: ExtendKind = option(
        "cache",
        "SelfExtend by moving cells, without context shift, or as in the paper",
        group="Context",
        flag="self_extend",
        advanced=True,
        decides=("grp_attn_n",),
    )

    def __post_init__(self) -> None:
        """Refuses sizes below one and, for "cache", a window that groups do not fill."""
        take_whole_numbers(self)
        _check(self.ga_n >= 1 and self.ga_w >= 1, f"ga_n {self.ga_n}, ga_w {self.ga_w}; at least 1")
        _check(self.kind in ("cache", "paper"), f"SelfExtend {self.kind!r}; 'cache' or 'paper'")
        whole = self.kind == "paper" or self.ga_w % self.ga_n == 0
        _check(whole, f"ga_w {self.ga_w} must be a multiple of ga_n {self.ga_n}")

    def reach(self, n_ctx_train: int) -> int:
        """Tokens that a model trained for n_ctx_train can tell apart."""
        return max(n_ctx_train - self.ga_w, 0) * self.ga_n + self.ga_w


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """What a user chooses of a cache.

    Attributes:
      n_ctx: cells.
      n_seq_max: sequences that may live in the cache at once.
      block_size: consecutive cells that attention reads at a time.
      n_ubatch: tokens one prefill step runs at most.
      type_k: KV dtype of keys, see `kvrt.kv_types`; or one a group of attention layers, in the
        order of the model's `groups`. "auto" is f16 on CPU and bf16 on GPU and TPU, as of the
        command; the `config` of a Runtime or an Engine says which. kivi4 and kivi2 are for keys
        alone and quantize them by channel, see `kvrt.store.per_channel`.
      type_v: KV dtype of values, likewise.
      hadamard: keys and values are transformed before they are quantized, which spreads what lies
        in few channels over many, see `kvrt.store.hadamard`; those of float types stay as they are.
      rope: "write" stores keys rotated to pos - delta, "read" stores them unrotated.
      attention: implementation, see `kvrt.attention.attend`; or one that was registered. "auto"
        lets a Runtime or an Engine take the kernel of its platform where a self-test finds it
        right, else "chunked"; their `config` and `stats` say which it was.
      programs: "whole" is one program a step, "by_layer" several: one for runs of layers that are
        alike, which compile and load in a fraction of the time. The numbers are the same up to
        rounding. "auto" is by layer on CPU for models that tell their layers apart
        (`kvrt.KindedDecoder`), else whole; the `config` of a Runtime or an Engine says which.
      defrag_threshold: empty part of the first n_kv cells above which the cache is packed before
        the next step, as llama.cpp did at 0.1; caches below 2,048 cells never are. 1 is off.
      self_extend: how far tokens share positions; None is off.
      swa_full: windowed layers get n_ctx cells as well, so that a sequence can be cut anywhere;
        otherwise they keep what a window and a step need, and reuse cells.
      n_rs_seq: tokens by which a sequence can be cut back where layers are recurrent: each keeps as
        many states beside the newest one. In an engine's cells hits end there as well; its blocks
        refuse it.
      on_states: what a policy by position does where layers are recurrent. "refuse" is an error;
        "keep" drops from the layers with attention alone: states have all tokens.
      n_checkpoints: context checkpoints of a sequence at most: where windowed or recurrent layers
        can be cut back to although they have moved on. 0 is none; where every layer keeps all
        positions none is needed, and none is made.
      checkpoint_interval: checkpoints are made at its multiples, in tokens, and where an `append`
        of several tokens begins and ends; None is every n_ubatch, 0 only where appends do. Steps
        end at its multiples.
        An engine makes them of prompts: at its multiples, which in blocks are whole blocks,
        at `Request.borders`, and where prompts end.
      checkpoint_bytes: of the checkpoints of all sequences together, at most; None is no limit
        but their number. In blocks pools have room for so many, which all that is cached shares.
      select: decode reads some cells of layers with full attention, see `kvrt.options.select`.
    """

    n_ctx: int = option(
        4096,
        "cells of the context; 0 takes a session's, or the trained length as far as a quarter of "
        "the free memory holds it, and at least prompt and answer",
        "N",
        group="Context",
        cli=0,
        short="c",
        low=1,
        cli_low=0,
        made=True,
        limits=True,
        decides=None,
    )
    n_seq_max: int = option(
        1,
        "sequences at once; the others wait",
        "K",
        group="Serving",
        cli=16,
        low=1,
        most=MAX_SEQUENCES,
        aliases=("parallel",),
        limits=True,
        decides=None,
    )
    block_size: int = _cache(
        256,
        "cells that attention reads at a time",
        "N",
        low=1,
        advanced=True,
        made=True,
        limits=True,
        decides=None,
    )
    n_ubatch: int = _cache(
        512,
        "tokens of the prompt that a prefill step takes",
        "N",
        low=1,
        advanced=True,
        also=("n_batch",),
        decides=None,
    )
    type_k: KeyDtypes = _cache(
        "auto",
        "dtype of cached keys, or one for each layer group, by commas; if not given, a session's, "
        "else f16 on CPU, bf16 elsewhere",
        "TYPE",
        flag="cache_type_k",
        cli=None,
        cli_type=KeyDtype | tuple[KeyDtype, ...] | None,
        several=True,
        made=True,
        decides=("always",),
    )
    type_v: KVDtypes = _cache(
        "auto",
        "dtype of cached values, likewise",
        "TYPE",
        flag="cache_type_v",
        cli=None,
        cli_type=KVDtype | tuple[KVDtype, ...] | None,
        several=True,
        made=True,
        decides=("always",),
    )
    hadamard: bool = _cache(
        False,
        "Hadamard transform before keys and values become int8, q8_0, int4 or int2",
        advanced=True,
        decides=("always",),
    )
    rope: RopeMode = _cache(
        "write",
        "apply RoPE to keys when they are written, or when read: shifts are then exact",
        advanced=True,
        decides=("always",),
    )
    attention: Literal["auto"] | Implementation | str = _cache(
        "auto",
        "XLA (chunked) or a kernel; auto takes the device's kernel if a self-test passes "
        "(mosaic_gpu: Ampere and JAX 0.11.1 on)",
        "WAY",
        cli_type=Literal["auto", "chunked", "pallas_gpu", "pallas_tpu", "mosaic_gpu"],
        decides=("always",),
    )
    programs: Literal["auto", "by_layer", "whole"] = "auto"
    defrag_threshold: float = _cache(
        0.1,
        "defragment the cache when more than this share of its used part is empty; 1 is off",
        "X",
        flag="defrag_thold",
        most=1,
        advanced=True,
        decides=None,
    )
    self_extend: SelfExtend | None = None
    swa_full: bool = _cache(
        False,
        "windowed layers get all cells too; otherwise cells outside the window are reused",
        advanced=True,
        limits=True,
        decides=None,
    )
    n_rs_seq: int = _cache(
        0,
        "tokens by which a sequence can be cut back where layers are recurrent: so many states "
        "are kept beside the newest one",
        "N",
        advanced=True,
        decides=None,
    )
    on_states: OnStates = option(
        "refuse",
        "where layers are recurrent: refuse, and the text ends with the context; or keep, and a "
        "policy drops from the layers with attention alone: states have all tokens",
        group="Context",
        advanced=True,
    )
    n_checkpoints: int = _cache(
        0,
        "context checkpoints of a sequence at most, saved in its session: a prompt that differs "
        "late resumes at the nearest one, where layers are windowed or recurrent; 0 is none",
        "N",
        advanced=True,
        decides=None,
    )
    checkpoint_interval: int | None = _cache(
        None,
        "tokens from one to the next, at least those of a step, and whole blocks in paged mode; 0 "
        "makes them only where a prompt begins and ends, without the flag each step may",
        "N",
        advanced=True,
        decides=None,
    )
    checkpoint_bytes: int | None = _cache(
        None,
        "memory of all of them at most, such as 500MB",
        "SIZE",
        advanced=True,
        cli_type=str | None,
        size=True,
        decides=None,
    )
    select: Select | None = None

    def for_platform(self, platform: str) -> "CacheConfig":
        """The config with the KV dtypes that "auto" is on a platform of JAX."""
        usual = default_kv_dtype(platform)
        types = {x: usual for x in ("type_k", "type_v") if getattr(self, x) == "auto"}
        return dataclasses.replace(self, **types) if types else self

    @property
    def traits(self) -> dict[str, str]:
        """Names that the rules of `kvrt.options.compose` refer to, and their words."""
        keys, extend = by_group(self.type_k), self.self_extend
        types = {*keys, *by_group(self.type_v)}
        found = {
            "unrotated keys": self.rope == "read",
            "self_extend": extend and extend.kind,
            "divided positions": extend and extend.kind == "cache",
            "grouped positions": extend and extend.kind == "paper",
            "keys by channel": "/".join(t for t in keys if t in CHANNEL_CODECS),
            "rounded": types != {"f32"} and ", ".join(sorted(types)),
            "hadamard": self.hadamard,
            "hadamard keys": self.hadamard and any(t in CODECS for t in keys),
            "exact states" if self.on_states == "refuse" else "kept states": True,
            "n_rs_seq": self.n_rs_seq,
            "n_checkpoints": self.n_checkpoints,
        }
        of_select = self.select.traits if self.select else {}
        return {name: str(x) for name, x in found.items() if x} | of_select

    @property
    def requantizes(self) -> bool:
        """Whether a K-shift rounds the keys that it moves to their KV dtype again."""
        return self.rope == "write" and set(by_group(self.type_k)) != {"f32"}

    def __post_init__(self) -> None:
        """Refuses sizes below one and unknown names."""
        take_whole_numbers(self)
        check_limits(self)
        check_types("type_k", self.type_k, get_args(KeyDtype))
        check_types("type_v", self.type_v, get_args(KVDtype))
        for name, codec in CHANNEL_CODECS.items():
            _check(
                name not in by_group(self.type_k) or self.block_size % codec.cells == 0,
                f"{name} keys share a scale by {codec.cells} cells, block_size is "
                f"{self.block_size}; make it a multiple of {codec.cells}",
            )
        _check(self.rope in ("write", "read"), f"rope is {self.rope!r}; 'write' or 'read'")
        _check(
            self.programs in ("auto", "by_layer", "whole"),
            f"programs is {self.programs!r}; 'auto', 'by_layer' or 'whole'",
        )
        _check(
            self.on_states in ("refuse", "keep"),
            f"on_states is {self.on_states!r}; 'refuse' or 'keep'",
        )
        _check(
            self.select is None or self.block_size % UNIT == 0,
            f"select reads {UNIT} cells at a time, block_size is {self.block_size}; make it a "
            f"multiple of {UNIT}",
        )
        check_checkpoints(self)
        check_together(self.traits)


def check_checkpoints(config: Any) -> None:
    """Refuses an interval that no step ends at, limits below 0 and limits of nothing.

    Raises:
      BadConfig: the config has one of these.
    """
    n, interval, n_bytes = config.n_checkpoints, config.checkpoint_interval, config.checkpoint_bytes
    for name, value in (("checkpoint_interval", interval), ("checkpoint_bytes", n_bytes)):
        _check(value is None or n > 0, f"{name} is {value} without checkpoints; set n_checkpoints")
    _check(
        not interval or interval >= config.n_ubatch,
        f"checkpoint_interval is {interval} tokens, a step runs n_ubatch = {config.n_ubatch}; "
        "raise the one or lower the other, or give 0 for the ends of appends alone",
    )


def check_types(name: str, types: Any, known: tuple[str, ...]) -> None:
    """Refuses KV dtypes that are unknown, or none.

    Raises:
      BadConfig: `types` has one.
    """
    _check(isinstance(types, str | tuple) and len(types) > 0, f"{name} is {types!r}; give a type")
    if types == "auto":
        return
    for found in (types,) if isinstance(types, str) else types:
        _check(found in known, f"{name} is {found!r}; one of auto, {', '.join(known)}")


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise BadConfig(message)
