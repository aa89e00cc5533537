"""How tokens are sampled."""

import dataclasses
import functools

from kvrt.options.option import check_limits, option
from kvrt.whole_numbers import take_whole_numbers

RANDOM = -1  # as a flag's seed
_sampling = functools.partial(option, group="Sampling", line=True)
# In digests of results from the first version on, at their defaults too.
_first = functools.partial(_sampling, decides=("always",))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is sampled.

    Attributes:
      temp: temperature; 0 is greedy.
      top_k: keep the k greatest logits; 0 is off.
      top_p: keep the smallest set with at least this probability; 1 is off.
      min_p: drop tokens below this share of the greatest probability; 0 is off.
      repeat_penalty: divides positive and multiplies negative logits of recent tokens; 1 is off.
      repeat_last_n: tokens that count as recent.
      seed: of `jax.random`'s threefry2x32, whatever generator the process has by default.
    """

    temp: float = _first(0.0, "temperature; 0 takes the most probable token", "X", cli=0.8)
    top_k: int = _first(0, "sample from the K most probable tokens; 0 is off", "K", cli=40)
    top_p: float = _first(
        1.0, "sample from the fewest tokens of this probability; 1 is off", "P", most=1, cli=0.95
    )
    min_p: float = _first(
        0.0, "leave out tokens below this share of the best; 0 is off", "P", most=1, cli=0.05
    )
    repeat_penalty: float = _first(1.0, "make recent tokens less probable; 1 is off", "X", low=1e-6)
    repeat_last_n: int = _first(64, "how many tokens are recent", "N", most=1 << 20)
    seed: int = _first(
        0,
        "the same seed gives the same text; -1 takes a random one, and says which",
        "N",
        cli_low=RANDOM,
        most=2**32 - 1,
    )

    def __post_init__(self) -> None:
        """Refuses values outside their range, and NaN."""
        take_whole_numbers(self)
        check_limits(self)
