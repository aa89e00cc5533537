"""What a model says of its layers: frozen, hashable, checked when it is made.

`GroupSpec` is of attention layers, `RecurrentSpec` of recurrent ones, `RopeSpec` and `MaskSpec`
what a group needs to rotate keys and to see them. What a user chooses is in `kvrt.options`.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

from kvrt.config_rules import check_indexed, check_latent, check_shared
from kvrt.errors import BadConfig
from kvrt.state_arrays import StateArray, check_state
from kvrt.whole_numbers import Count, take_whole_numbers

RopeLayout = Literal["norm", "neox"]
RopeScaling = Literal["none", "linear", "llama3", "ntk", "dynamic_ntk", "yarn", "longrope"]
MaskKind = Literal["full", "window", "chunked", "symmetric"]

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
class Indexed:
    """What layers have whose queries read the cells that an indexer scores highest.

    Each query, of a prompt too, chooses one set for all heads; of equal scores the lower position.
    Index keys lie in cells of a group of their own, as that of any layer: what RoPE leaves alone is
    its latent.

    Attributes:
      n_cells: tokens that a query reads at most, itself perhaps among them.
      keys_of: by layer, the layer that keeps its index keys, ascending.

    Source: DeepSeek-V3.2-Exp `inference/model.py`; transformers `modeling_deepseek_v32`.
    """

    n_cells: Count
    keys_of: tuple[tuple[Count, Count], ...]

    def __post_init__(self) -> None:
        """Refuses an indexer that chooses nothing."""
        take_whole_numbers(self)
        _check(self.n_cells >= 1, f"n_cells of indexed is {self.n_cells}; it must be at least 1")

    def keys_layer(self, layer: int) -> int:
        """The layer that keeps the index keys of a layer."""
        return dict(self.keys_of)[layer]


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
    def traits(self) -> dict[str, str]:
        """What of these layers does not go with everything, see `kvrt.options.compose`."""
        found = {"indexer": ""} if self.indexed else {}
        found |= {"latent": ""} if self.latent_rank else {}
        if self.mask.kind == "full" and self.latent_rank:
            found["full latent"] = ""
        if self.mask.kind == "full" and self.kv_of:
            layer, read = self.kv_of[0]
            says = f"layer {layer} reads the keys and values of layer {read}"
            found["full layer that reads"] = says
        return found

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


def layer_traits(
    groups: Sequence[GroupSpec], recurrent: RecurrentSpec | None, n_dense: int = 0
) -> dict[str, str]:
    """Traits of a model's layers together, as `GroupSpec.traits`.

    Args:
      groups: its attention layers.
      recurrent: its layers with a state.
      n_dense: first layers that do not count among those that see every position.
    """
    found = {name: words for group in groups for name, words in group.traits.items()}
    own = [g for g in groups if g.mask.kind != "full" or g.rope is None]
    if own:
        found["some windows" if len(own) < len(groups) else "only windows"] = str(own[0].layers[0])
    if not any(g.mask.kind == "full" and g.layers[-1] >= n_dense for g in groups):
        found["no full layer"] = str(n_dense)
    if recurrent is None:
        return found | {"no states": ""}
    return found | {"some states" if groups else "only states": ""}


def __getattr__(name: str) -> object:
    """Refuses names that have a successor."""
    if name in ("CacheConfig", "SelfExtend"):
        raise ImportError(f"kvrt.config.{name} is kvrt.{name} since 2026-11-26")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
