"""What a scheduler asks of a cache: rows for sequences, and room for their tokens."""

from typing import Protocol, runtime_checkable

from kvrt.serving.request import State


@runtime_checkable
class Space(Protocol):
    """A cache as a scheduler sees it, in cells or in blocks.

    Nothing here touches the device: what was decided takes effect with the next step. A call that
    says no has changed nothing.
    """

    @property
    def n_rows(self) -> int:
        """Sequences at once."""
        ...

    @property
    def n_max(self) -> int:
        """Tokens that it holds of one sequence when no other one is there."""
        ...

    def hit(self, state: State) -> int | None:
        """Tokens that are held already for its text so far, fewer than the text has.

        None: not now, ask again in the next step (they are on their way from a tier, or another
        request writes in this step what it has to read); others may go first.
        """
        ...

    def admit(self, state: State, n_tokens: int, whole: int | None) -> int | None:
        """Gives a row, which becomes `state.row`, and room for n_tokens in all.

        Args:
          state: who wants it; `hit` was asked about it just before.
          n_tokens: tokens of its text that will be there after the next step.
          whole: tokens that have to fit beside what is there now, all at once if need be; None asks
            for n_tokens alone.

        Returns:
          The tokens that were found, as many as `hit` told, or fewer where they turned out to be
          damaged; None where there is no room.
        """
        ...

    def capacity(self, row: int) -> int:
        """Tokens that a row may hold without asking."""
        ...

    def grow(self, row: int, n_tokens: int, n_computed: int) -> bool:
        """Makes room for n_tokens in all, of which n_computed are there."""
        ...

    def cut(self, state: State, start: int, n: int) -> int:
        """How many of n tokens from `start` a step should compute: from 1 to n.

        Fewer than n where something can only be kept at certain places, as the states of recurrent
        layers; see `kvrt.serving.cache.chunk_ends`.
        """
        ...

    def fork(self, src: State, dst: State, n_tokens: int) -> bool:
        """Gives dst a row, which becomes `dst.row`, that holds src's first n_tokens.

        Called when they have been computed.
        """
        ...

    def release(self, row: int, state: State) -> None:
        """Takes a row back; what others may find of it stays findable."""
        ...

    def park(self, row: int, state: State) -> bool:
        """Takes a row back and keeps its tokens in a tier, where `hit` finds them again.

        False: it cannot, or computing them again is faster; the row is as it was.
        """
        ...
