"""What each sequence's next token is sampled from, and where its last generation stopped."""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import assert_never

from kvrt.arrays import Array
from kvrt.cells.edits import Copy, Divide, Keep, Remove, SeqEdit, Shift
from kvrt.errors import BadToken


class ResumePoint:
    """Where a generation can be resumed: after its newest token, which is not in the cache yet.

    Attributes:
      token: the newest one that it yielded; None before the first.
      pos: the position of that one once it is cached.
      n_sampled: tokens that it, and those that it resumed, have sampled.
      recent: the newest tokens before the next one is sampled, for the repeat penalty.
    """

    def __init__(self, n_sampled: int, recent: deque[int]):
        """Nothing was yielded yet."""
        self.token: int | None = None
        self.pos, self.n_sampled, self.recent = -1, n_sampled, recent

    def add(self, token: int) -> None:
        """Advances by the next token."""
        self.token = token
        self.pos += 1
        self.n_sampled += 1
        self.recent.append(token)


class LastLogits:
    """Logits of the newest token of each sequence, and the resume point of its generation."""

    def __init__(self):
        """No sequence has any."""
        self._of: dict[int, tuple[int, Array]] = {}
        self._resume_points: dict[int, ResumePoint] = {}

    def put(self, seq_id: int, pos: int, logits: Array) -> None:
        """Keeps logits [1, V] of the token at `pos`."""
        self._of[seq_id] = (pos, logits)

    def forget(self, seq_ids: Iterable[int] | None) -> None:
        """Drops what belongs to sequences as they were before a change; to all with None."""
        for s in self._seq_ids() if seq_ids is None else seq_ids:
            self._of.pop(s, None)
            self._resume_points.pop(s, None)

    def apply(self, edit: SeqEdit) -> None:
        """Drops what an edit makes out of date."""
        match edit:
            case Copy():
                self.forget([edit.dst])
            case Keep():
                self.forget([s for s in self._seq_ids() if s != edit.seq_id])
            case Remove() | Shift() | Divide():
                self.forget(None if edit.seq_id is None else [edit.seq_id])
            case _:
                assert_never(edit)

    def shifted(self, seq_id: int, d: int) -> None:
        """After a policy moved the end of a sequence by d: its generation can still be resumed."""
        self._of.pop(seq_id, None)
        if seq_id in self._resume_points:
            self._resume_points[seq_id].pos += d

    def set_resume_point(self, seq_id: int, resume_point: ResumePoint) -> None:
        """Lets a generation be resumed until its sequence is changed."""
        self._resume_points[seq_id] = resume_point

    def resume_point(self, seq_id: int) -> ResumePoint | None:
        """Where the last generation of a sequence stopped, if nothing has changed it since."""
        found = self._resume_points.get(seq_id)
        return found if found and found.token is not None else None

    def known(self, ends: Mapping[int, int]) -> dict[int, tuple[int, Array]]:
        """Position and logits [1, V] of the sequences that have them for their end."""
        return {s: x for s, x in self._of.items() if ends.get(s, -1) == x[0]}

    def get(self, seq_id: int, pos: int) -> Array | None:
        """The logits of the newest token, at `pos`; None if they are not kept.

        Raises:
          BadToken: the sequence is empty.
        """
        if pos < 0:
            raise BadToken(
                f"sequence {seq_id} has no logits to sample from: it is empty; append at least one "
                "token first"
            )
        found = self._of.get(seq_id)
        return found[1] if found is not None and found[0] == pos else None

    def _seq_ids(self) -> list[int]:
        return list({**self._of, **self._resume_points})
