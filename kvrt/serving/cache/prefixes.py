"""Prefix hits in cells: sequences that ended are kept, and a new one shares the cells of another.

A sequence that ended goes to a number that no token is of, and its cells stay its own until
somebody needs them. A prompt that begins like a sequence that runs, or was kept, becomes an owner
of its cells up to where they differ: at any token, and nothing is copied. What is shared is never
written again; nor is it moved, for of a sequence that drops tokens only those that it never drops
are found.

A window or a recurrent state is that of one place in a sequence, so a layer of that kind lets a
hit end only where it still has what the next token sees, or at a context checkpoint; and as it has
room for n_seq_max sequences, as many keep theirs as do not run, the others their checkpoints.

Source: llama.cpp's unified cache (`seq_cp` of a common prefix); RadixAttention, arXiv:2312.07104.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence

import numpy as np

from kvrt.arrays import Int32
from kvrt.cellcache import contents
from kvrt.cellcache.checkpoint import checkpoints, rewind
from kvrt.cellcache.checkpoint.checkpoints import Checkpoint
from kvrt.cellcache.checkpoint.resume import ResumePositions
from kvrt.cellcache.contents import CacheContents
from kvrt.cellcache.host_cells import HostCells
from kvrt.cellcache.indexed_group import IndexedGroup
from kvrt.cells import owned
from kvrt.cells.cells import first_bits
from kvrt.cells.edits import Copy, Remove
from kvrt.config import MAX_POS
from kvrt.errors import CacheFull, CannotRewind
from kvrt.reuse.tree import RadixTree
from kvrt.serving.request import CellHit
from kvrt.serving.sessions.cell_pins import CellPins

# Sequences that are kept at most, whatever room there is: a bit a cell on the host.
N_KEPT = 64
# Of them those that pins keep.
_N_PINNED = 32
# One in so many cells is freed together with others, for each eviction costs a scan of all cells.
_SPARE = 32

Tokens = Int32[np.ndarray, " n"]


class CellPrefixes:
    """What can be found of the sequences of a cell cache.

    Sequences that run are numbered below n_seq_max. The tree has of each the tokens that others may
    find, which is all that is ever shared.

    Attributes:
      by_sequence: whether a window or a state goes with its sequence, which is evicted as a whole.
      pinned: kept sequences that are not evicted.
      n_evicted: by group, cells of kept sequences that were freed because somebody needed them.
      n_checkpoints_evicted: context checkpoints that are there no more.
    """

    def __init__(self, host: HostCells, n_seq_max: int):
        """Nothing is kept."""
        self._host, self._n_seq_max = host, n_seq_max
        self._free = list(range(host.first_kept, host.first_kept + N_KEPT))[::-1]
        self._tree = RadixTree()
        self.by_sequence = host.rolls or host.states is not None
        self.pinned = CellPins()
        # Kept sequences whose windows and states went, so that hits end at their checkpoints.
        self._bare: set[int] = set()
        self._n_idle: int | None = 0  # None is not known
        self.n_evicted = [0] * len(host.groups)
        self.n_checkpoints_evicted = 0

    @property
    def n_kept(self) -> int:
        """Sequences that are kept."""
        return N_KEPT - len(self._free)

    @property
    def n_idle(self) -> int:
        """Cells that nobody has who runs, of groups that keep every position."""
        if self._n_idle is None:
            group = _complete(self._host)
            self._n_idle = self.count_idle(group) if group else 0
        return self._n_idle

    def count_idle(self, group: IndexedGroup) -> int:
        """Cells of a group that nobody has who runs, nor a pin."""
        return int(np.count_nonzero(self._idle(group)))

    # --- hits ----------------------------------------------------------------------------------

    def find(self, tokens: Tokens, salt: bytes) -> CellHit | None:
        """The longest prefix of some tokens that can be shared with a sequence; None without."""
        best: CellHit | None = None
        for match in self._tree.matches(tokens, scope=salt):
            if best is not None and best.n_tokens >= match.n_common:
                break
            for seq_id in match.names:
                n = self._positions(_number_of(seq_id)).nearest(match.n_common)
                if n > (best.n_tokens if best else 0):
                    best = CellHit(_number_of(seq_id), n)
                if n == match.n_common:
                    break
        return best

    def n_idle_of(self, hit: CellHit) -> int:
        """Cells of a hit that nobody needs who runs."""
        group = _complete(self._host)
        if group is None:
            return 0
        mine = owned(group.cells, hit.seq_id) & (group.cells.pos < hit.n_tokens)
        return int(np.count_nonzero(mine & self._idle(group)))

    def checkpoint(self, hit: CellHit) -> Checkpoint | None:
        """The checkpoint that a hit ends at; None where windows and states are there themselves."""
        if hit.seq_id not in self._bare and self._host.resumes_at(hit.seq_id, hit.n_tokens):
            return None
        return checkpoints.nearest(self._host.checkpoints, hit.seq_id, hit.n_tokens)

    def share(self, hit: CellHit, seq_id: int) -> Checkpoint | None:
        """A sequence without a token becomes an owner of the cells of a hit.

        Returns:
          The checkpoint that it then has to be cut back to, for its windows and states.
        """
        checkpoint = self.checkpoint(hit)
        self.commit(self._shared(hit, seq_id, checkpoint))
        self._tree.touch(hit.seq_id)
        return checkpoint

    # --- sequences that run --------------------------------------------------------------------

    def start(self, seq_id: int, tokens: Tokens, salt: bytes) -> None:
        """A sequence runs, and has these tokens already."""
        self._tree.insert(seq_id, tokens, scope=salt)
        self._tree.lock(seq_id)

    def n_known(self, seq_id: int) -> int | None:
        """Tokens of a sequence that can be found; None if none ever will."""
        return self._tree.n_tokens(seq_id) if seq_id in self._tree else None

    def extend(self, seq_id: int, tokens: Tokens) -> None:
        """More tokens of a sequence can be found, those after `n_known`."""
        self._tree.extend(seq_id, tokens)

    def release(self, seq_id: int) -> None:
        """A sequence ended: what can be found of it is kept, all else is freed."""
        after = self._kept(seq_id) if seq_id in self._tree else self._host.contents
        after, _ = contents.apply(after, Remove(seq_id=seq_id))
        self.commit(after)

    def drop(self, seq_id: int) -> None:
        """A sequence ended, of which nothing is kept but what others have."""
        if seq_id in self._tree:
            self._tree.remove(seq_id)
        self.release(seq_id)

    def adopt(
        self, tokens: Tokens, salt: bytes, write: Callable[[CacheContents, int], CacheContents]
    ) -> None:
        """Keeps a sequence that nobody computed here.

        Args:
          tokens: all of it.
          salt: of those who may find it.
          write: writes it to empty cells of some contents under a number; the contents after it.
        """
        if not self._free:
            self._evict_oldest()
        after = write(self._host.contents, self._free[-1])
        to = self._free.pop()
        self._tree.insert(to, tokens, scope=salt)
        self.commit(self._without_prefixes(after, to))

    def forget(self, seq_id: int) -> None:
        """Nobody finds what a sequence has, nor what shares cells with it; it goes on itself."""
        if seq_id not in self._tree:
            return
        if self._host.main is None:  # of states one may be made from the other
            alike = {seq_id, *self._tree.prefixes(seq_id)}
            alike |= {x for x in self._tree if seq_id in self._tree.prefixes(x)}
        else:
            cells = self._host.main.cells
            mine = owned(cells, seq_id)
            alike = {x for x in self._tree if (mine & owned(cells, _number_of(x))).any()}
            alike.add(seq_id)
        for x in alike:
            self._tree.remove(x)
        self.pinned.forget(alike)
        self._free_sequences(map(_number_of, alike))

    # --- pins ----------------------------------------------------------------------------------

    def n_seqs_of(self, hit: CellHit) -> int:
        """Sequences whose windows and states a pin keeps: none where a checkpoint does."""
        return int(self.by_sequence and self.checkpoint(hit) is None)

    def pin(self, hit: CellHit, tokens: Sequence[int], salt: bytes) -> Hashable:
        """Keeps the cells of a hit, of some tokens, under a number of their own; a handle.

        What only a checkpoint has of its windows and states stays in that checkpoint.

        Raises:
          CacheFull: too many are pinned.
        """
        if len(self.pinned) >= _N_PINNED:
            raise CacheFull(f"{_N_PINNED} prefixes are pinned, as many as can be; unpin one")
        self._tree.touch(hit.seq_id)  # then it is not the oldest
        if not self._free:
            self._evict_oldest()
        checkpoint, n_seqs = self.checkpoint(hit), self.n_seqs_of(hit)
        after = self._shared(hit, self._free[-1], checkpoint)
        seq_id = self._free.pop()
        self._tree.insert(seq_id, np.asarray(tokens[: hit.n_tokens], np.int32), scope=salt)
        self._tree.lock(seq_id)
        if checkpoint is not None:
            self._bare.add(seq_id)
        handle = self.pinned.add(seq_id, n_seqs, checkpoint)
        self.commit(after)
        return handle

    def unpin(self, handle: Hashable) -> int:
        """A pinned sequence is evicted as others are; returns `n_seqs_of` it."""
        seq_id, n_seqs = self.pinned.remove(handle)
        if seq_id is not None:  # it was not damaged
            self._tree.unlock(seq_id)
            self.commit(self._host.contents)
        return n_seqs

    # --- room ----------------------------------------------------------------------------------

    def evict(self, n: int) -> None:
        """Frees n cells, or as many as nobody needs who runs."""
        n_used = [x.n_used for x in self._host.groups]
        before = after = self._host.contents
        n_most, n_free = n, contents.n_tokens_free(before)
        if (group := _complete(self._host)) is not None:
            n_most = max(n, len(group.cells.pos) // _SPARE)
        while (n_left := n_most + n_free - contents.n_tokens_free(after)) > 0:
            gone = self._tree.evict(None if self.by_sequence else n_left)
            if gone is None:
                break
            seq_id = _number_of(gone.name)
            after, _ = contents.apply(after, Remove(seq_id=seq_id, p0=gone.n_tokens or 0))
            if gone.n_tokens is None:
                self._forget_number(seq_id)
        if after is not before:
            self.commit(after)
            self._count(n_used)

    def check_room_beside(self, n_running: int, n_new: int) -> None:
        """Refuses sequences beside those that run, where windows and states have no room for them.

        Raises:
          CacheFull: there are too many.
        """
        n_most = self._n_seq_max - n_running if self.by_sequence else N_KEPT
        n_most -= self.pinned.n_seqs if self.by_sequence else len(self.pinned)
        if n_new > n_most:
            raise CacheFull(
                f"{n_new} sequences of a session beside {n_running} that run; there is room for "
                f"{n_most}: load fewer at once, or raise n_seq_max"
            )

    def make_room_beside(self, n_running: int) -> None:
        """So many sequences run: what has room for n_seq_max keeps the others' alone."""
        n_used = [x.n_used for x in self._host.groups]
        n_most = max(self._n_seq_max - n_running, 0)
        while self.by_sequence and self.n_kept - len(self._bare) > n_most:
            self._strip_oldest()
            self._count(n_used)
            n_used = [x.n_used for x in self._host.groups]

    # --- below ---------------------------------------------------------------------------------

    def _is_worth_keeping(self, seq_id: int) -> bool:
        """Whether a sequence has something that no other one has."""
        if not self.by_sequence:
            return self._tree.n_own(seq_id) > 0
        n = self._tree.n_tokens(seq_id)
        same = (_number_of(x) for x in self._tree.prefixes(seq_id) if self._tree.n_tokens(x) == n)
        return n > 0 and all(x < self._host.first_kept for x in same)

    def _kept(self, seq_id: int) -> CacheContents:
        """The contents with what can be found of a sequence under another number, if it can be."""
        found = self._copied(seq_id) if self._is_worth_keeping(seq_id) else None
        if found is None:
            self._tree.remove(seq_id)
            return self._host.contents
        to, after = found
        self._tree.rename(seq_id, to)
        return self._without_prefixes(after, to)

    def _copied(self, seq_id: int) -> tuple[int, CacheContents] | None:
        """A number, and the contents in which it has what can be found of a sequence.

        None where a window has moved beyond that, and no checkpoint stands before it.
        """
        if not self._free:
            self._evict_oldest()
        edit = Copy(src=seq_id, dst=self._free[-1], p1=self._tree.n_tokens(seq_id))
        try:
            after, _ = contents.apply(self._host.contents, edit)
        except CannotRewind:
            if (after := rewind.plan_shared_before(self._host.contents, edit)) is None:
                return None
            self._bare.add(edit.dst)
        return self._free.pop(), after

    def _without_prefixes(self, before: CacheContents, seq_id: int) -> CacheContents:
        """The contents without kept sequences all of whose tokens another one has."""
        after = before
        for x in () if self.by_sequence else self._tree.prefixes(seq_id):
            if _number_of(x) >= self._host.first_kept and x not in self.pinned.seq_ids:
                self._tree.remove(x)
                self._forget_number(_number_of(x))
                after, _ = contents.apply(after, Remove(seq_id=_number_of(x)))
        return after

    def _shared(self, hit: CellHit, seq_id: int, checkpoint: Checkpoint | None) -> CacheContents:
        """The contents in which a sequence without a token has what a hit is of; see `share`."""
        before, edit = self._host.contents, Copy(src=hit.seq_id, dst=seq_id, p1=hit.n_tokens)
        if checkpoint is not None:
            return rewind.plan_shared(before, edit, checkpoint)
        return contents.apply(before, edit)[0]

    def _positions(self, seq_id: int) -> ResumePositions:
        """Where a hit in a sequence can end."""
        if seq_id in self._bare:
            at = self._host.checkpoints.positions(seq_id)
            return ResumePositions(gaps=((1, MAX_POS),), checkpoints=at)
        return self._host.resume_positions(seq_id)

    def _strip_oldest(self) -> None:
        """Takes windows and states from the oldest kept sequence that has some.

        Where it has checkpoints it is kept for these, else it goes.
        """
        spared = self._bare | self.pinned.seq_ids
        numbers = (_number_of(name) for name in self._tree)
        seq_id = next(x for x in numbers if x >= self._host.first_kept and x not in spared)
        if self._host.checkpoints.of(seq_id):
            self._bare.add(seq_id)
            self.commit(rewind.without_newest(self._host.contents, seq_id))
        else:
            self._tree.remove(seq_id)
            self._free_sequences([seq_id])

    def _evict_oldest(self) -> None:
        gone = self._tree.evict()
        assert gone is not None, "what is kept is not locked"
        self._free_sequences([_number_of(gone.name)])

    def commit(self, after: CacheContents) -> None:
        """Replaces the contents of the cache; whose cells nobody needs may be others then."""
        after = after.sparing(self.pinned.checkpoints)
        before, kept = self._host.checkpoints, after.checkpoints
        if before is not kept:
            left = {id(x) for x in kept.unique}
            self.n_checkpoints_evicted += sum(id(x) not in left for x in before.unique)
        self._host.commit(after)
        self._n_idle = None
        if lost := [x for x in self._bare if not kept.of(x)]:  # their last went for its bytes
            list(map(self._tree.remove, lost))
            self._free_sequences(lost)

    def _free_sequences(self, seq_ids: Iterable[int]) -> None:
        """Frees kept sequences that have left the tree; those that run stay as they are."""
        after = self._host.contents
        for seq_id in seq_ids:
            if seq_id >= self._host.first_kept:
                self._forget_number(seq_id)
                after, _ = contents.apply(after, Remove(seq_id=seq_id))
        self.commit(after)

    def _forget_number(self, seq_id: int) -> None:
        """A number of kept sequences is free again."""
        self._free.append(seq_id)
        self._bare.discard(seq_id)

    def _idle(self, group: IndexedGroup) -> np.ndarray:
        """Which used cells of a group belong to no sequence that runs, nor to a pin."""
        runs = first_bits(group.cells, self._n_seq_max).seqs.any(axis=1)
        found = np.asarray((group.cells.pos >= 0) & ~runs)
        return found & ~self.pinned.cells(group) if self.pinned else found

    def _count(self, n_used: list[int]) -> None:
        """Counts what was freed since so many cells were used."""
        for i, group in enumerate(self._host.groups):
            self.n_evicted[i] += n_used[i] - group.n_used


def _complete(host: HostCells) -> IndexedGroup | None:
    """A group that keeps every position; all of those have the same tokens."""
    return host.complete[0] if host.complete else None


def _number_of(name: object) -> int:
    assert isinstance(name, int), "sequences are named by their numbers"
    return name
