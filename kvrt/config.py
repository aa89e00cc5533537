"""Configuration: frozen, hashable, checked when it is made.

`CacheConfig` is what a user chooses, `GroupSpec` what a model says of its attention layers,
`RecurrentSpec` of its recurrent ones, `RopeSpec` and `MaskSpec` what a group needs to rotate keys
and to see them.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

from kvrt.config_rules import (
    check_checkpoints,
    check_indexed,
    check_latent,
    check_shared,
    check_types,
)
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
from kvrt.select_spec import Indexed, Select, check_config
from kvrt.state_arrays import StateArray, check_state
from kvrt.whole_numbers import Count, take_whole_numbers

RopeMode = Literal["write", "read"]
OnStates = Literal["refuse", "keep"]
RopeLayout = Literal["norm", "neox"]
RopeScaling = Literal["none", "linear", "llama3", "ntk", "dynamic_ntk", "yarn", "longrope"]
MaskKind = Literal["full", "window", "chunked", "symmetric"]
Implementation = Literal["chunked", "reference", "pallas_gpu", "pallas_tpu", "mosaic_gpu"]
ExtendKind = Literal["cache", "paper"]

MAX_SEQUENCES = 4096
MAX_POS = 2**31 - 1


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise BadConfig(message)


def _check_finite(what: str, spec: Any) -> None:
    """Refuses NaN and infinities among the numbers of a configuration."""
    for f in dataclasses.fields(spec):
        value = getattr(spec, f.name)
        for x in value if isinstance(value, tuple) else (value,):
            ok = not isinstance(x, float) or math.isfinite(x)
            _check(ok, f"{f.name} of {what} is {x}; a finite number is wanted")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary embedding of one group of layers; `kvrt.store.rope` turns it into frequencies.

    Attributes:
      n_rot: rotated channels of a head, even; the rest pass through (partial rotary).
      base: frequency base (theta).
      layout: "norm" pairs channels (2i, 2i+1), "neox" pairs (i, i + n_rot/2).
      scaling: rule by which frequencies are stretched beyond the trained length.
      factor: stretch factor of the rule.
      n_ctx_orig: trained length before stretching; used by all rules but linear and ntk.
      low_freq_factor: llama3 only.
      high_freq_factor: llama3 only.
      freq_factors: per-pair divisors of the frequencies, [n_rot/2] (GGUF `rope_freqs`), or empty.
      short_factors: LongRoPE divisors up to n_ctx_orig, [n_rot/2].
      long_factors: LongRoPE divisors beyond n_ctx_orig, [n_rot/2].
      beta_fast: YaRN ramp start, in rotations.
      beta_slow: YaRN ramp end, in rotations.
      truncate: the ends of YaRN's ramp are whole pairs.
      magnitude: multiplies cos and sin of q and k once, at write; None takes the rule's own.
    """

    n_rot: int
    base: float = 10000.0
    layout: RopeLayout = "neox"
    scaling: RopeScaling = "none"
    factor: float = 1.0
    n_ctx_orig: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    freq_factors: tuple[float, ...] = ()
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    magnitude: float | None = None

    def __post_init__(self) -> None:
        """Refuses odd n_rot, factors of another length and rules without their parameters."""
        take_whole_numbers(self)
        _check(self.n_rot > 0 and self.n_rot % 2 == 0, f"n_rot is {self.n_rot}; even, above 0")
        _check(self.base > 0 and self.factor > 0, "rope base and factor must be above 0")
        _check(self.layout in get_args(RopeLayout), f"rope layout {self.layout!r} is unknown")
        _check(self.scaling in get_args(RopeScaling), f"rope scaling {self.scaling!r} is unknown")
        _check_finite("rope", self)
        for name in ("freq_factors", "short_factors", "long_factors"):
            n = len(getattr(self, name))
            _check(n in (0, self.n_rot // 2), f"{name} has {n} entries, {self.n_rot // 2} wanted")
        if self.scaling in ("llama3", "dynamic_ntk", "yarn", "longrope"):
            _check(self.n_ctx_orig > 0, f"rope scaling {self.scaling} needs n_ctx_orig above 0")
        if self.scaling == "longrope":
            _check(bool(self.short_factors and self.long_factors), "longrope needs both factors")

    @property
    def by_length(self) -> bool:
        """Whether frequencies follow from the size of the context."""
        return self.scaling in ("dynamic_ntk", "longrope")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskSpec:
    """Which cells a query may see, by position (owners are always checked as well).

    Attributes:
      kind: "full" is causal; "window" sees `size` positions including its own; "chunked" sees its
        own chunk of `size`; "symmetric" sees size // 2 on both sides and is not causal.
      size: window or chunk size in tokens; 0 for "full".
      n_sink: positions below n_sink stay visible to every later query.

    Source: llama.cpp `is_masked_swa`; arXiv:2309.17453 for sinks.
    """

    kind: MaskKind = "full"
    size: Count = 0
    n_sink: Count = 0

    def __post_init__(self) -> None:
        """Refuses a window without a size."""
        take_whole_numbers(self)
        _check(self.kind in get_args(MaskKind), f"mask {self.kind!r} is unknown")
        _check((self.kind == "full") == (self.size == 0), f"mask {self.kind} with size {self.size}")
        _check(self.size >= 0 and self.n_sink >= 0, "mask size and n_sink must not be negative")


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryTemperature:
    """Queries grow with their position: 1 + attn_scale * ln(1 + floor((pos + 1) / floor_scale)).

    Attributes:
      floor_scale: tokens between one step of the growth and the next.
      attn_scale: strength of the growth.

    Source: arXiv:2501.19399; transformers `modeling_llama4`.
    """

    floor_scale: float
    attn_scale: float

    def __post_init__(self) -> None:
        """Refuses steps of no length."""
        _check(self.floor_scale > 0, f"floor_scale is {self.floor_scale}; it must be above 0")
        _check_finite("query temperature", self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """Layers that share the shape of their keys, their rotation and their mask.

    Attributes:
      layers: indices of the model's layers that keep keys and values, ascending.
      n_kv_heads: kv heads (H).
      head_dim: channels of a head (D).
      rope: None for layers without positions (NoPE).
      mask: visibility rule.
      scale: factor of the scores; None is 1 / sqrt(head_dim).
      soft_cap: scores become cap * tanh(score / cap); None is off.
      temperature: how queries grow with their position; None is not at all.
      kv_of: further layers, which keep none and read those of one of `layers` that comes before
        them, as (layer, the layer that it reads), ascending: CLA, MLKV, Gemma 3n and 4.
      latent_rank: values are the first so many channels of the keys, which all query heads share,
        and RoPE begins behind them (MLA): head_dim numbers a token are kept and none twice. `scale`
        has to be given. 0 is keys and values apart.
      indexed: queries read the cells that an indexer scores highest (DeepSeek-V3.2); None is all.

    Source: arXiv:2405.12981 (CLA), arXiv:2406.09297 (MLKV), arXiv:2405.04434 (MLA).
    """

    layers: tuple[Count, ...]
    n_kv_heads: Count
    head_dim: Count
    rope: RopeSpec | None
    mask: MaskSpec = MaskSpec()
    scale: float | None = None
    soft_cap: float | None = None
    temperature: QueryTemperature | None = None
    kv_of: tuple[tuple[Count, Count], ...] = ()
    latent_rank: Count = 0
    indexed: Indexed | None = None

    def __post_init__(self) -> None:
        """Refuses empty groups, rotations wider than the head and layers that cannot share."""
        take_whole_numbers(self)
        _check(len(self.layers) > 0, "a group needs at least one layer")
        _check(self.n_kv_heads > 0 and self.head_dim > 0, "heads and head_dim must be above 0")
        _check_finite("a group", self)
        check_shared(self.layers, self.kv_of)
        check_latent(self.latent_rank, self.head_dim, self.n_kv_heads, self.scale)
        check_indexed(self)
        if self.rope is not None:
            n_rot, d = self.rope.n_rot, self.dim_k
            what = "the channels behind latent_rank," if self.latent_rank else "head_dim"
            _check(n_rot <= d, f"n_rot {n_rot} exceeds {what} {d}")

    @classmethod
    def from_map(cls, kv_of: Sequence[int], **rest: Any) -> "GroupSpec":
        """A group of len(kv_of) layers, of which layer i reads keys and values of kv_of[i].

        E.g. (0, 0, 2, 2): layers 0 and 2 keep theirs. `rest` are the other fields.
        """
        pairs = tuple(enumerate(kv_of))
        own = tuple(i for i, read in pairs if i == read)
        return cls(layers=own, kv_of=tuple((i, read) for i, read in pairs if i != read), **rest)

    @property
    def all_layers(self) -> tuple[int, ...]:
        """Layers that keep keys and values and those that read them, ascending."""
        return tuple(sorted((*self.layers, *(i for i, _ in self.kv_of))))

    @property
    def dim_k(self) -> int:
        """Channels of a head in the array of keys: all, or those behind the latent."""
        return self.head_dim - self.latent_rank

    @property
    def dim_v(self) -> int:
        """Channels of a head in the array of values, which is also that of the latent."""
        return self.latent_rank or self.head_dim

    @property
    def score_scale(self) -> float:
        """`scale`, or what it is where the model says nothing."""
        return self.head_dim**-0.5 if self.scale is None else self.scale


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentSpec:
    """Layers that keep a state a sequence instead of keys and values a token.

    Attributes:
      layers: indices of the model's layers, ascending.
      shapes: shapes of the arrays of one layer's state, e.g. convolution window and SSM state; all
        are float32 and zero before a sequence's first token.
      by_layer: arrays of the state of each layer in `layers`, where layers differ; `shapes` is
        empty then.
    """

    layers: tuple[Count, ...]
    shapes: tuple[tuple[Count, ...], ...] = ()
    by_layer: tuple[tuple[StateArray, ...], ...] = ()

    def __post_init__(self) -> None:
        """Refuses specs without layers, layers out of order and empty states."""
        take_whole_numbers(self)
        check_state(self.layers, self.shapes, self.by_layer)

    @property
    def arrays(self) -> tuple[tuple[StateArray, ...], ...]:
        """Arrays of the state of each layer in `layers`."""
        same = tuple(StateArray(shape=shape) for shape in self.shapes)
        return self.by_layer or (same,) * len(self.layers)


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

    ga_n: int
    ga_w: int
    kind: ExtendKind = "cache"

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
      select: decode reads some cells of layers with full attention, see `kvrt.select_spec`.
    """

    n_ctx: int = 4096
    n_seq_max: int = 1
    block_size: int = 256
    n_ubatch: int = 512
    type_k: KeyDtypes = "auto"
    type_v: KVDtypes = "auto"
    hadamard: bool = False
    rope: RopeMode = "write"
    attention: Literal["auto"] | Implementation | str = "auto"
    programs: Literal["auto", "by_layer", "whole"] = "auto"
    defrag_threshold: float = 0.1
    self_extend: SelfExtend | None = None
    swa_full: bool = False
    n_rs_seq: int = 0
    on_states: OnStates = "refuse"
    n_checkpoints: int = 0
    checkpoint_interval: int | None = None
    checkpoint_bytes: int | None = None
    select: Select | None = None

    def for_platform(self, platform: str) -> "CacheConfig":
        """The config with the KV dtypes that "auto" is on a platform of JAX."""
        usual = default_kv_dtype(platform)
        types = {x: usual for x in ("type_k", "type_v") if getattr(self, x) == "auto"}
        return dataclasses.replace(self, **types) if types else self

    @property
    def requantizes(self) -> bool:
        """Whether a K-shift rounds the keys that it moves to their KV dtype again."""
        return self.rope == "write" and set(by_group(self.type_k)) != {"f32"}

    def __post_init__(self) -> None:
        """Refuses sizes below one and unknown names."""
        take_whole_numbers(self)
        for name in ("n_ctx", "n_seq_max", "block_size", "n_ubatch"):
            value = getattr(self, name)
            _check(value >= 1, f"{name} is {value}; it must be at least 1")
        _check(self.n_ctx <= MAX_POS, f"n_ctx is {self.n_ctx}; the limit is {MAX_POS}")
        _check(self.n_seq_max <= MAX_SEQUENCES, f"n_seq_max is above {MAX_SEQUENCES}")
        check_types("type_k", self.type_k, get_args(KeyDtype))
        check_types("type_v", self.type_v, get_args(KVDtype))
        for name, codec in CHANNEL_CODECS.items():
            _check(
                name not in by_group(self.type_k) or self.block_size % codec.cells == 0,
                f"{name} keys share a scale by {codec.cells} cells, block_size is "
                f"{self.block_size}; make it a multiple of {codec.cells}",
            )
        _check(self.rope in ("write", "read"), f"rope is {self.rope!r}; 'write' or 'read'")
        is_quantized = any(t in CODECS for t in by_group(self.type_k))
        paper = self.self_extend is not None and self.self_extend.kind == "paper"
        _check(
            (self.rope == "write" and not paper) or not self.hadamard or not is_quantized,
            "hadamard transforms keys after RoPE, and with rope='read' or SelfExtend as in the "
            "paper RoPE comes last; use rope='write' without it, or keys of a float type",
        )
        _check(
            self.programs in ("auto", "by_layer", "whole"),
            f"programs is {self.programs!r}; 'auto', 'by_layer' or 'whole'",
        )
        _check(self.n_rs_seq >= 0, f"n_rs_seq is {self.n_rs_seq}; it must not be negative")
        _check(
            self.on_states in ("refuse", "keep"),
            f"on_states is {self.on_states!r}; 'refuse' or 'keep'",
        )
        check_checkpoints(self)
        check_config(self.select, self)
        threshold = self.defrag_threshold
        _check(0 <= threshold <= 1, f"defrag_threshold is {threshold}; it must lie in [0, 1]")
