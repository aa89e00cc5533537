"""What a policy by score is: what it is shown of a layer, and what it keeps of it.

Each kv head of a layer has a fixed number of slots. Tokens come in until all are taken; then the
`budget` tokens of the greatest scores stay, and `interval` slots are free again. So which tokens
stay depends on the tokens alone, never on how steps divide them.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from kvrt.arrays import Array, Bool, Float, Int32, state
from kvrt.attention.scored.head_slots import QuerySums
from kvrt.config import GroupSpec
from kvrt.errors import BadConfig
from kvrt.files.class_source import class_identity
from kvrt.options.policies import ScoreSizes
from kvrt.whole_numbers import take_whole_numbers

# Some kv heads, ascending, and the tokens that each of them keeps.
HeadPart = tuple[tuple[int, ...], int]
_MOST = float(np.finfo(np.float32).max)
# The least score but one: NaN gets the least, so that it ranks below every number.
_LEAST_NUMBER = float(np.nextafter(np.float32(-_MOST), np.float32(0)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tap:
    """What is summed up of attention while tokens come in, for the next eviction.

    Attributes:
      horizon: queries before an eviction that count, and sums begin anew behind it; None counts
        every query since a token came in, over all evictions.
      decay: what a sum is multiplied by at each further query.
      greatest: whether the greatest that a query gave stands in the place of the sum.
      queries: whether mean and covariance of the queries without RoPE are kept, sinks left out.
    """

    horizon: int | None = None
    decay: float = 1.0
    greatest: bool = False
    queries: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reads:
    """Which of the tokens that it keeps a kv head reads, where it does not read them all.

    A query at a position that `every` divides reads all, and it alone counts for scores. Those of
    the greatest scores are read until the next such query, beside the newest of each query.

    Attributes:
      n_read: tokens that a query reads at most, a multiple of `every`: a text of no more is read
        as if all were.
      n_recent: how many of them are the newest, `every` or more: so none is missed before it was
        scored.
      every: positions from one that reads all to the next.
    """

    n_read: int
    n_recent: int
    every: int

    def __post_init__(self) -> None:
        """Refuses numbers with which tokens would be forgotten for a while."""
        take_whole_numbers(self)
        _check(self.every >= 1, f"refresh_every is {self.every}; it must be at least 1")
        _check(
            self.every <= self.n_recent < self.n_read,
            f"with n_read {self.n_read} each query reads the {self.n_recent} newest tokens, and "
            f"one every {self.every} reads all, so what comes between would not be read: raise "
            "n_read, or lower refresh_every",
        )
        _check(
            self.n_read % self.every == 0,
            f"n_read is {self.n_read}; make it a multiple of refresh_every, {self.every}",
        )


@state
class Observed:
    """A step's queries against all that they may see, before it is summed over queries.

    Attributes:
      logits: scaled, optionally capped products; finite everywhere. `[H, G, T, S]`
      probabilities: their softmax, 0 where a query does not see a token. `[H, G, T, S]`
      visible: which tokens a query sees. `[H, 1, T, S]`
      pos: positions of the tokens. `[H, S]`
    """

    logits: Float[Array, "H G T S"]
    probabilities: Float[Array, "H G T S"]
    visible: Bool[Array, "H 1 T S"]
    pos: Int32[Array, "H S"]


@state
class Seen:
    """What a policy scores, when tokens have to go.

    Attributes:
      keys: as they are compared, with RoPE applied, float32. `[H, S, D]`
      values: float32. `[H, S, Dv]`
      pos: positions, ascending in each head; -1 in slots without a token, which come first but
        for free ones, and whose score does not matter. `[H, S]`
      sums: what `observe` gave, summed over queries and over the query heads of a kv head, or
        the greatest of it. `[H, S]`
      n_past: the position of the next token.
      next_place: what it is compared by: n_past, or with `close_up` its place.
      queries: None unless the tap asks for them.
      group: the layer's group, static.
      n_ctx: cells of the cache where the group's rule of RoPE depends on them, else 0; static.
    """

    keys: Float[Array, "H S D"]
    values: Float[Array, "H S Dv"]
    pos: Int32[Array, "H S"]
    sums: Float[Array, "H S"]
    n_past: Int32[Array, ""]
    next_place: Int32[Array, ""]
    queries: QuerySums | None = None
    group: GroupSpec = dataclasses.field(metadata=dict(static=True))
    n_ctx: int = dataclasses.field(metadata=dict(static=True))

    @property
    def taken(self) -> Bool[Array, "H S"]:
        """Slots with a token: all, unless heads share a budget."""
        return self.pos >= 0

    @property
    def n_queries(self) -> Float[Array, "H S"]:
        """Queries that could see each token since it came in, its own among them."""
        return (self.n_past - self.pos).astype(jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoredPolicy(ScoreSizes, abc.ABC):
    """Keeps, in each kv head of each layer, the tokens of the greatest scores.

    A policy of one's own is a frozen dataclass with `score`; `observe` and `tap` where it needs
    more than sums of probabilities. Sessions, tiers and chunks belong to its module and name, its
    fields, its `version` and the source of its class: an edit of the class makes it another policy.
    What a score takes from outside its class (functions, global values) is not in that source:
    change `version` with it.

    Attributes:
      budget: tokens that a kv head keeps after an eviction, protected ones included; layers may
        have other numbers with the same mean, see `pyramid`.
      n_sink: first positions that are never evicted.
      n_recent: newest positions that are not evicted; None is what the policy takes.
      interval: tokens between two evictions; 1 evicts one token for each that comes.
      pyramid: how many times the mean budget the first layer has, and the last as much less;
        layers between them lie on a line, in at most four sizes. 1 gives all layers the same.
      head_share: the part of the budget that each kv head of a layer keeps at least; what is left
        of all heads goes to the greatest scores of any. 1 gives all heads the same. Below it each
        head has slots for all that it could get, so that no memory is saved: it is for studies.
      close_up: keys are compared by their places among the tokens that are kept, not by positions,
        so that a text may be many times as long as those that the model was trained with.

    Source: arXiv:2406.02069 (PyramidKV) for the pyramid; arXiv:2407.11550 (Ada-KV, which has 0.2)
    for the share; arXiv:2309.17453 (StreamingLLM), sec. 3.2, for places.
    """

    n_sink: int = 4
    n_recent: int | None = None
    pyramid: float = 1.0
    head_share: float = 1.0

    tap: ClassVar[Tap] = Tap()
    # Told apart by sessions, tiers and chunks; any text.
    version: ClassVar[str] = ""
    # Whether a prompt is scored when it was read whole, by `kvrt.runtime.compress` alone.
    reads_whole: ClassVar[bool] = False

    def __init_subclass__(cls, **rest: Any) -> None:
        """Reads the source now: the file may be edited before a session is saved."""
        super().__init_subclass__(**rest)
        class_identity(cls)

    def __post_init__(self) -> None:
        """Refuses budgets without a token to choose, and numbers below their least."""
        take_whole_numbers(self)
        _check(self.n_sink >= 0, f"n_sink is {self.n_sink}; it must not be negative")
        _check(self.interval >= 1, f"interval is {self.interval}; it must be at least 1")
        _check(1 <= self.pyramid < 2, f"pyramid is {self.pyramid}; from 1 to below 2")
        _check(0 < self.head_share <= 1, f"head_share is {self.head_share}; from above 0 to 1")
        _check(self.recent >= 1, f"n_recent is {self.recent}; the newest token always stays")
        least = self.n_sink + self.recent + 1
        smallest = min(self.budgets(4))
        _check(
            smallest >= least,
            f"a budget of {smallest} tokens a head with n_sink {self.n_sink} and n_recent "
            f"{self.recent} leaves none to choose; give {least} or more, or protect fewer",
        )
        tap, horizon = self.observed_by, self.observed_by.horizon
        _check(
            self.reads is None or (horizon is None and not tap.queries),
            f"{type(self).__name__} looks at other queries than those that read all tokens; leave "
            "n_read out",
        )
        _check(
            self.reads is None or not self.close_up,
            "close_up compares keys by their places among all that are kept, and n_read reads some "
            "of them; leave one of the two out",
        )
        _check(
            horizon is None or 1 <= horizon <= self.interval,
            f"scores of the last {horizon} queries before an eviction, and one every "
            f"{self.interval} tokens; raise interval, or count fewer",
        )

    @property
    def traits(self) -> dict[str, str]:
        """Names that the rules of `kvrt.options.compose` refer to, and their words."""
        name = type(self).__name__
        return {"policy by score": name} | ({"close_up": name} if self.close_up else {})

    @property
    def recent(self) -> int:
        """Newest positions that are not evicted."""
        return 32 if self.n_recent is None else self.n_recent

    @property
    def observed_by(self) -> Tap:
        """The tap of these settings."""
        return self.tap

    @property
    def reads(self) -> Reads | None:
        """Which kept tokens a query reads; None reads them all."""
        return None

    @property
    def n_whole(self) -> int:
        """Tokens of a text at its beginning, each of which reads all before it."""
        n = min(self.budgets(4)) + self.interval
        return n if self.reads is None else min(n, self.reads.n_read)

    def n_least(self, budget: int) -> int:
        """Tokens of its layer's budget that a kv head keeps whatever they score."""
        return int(self.head_share * budget)

    def budgets(self, n_layers: int) -> tuple[int, ...]:
        """Tokens that a kv head of each layer keeps; their mean is at most `budget`."""
        if self.pyramid == 1 or n_layers < 2:
            return (self.budget,) * n_layers
        steps = min(4, n_layers)
        at = [i * steps // n_layers for i in range(n_layers)]
        part = [self.pyramid + i * 2 * (1 - self.pyramid) / (steps - 1) for i in range(steps)]
        mean = sum(part[i] for i in at) / n_layers
        return tuple(int(self.budget * part[i] / mean) for i in at)

    def split(self, layer: int, n_kv_heads: int) -> tuple[HeadPart, ...]:
        """The heads of a layer of the model by what they keep; () where all keep the budget."""
        return ()

    def observe(self, seen: Observed) -> Float[Array, "H G T S"]:
        """What a query adds to the sum of each token that it sees; 0 for all others."""
        return seen.probabilities

    @abc.abstractmethod
    def score(self, seen: Seen) -> Float[Array, "H S"]:
        """A number a token and kv head; of equal ones the earlier token stays, NaN goes first."""


def ranked(scores: Float[Array, "..."]) -> Float[Array, "..."]:
    """Scores as finite numbers, NaN below all others."""
    numbers = jnp.clip(scores, _LEAST_NUMBER, _MOST)
    return jnp.where(jnp.isnan(scores), -_MOST, numbers)


def real_numbers(
    method: Callable[[Any], Any], seen: Any, shape: tuple[int, ...]
) -> Float[Array, "..."]:
    """What a method of a policy gives, in float32.

    Raises:
      BadConfig: its shape is another, and would be broadcast, or its type is none of numbers.
    """
    found = method(seen)
    dtype, sizes = getattr(found, "dtype", None), getattr(found, "shape", ())
    _check(
        dtype is not None and sizes == shape and not jnp.iscomplexobj(found),
        f"{method.__qualname__} gives {dtype or type(found).__name__}{list(sizes)}, real numbers "
        f"of shape {list(shape)} are wanted; give one for each of "
        f"{'seen.sums' if len(shape) == 2 else 'seen.probabilities'}",
    )
    return jnp.asarray(found).astype(jnp.float32)


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise BadConfig(message)
