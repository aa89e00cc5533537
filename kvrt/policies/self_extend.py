"""SelfExtend inside the cache: positions of old tokens are divided, those behind them move up.

Of w tokens with positions of their own, n at a time come to share one; what follows them closes
the gap. Keys rotate by the difference alone, whatever the path there, in one K-shift a round.

Source: llama.cpp `tools/completion` (ga_i, ga_n, ga_w); its `seq_div` rotates keys the wrong way.
"""

import dataclasses

from kvrt.cells.edits import Divide, SeqEdit, Shift
from kvrt.options.cache import CacheConfig, SelfExtend
from kvrt.policies.schedule import Due, SeqCounts


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExtendSchedule:
    """SelfExtend of kind "cache", and where a prompt is cut.

    Attributes:
      extend: n, at least 2, and w.
      n_step: tokens of a step: within a prompt rounds wait for a multiple of it.
    """

    extend: SelfExtend
    n_step: int

    drops, n_most, n_keep = False, None, 0

    @property
    def group(self) -> int:
        """Positions that a round leaves of w."""
        return self.extend.ga_w // self.extend.ga_n

    def n_gone(self, ga_i: int) -> int:
        """Positions that rounds took which have divided those up to ga_i."""
        return ga_i * (self.extend.ga_n - 1)

    def ga_i(self, n_gone: int) -> int:
        """Positions up to which rounds have divided which took so many."""
        return n_gone // (self.extend.ga_n - 1)

    def due(self, counts: SeqCounts) -> Due:
        """See `Schedule`: rounds until fewer than w tokens have positions of their own."""
        n, w, s, group = self.extend.ga_n, self.extend.ga_w, counts.seq_id, self.group
        ga_i, n_past = self.ga_i(counts.n_gone), counts.n_past
        edits: list[SeqEdit] = []
        while n_past >= ga_i + w:
            # Moved up by n_gone, tokens are at their number in the history: so groups of n align.
            up = self.n_gone(ga_i)
            edits += [
                Shift(seq_id=s, p0=ga_i, p1=n_past, d=up),
                Divide(seq_id=s, p0=ga_i + up, p1=ga_i + up + w, d=n),
                Shift(seq_id=s, p0=ga_i + up + w, p1=n_past + up, d=group - up - w),
            ]
            n_past, ga_i = n_past - w + group, ga_i + group
        n_until = counts.n_computed + ga_i + w - n_past
        if n_until < counts.n_prompt:
            n_until = min(-(-n_until // self.n_step) * self.n_step, counts.n_prompt)
        return Due(edits=edits, n_until=n_until)


def extend_schedule(config: CacheConfig) -> ExtendSchedule | None:
    """The schedule of a cache; None where no round would ever move a position."""
    extend = config.self_extend
    if extend is None or extend.kind != "cache" or extend.ga_n == 1:
        return None
    return ExtendSchedule(extend=extend, n_step=config.n_ubatch)
