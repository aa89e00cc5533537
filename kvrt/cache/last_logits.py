"""What the next token of each sequence is drawn from, and where its last generation stopped."""

from collections import deque
from collections.abc import Mapping

from kvrt.arrays import Array
from kvrt.errors import BadToken


class ResumePoint:
    """Where a generation is: its newest token, which is not in the cache, and what came before.

    Attributes:
      token: the newest one that it gave; None before the first.
      pos: where that one would stand.
      n_sampled: tokens that it and those that it went on from have given.
      recent: the newest tokens before the next draw, for the repeat penalty.
    """

    def __init__(self, n_sampled: int, recent: deque[int]):
        """It has given nothing yet."""
        self.token: int | None = None
        self.pos, self.n_sampled, self.recent = -1, n_sampled, recent

    def gave(self, token: int) -> None:
        """It gives its next token."""
        self.token = token
        self.pos += 1
        self.n_sampled += 1
        self.recent.append(token)


class LastLogits:
    """Logits of the newest token of each sequence, for the draw that follows."""

    def __init__(self):
        """None yet."""
        self._of: dict[int, tuple[int, Array]] = {}
        self._left_off: dict[int, ResumePoint] = {}

    def put(self, seq_id: int, pos: int, logits: Array) -> None:
        """Keeps logits [1, V] of the token at `pos`."""
        self._of[seq_id] = (pos, logits)

    def forget(self, seq_id: int | None) -> None:
        """The sequence, or with None every one, was changed: its logits belong to what it was."""
        held = [*self._of, *self._left_off] if seq_id is None else [seq_id]
        for s in held:
            self._of.pop(s, None)
            self._left_off.pop(s, None)

    def moved(self, seq_id: int, d: int) -> None:
        """The end of a sequence moved by d, which a generation in it goes on from all the same."""
        self._of.pop(seq_id, None)
        if seq_id in self._left_off:
            self._left_off[seq_id].pos += d

    def leave(self, seq_id: int, resume_point: ResumePoint) -> None:
        """A generation of a sequence may be resumed, until the sequence is changed."""
        self._left_off[seq_id] = resume_point

    def resume_point(self, seq_id: int) -> ResumePoint | None:
        """Where the last generation of a sequence stopped, if nothing has changed it since."""
        found = self._left_off.get(seq_id)
        return found if found and found.token is not None else None

    def known(self, ends: Mapping[int, int]) -> dict[int, tuple[int, Array]]:
        """Position and logits [1, V] of the sequences whose newest token, at its end, has them."""
        return {s: x for s, x in self._of.items() if ends.get(s, -1) == x[0]}

    def get(self, seq_id: int, pos: int) -> Array | None:
        """The logits of the newest token, which stands at `pos`; None if they are not kept.

        Raises:
          BadToken: the sequence is empty.
        """
        if pos < 0:
            raise BadToken(
                f"sequence {seq_id} has no logits to draw from: it is empty; append at least one "
                "token first"
            )
        held = self._of.get(seq_id)
        return held[1] if held is not None and held[0] == pos else None
