"""Context checkpoints of requests in cells: made as a prompt is computed, resumed from by a hit."""

from collections.abc import Callable

from kvrt.cache.cell_cache import CellCache
from kvrt.cache.checkpoint import ContextCheckpoints
from kvrt.cellcache.checkpoint import rewind
from kvrt.cellcache.checkpoint.checkpoints import Checkpoint
from kvrt.errors import CacheFull
from kvrt.serving.cache.prefixes import CellPrefixes
from kvrt.serving.metrics import CheckpointUse
from kvrt.serving.request import CellHit, SeqState


class CellCheckpoints:
    """Makes checkpoints of prompts, and gives a sequence that hits one its windows and states."""

    def __init__(self, cache: CellCache, made: ContextCheckpoints, prefixes: CellPrefixes):
        """Of an engine's cells."""
        self._host, self._made, self._prefixes = cache.host, made, prefixes

    @property
    def use(self) -> CheckpointUse:
        """How many there are, and how many went."""
        held, gone = self._host.checkpoints, self._prefixes.n_checkpoints_evicted
        return CheckpointUse(n=len(held.unique), n_bytes=held.n_bytes, n_evicted=gone)

    def fit(self, state: SeqState, start: int, n: int, n_findable: int) -> int:
        """How many of n tokens from `start` a step computes, so that it ends where one is due."""
        if start >= state.n_prompt:
            return n
        ends = (start + self._made.n_until(start), state.n_prompt, *state.request.borders)
        return min([n, *(x - start for x in ends if start < x <= n_findable)])

    def add(self, state: SeqState, seq_id: int, end: int) -> None:
        """Makes one at the end of a sequence, if one is due there."""
        due = end in (state.n_prompt, *state.request.borders) or self._made.is_due(end)
        if due and end <= state.n_prompt:
            after = self._made.planned(seq_id)
            if after is not None:
                self._prefixes.commit(after)

    def check_pin(self, hit: CellHit) -> None:
        """Refuses to pin a hit whose checkpoint, with pinned ones, leaves no room for another.

        Raises:
          CacheFull: it does.
        """
        one, limit = self._prefixes.checkpoint(hit), self._made.limits.n_bytes
        if one is None or limit is None:
            return
        pinned = {id(x): x for x in (*self._prefixes.pinned.checkpoints, one)}
        need = sum(x.n_bytes for x in pinned.values()) + one.n_bytes
        if need > limit:
            raise CacheFull(
                f"{hit.n_tokens} tokens end at a context checkpoint, and with it pinned another "
                f"one needs {need:,} bytes, checkpoint_bytes is {limit:,}; unpin a prefix, or "
                "raise checkpoint_bytes"
            )

    def resume(self, seq_id: int, checkpoint: Checkpoint) -> Callable[[], None]:
        """Gives a sequence that shares the rest the windows and states of a checkpoint.

        Returns:
          What writes their bytes, before the next step.
        """
        plan = rewind.plan_rewind(self._host.contents, seq_id, checkpoint)
        self._prefixes.commit(plan.contents)
        return lambda: self._made.write(plan, checkpoint)
