"""The logits that the next draw of each sequence starts from."""

from collections.abc import Mapping

from kvrt.arrays import Array
from kvrt.errors import BadToken


class LastLogits:
    """Logits of the newest token of each sequence, for the draw that follows."""

    def __init__(self):
        """None yet."""
        self._of: dict[int, tuple[int, Array]] = {}

    def put(self, seq_id: int, pos: int, logits: Array) -> None:
        """Keeps logits [1, V] of the token at `pos`."""
        self._of[seq_id] = (pos, logits)

    def forget(self, seq_id: int | None) -> None:
        """The sequence, or with None every one, was changed: its logits belong to what it was."""
        held = list(self._of) if seq_id is None else [seq_id]
        for s in held:
            self._of.pop(s, None)

    def known(self, ends: Mapping[int, int]) -> dict[int, tuple[int, Array]]:
        """Position and logits [1, V] of the sequences whose newest token, at its end, has them."""
        return {s: x for s, x in self._of.items() if ends.get(s, -1) == x[0]}

    def get(self, seq_id: int, pos: int) -> Array:
        """The logits of the newest token, which stands at `pos`.

        Raises:
          BadToken: the sequence is empty, or was changed since its end was evaluated.
        """
        held = self._of.get(seq_id)
        if pos < 0 or held is None or held[0] != pos:
            raise BadToken(
                f"sequence {seq_id} has no logits to draw from; append at least one token first "
                "(after removing tokens, remove one more and append it again)"
            )
        return held[1]
