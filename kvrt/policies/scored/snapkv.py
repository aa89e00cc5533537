"""SnapKV: the tokens that the last queries attend to, with their neighbours."""

import dataclasses

import jax.numpy as jnp

from kvrt.arrays import Array, Float
from kvrt.attention.scored.policy import ScoredPolicy, Seen, Tap
from kvrt.errors import BadConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapKV(ScoredPolicy):
    """Scores are the attention of the last `window` queries, averaged over neighbouring tokens.

    Attributes:
      window: queries before an eviction that count; their own tokens stay.
      kernel: tokens that a score is averaged over, odd.

    Source: arXiv:2404.14469, sec. 4; the defaults of its code.
    """

    n_sink: int = 0
    window: int = 32
    kernel: int = 5

    def __post_init__(self) -> None:
        """Refuses kernels without a middle."""
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise BadConfig(f"kernel is {self.kernel}; an odd number above 0 is wanted")
        ScoredPolicy.__post_init__(self)

    @property
    def recent(self) -> int:
        """The window."""
        return self.window if self.n_recent is None else self.n_recent

    @property
    def observed_by(self) -> Tap:
        """The window's queries."""
        return Tap(horizon=self.window)

    def score(self, seen: Seen) -> Float[Array, "H S"]:
        """Means over neighbours; what the window gives its own tokens is no neighbour's."""
        before = seen.pos < seen.n_past - self.window
        return pooled(jnp.where(before, seen.sums, 0.0), self.kernel)


def pooled(x: Float[Array, "H S"], kernel: int) -> Float[Array, "H S"]:
    """Means over `kernel` neighbours; beyond the ends there are zeros."""
    half, n = kernel // 2, x.shape[1]
    wide = jnp.pad(x, ((0, 0), (half, half)))
    return sum((wide[:, i : i + n] for i in range(kernel)), jnp.zeros_like(x)) / kernel
