"""What a scheduler asks of a cache, and a cache of what fills it from sessions."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from kvrt.cells.edits import SeqEdit
from kvrt.serving.request import SeqState


@runtime_checkable
class SessionFiller(Protocol):
    """Fills a cache from sessions."""

    def fill(self, state: SeqState, tokens: Sequence[int], n_held: int) -> None:
        """Lets more than n_held of a sample's tokens be hit, if it can; sets `state.n_session`.

        Of a private prefix that cannot be read it sets `state.error`.

        The tokens are those that may be hit, never all of the prompt. What else was cached may be
        evicted for them.
        """
        ...


@runtime_checkable
class SchedulerSpace(Protocol):
    """A cache as a scheduler sees it: sequence numbers, and room for tokens.

    Nothing here touches the device: what was decided takes effect with the next step. A call that
    says no has changed nothing. What the cache knows of a sample it keeps in its `SeqState`.
    """

    @property
    def n_seq_max(self) -> int:
        """Sequences at once."""
        ...

    @property
    def n_max(self) -> int:
        """Tokens that it holds of one sequence when no other one is there."""
        ...

    def find_hit(self, state: SeqState) -> int | None:
        """Tokens of a sample that are held already, fewer than it has.

        None: not now, ask again in the next step (they are on their way from a tier, or another
        request writes in this step what it has to read, there is no room for its private prefix);
        others may go first. With `state.error` it never will be.
        """
        ...

    def n_cached(self, state: SeqState) -> int:
        """Tokens of a waiting sample that the device has; nothing is loaded and nothing changes."""
        ...

    def admit(self, state: SeqState, n_tokens: int, whole: int | None) -> int | None:
        """Gives a sequence number, `state.seq_id`, and room for n_tokens in all.

        Args:
          state: who wants it; `find_hit` was asked about it just before.
          n_tokens: tokens of it that will be there after the next step; with a context all that it
            may have at once, which are its own until it ends, and `state.n_until` is its capacity.
            Room for `state.n_reserved` is its own as well, and for as many of `state.n_ahead`.
          whole: tokens that have to fit beside what is there now, all at once if need be; None asks
            for n_tokens alone.

        Returns:
          The tokens of the hit, as many as `find_hit` returned, or fewer where they turned out to
          be damaged; None where there is no room. `state.capacity` is set.
        """
        ...

    def holds(self, state: SeqState) -> bool:
        """Whether there is room for all that a sample reserves when no other one is there."""
        ...

    def grow(self, state: SeqState, n_tokens: int) -> bool:
        """Makes room for n_tokens in all, and sets `state.capacity`."""
        ...

    def grow_by_one(self, states: Sequence[SeqState]) -> bool:
        """As `grow` for the next token of each of some samples; False if not all find room.

        Then some may have grown.
        """
        ...

    def chunk(self, state: SeqState, start: int, n: int) -> int:
        """How many of n tokens from `start` a step should compute: from 1 to n.

        Fewer than n where something can only be kept at certain places, as the states of recurrent
        layers; see `kvrt.serving.cache.checkpoints.chunk_ends`.
        """
        ...

    def edit(self, state: SeqState, edits: Sequence[SeqEdit]) -> None:
        """Applies what the schedule of a sample has due, `state.n_gone` as before.

        It never fails. One that drops tokens has all the room of its context from its admission on,
        which is now up to `state.n_until`; what others share is copied before it moves. Nobody
        finds the cells of another one, and it has copies of what it shares.
        """
        ...

    def fork(self, src: SeqState, dst: SeqState, n_tokens: int) -> bool:
        """Gives dst a sequence number, and src's first n_tokens, which have been computed.

        What neither will move they share: each writes to cells of its own. `dst.n_until` is src's.
        """
        ...

    def release(self, state: SeqState, *, damaged: bool = False, kept: bool = True) -> None:
        """Takes a sample's sequence number and room back.

        Others may find what it computed for as long as it lasts, unless that is damaged, or is to
        take no room from what is worth more: not `kept`.
        """
        ...

    def offload(self, state: SeqState) -> bool:
        """As `release`, with its tokens kept in a tier, where `find_hit` finds them again.

        False: it cannot, or computing them again is faster; nothing was released.
        """
        ...
