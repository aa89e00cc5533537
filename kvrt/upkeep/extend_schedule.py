"""When SelfExtend in the cache moves a sequence that shares its cells with nobody.

All follows from counts, as in `policies.context`: so it is the same in whatever chunks a prompt is
computed, whoever else is served, and when a sequence is computed again.
"""

import dataclasses

from kvrt.cells.edits import SeqEdit
from kvrt.config import SelfExtend
from kvrt.upkeep.self_extend import due_rounds


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExtendAdvance:
    """The rounds before a sequence goes on, and how far it then comes.

    Attributes:
      edits: the changes of positions, in their order.
      n_rounds: rounds.
      n_folded: positions by which the sequence got shorter.
      n_until: tokens of the sequence up to which no other round is due.
    """

    edits: tuple[SeqEdit, ...]
    n_rounds: int
    n_folded: int
    n_until: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExtendSchedule:
    """SelfExtend of kind "cache", and where a prompt is cut.

    Attributes:
      extend: n, at least 2, and w.
      n_step: tokens of a step: within a prompt rounds wait for a multiple of it, as in a Runtime.
    """

    extend: SelfExtend
    n_step: int

    def n_first(self, n_prompt: int) -> int:
        """Tokens of a sequence at which its first round is due."""
        return self.advance(0, n_prompt, 0, 0).n_until

    def advance(self, seq_id: int, n_prompt: int, n_computed: int, n_folded: int) -> ExtendAdvance:
        """The rounds that are due before the next tokens of a sequence.

        Args:
          seq_id: its number in the edits.
          n_prompt: tokens of its prompt.
          n_computed: tokens that were computed: none, or as many as `n_until` said last.
          n_folded: positions that earlier rounds took.
        """
        n, w = self.extend.ga_n, self.extend.ga_w
        group, folds = w // n, w // n * (n - 1)
        ga_i, n_past = n_folded // folds * group, n_computed - n_folded
        edits, reached = due_rounds(seq_id, n_past, ga_i, self.extend)
        n_rounds = (reached - ga_i) // group
        n_until = n_computed + reached + w - (n_past - n_rounds * folds)
        if n_until < n_prompt:
            n_until = min(-(-n_until // self.n_step) * self.n_step, n_prompt)
        return ExtendAdvance(
            edits=tuple(edits), n_rounds=n_rounds, n_folded=n_rounds * folds, n_until=n_until
        )
