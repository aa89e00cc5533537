"""What happens between steps: room is made, positions move, rows are packed and turned."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from kvrt import cells as meaning
from kvrt.arrays import AnyArray
from kvrt.cache import checks
from kvrt.cache.last_logits import LastLogits
from kvrt.cache.self_extend import Extender
from kvrt.cache.stats import Counts, DropEvent
from kvrt.cellcache import contents
from kvrt.cellcache import group as books
from kvrt.cellcache.contents import CacheContents
from kvrt.cellcache.planning import HostCells
from kvrt.cellcache.room import RoomPlan, plan_room
from kvrt.config import CacheConfig, GroupSpec
from kvrt.errors import BadConfig, CacheFull, CannotRewind, UsageError
from kvrt.kv_types import any_quantized
from kvrt.policies import Policy
from kvrt.program.device import Device
from kvrt.upkeep.defrag import plan_defrag, should_defrag

# Drops in which a policy gives up what it may give up, where keys are quantized again by each.
_PARTS = 4


class CellCache:
    """Keeps host cells and device rows in step; each change is planned before anything moves."""

    def __init__(
        self,
        host: HostCells,
        device: Device,
        config: CacheConfig,
        groups: Sequence[GroupSpec],
        policy: Policy | None,
    ):
        """Takes the runtime's two sides.

        Raises:
          BadConfig: what makes room, or what extends, does not fit the cache or the model.
        """
        if policy:
            checks.keeps(policy.n_keep, config.n_ctx)
        if config.self_extend:
            checks.extends(config.self_extend, groups, shifts=policy is not None)
        if host.states is not None:
            checks.forgets(policy is not None, config.self_extend)
        self._host, self._device, self._config = host, device, config
        self.policy = policy
        self.extender = Extender(config.self_extend)
        self.logits = LastLogits()
        self.counts = Counts()

    def n_fit(self, seq_id: int) -> int:
        """Tokens that a sequence may take in before something has to go."""
        if self.policy is None:
            return self._host.room(seq_id)
        return self.policy.n_fit(self._host.n_free, self._host.pos_max(seq_id) + 1)

    def check_end(self, seq_id: int, end: int) -> None:
        """Refuses tokens up to `end` that a policy would drop others for.

        Raises:
          CacheFull: they lie behind the end of the sequence, and there is no room.
        """
        n_past = self._host.pos_max(seq_id) + 1
        if self.policy and end > n_past and self.n_fit(seq_id) < end - n_past:
            raise CacheFull(
                f"positions up to {end} of sequence {seq_id} do not fit: it ends at {n_past} and "
                f"{type(self.policy).__name__} lets {max(self.n_fit(seq_id), 0)} more tokens in "
                "before some have to go; append them"
            )

    def n_part(self, seq_id: int, n: int) -> int:
        """Tokens of n to make room for at once: all, or a step's if more than can stay come in.

        Raises:
          CacheFull: cells that others own as well could get in the way of a part.
        """
        if self.policy is None:
            return n
        n_keep, cells = self.policy.n_keep, self._host.cells
        own = int(np.count_nonzero(meaning.owned(cells, seq_id)))
        n_most = self.policy.n_fit(self._host.n_free + own - n_keep, n_keep)
        if n <= max(n_most, self.n_fit(seq_id)) or n_most < 1:
            return n
        if meaning.n_shared(cells, seq_id, 0):
            self.need(n, self._host.n_free)
        return min(n_most, self._config.n_ubatch)

    def make_room(self, wanted: Mapping[int, int]) -> None:
        """Makes room for so many tokens of each sequence at once; see `Runtime.make_room`.

        Raises:
          CacheFull: they do not all fit; nothing was dropped.
        """
        for s, n in wanted.items():
            meaning.check_seq_id(s, self._config.n_seq_max)
            checks.end(self._host.pos_max(s) + 1 + n)
        rooms = self._plan_rooms(wanted)
        held = rooms[-1][1].memory if rooms else self._host.memory
        first = {s: self._host.pos_max(s) + 1 for s in wanted}
        if any(map(self.in_blocks, wanted)):
            seq_ids = np.repeat(np.array(list(wanted), np.int32), list(wanted.values()))
            self._host.own(seq_ids, first)
        else:
            copies = (self.extender.n_copies(self._host.cells, s, n) for s, n in wanted.items())
            n_free = contents.n_free(held) if rooms else self._host.n_free
            self.need(sum(wanted.values()) + sum(copies), n_free)
        self._check_windows(held, wanted)
        for _, room in rooms:
            for copies in room.copies:
                self._copy(copies)
        if rooms:
            self._host.commit(held)
        for s, room in rooms:
            self.logits.moved(s, -sum(drop.n for drop, _ in room.drops))
            self.counts.drops += [
                DropEvent(seq_id=s, n_past=n_past, n_dropped=drop.n) for drop, n_past in room.drops
            ]

    def _plan_rooms(self, wanted: Mapping[int, int]) -> list[tuple[int, RoomPlan]]:
        """By sequence that has to drop something, what it drops; each plan follows from the last.

        The longest sequence is asked first: where cells are short it has the most to give.
        """
        rooms: list[tuple[int, RoomPlan]] = []
        if self.policy is None:
            return rooms
        held, n_free, n_promised = self._host.memory, self._host.n_free, 0
        for s in sorted(wanted, key=self._host.pos_max, reverse=True):
            n_past = self._host.pos_max(s) + 1
            if self.policy.n_fit(n_free - n_promised, n_past) < wanted[s]:
                n = max(wanted[s], self._n_at_once(n_past - self.policy.n_keep))
                room = plan_room(held, s, n, self.policy, n_promised=n_promised)
                if room.drops:
                    rooms.append((s, room))
                    held, n_free = room.memory, contents.n_free(room.memory)
            n_promised += wanted[s]
        return rooms

    def _n_at_once(self, n_loose: int) -> int:
        """Tokens to make room for at least, when some of n_loose have to go.

        A K-shift quantizes the keys that it moves again. Where every token dropped one, a key would
        be quantized as often as it has neighbours; with a quarter at once it is four times.
        """
        config = self._config
        again = config.rope == "write" and any_quantized(config.type_k)
        return -(-n_loose // _PARTS) if again else 1

    def _check_windows(self, held: CacheContents, wanted: Mapping[int, int]) -> None:
        """Refuses tokens that groups which use cells again could not take in; raises CacheFull."""
        for book in (b for b in held.books if b.rolls):
            if len(wanted) == 1:
                ((s, n),) = wanted.items()
                books.check_room(book, s, n, self._config.n_ubatch)
            else:
                first = {s: books.n_past(book, s) for s in wanted}
                n_used = int(meaning.n_used(book.cells))
                books.find(book, sum(wanted.values()), first, n_used)

    def defrag(self, *, by_sequence: bool = False) -> int:
        """See `Runtime.defrag`."""
        if self._host.blocks is not None:
            raise UsageError(
                f"defrag would tear blocks of sequences {sorted(self._host.blocks.seqs)} apart; "
                "take them out with to_cells first"
            )
        return sum(self._defrag(i, by_sequence=by_sequence) for i in range(len(self._host.groups)))

    def flush(self) -> None:
        """See `Runtime.flush`."""
        for i, ledger in enumerate(self._host.groups):
            packs = ledger.stale and not ledger.book.rolls and ledger.book.blocks is None
            if packs and self._fragmented(ledger.cells):
                self._defrag(i, by_sequence=False)
        self._upload()
        if any(ledger.pending for ledger in self._host.groups):
            self._device.shift()
            for ledger in self._host.groups:
                ledger.settle()
            self.counts.n_kshift += 1

    def change(
        self, change: Callable[[CacheContents], CacheContents], *seq_ids: int | None
    ) -> None:
        """A change of owners in some sequences, in all with None; raises BadSequence."""
        for s in seq_ids:
            if s is not None:
                meaning.check_seq_id(s, self._config.n_seq_max)
        self._host.commit(change(self._host.memory))
        for s in seq_ids:
            self.logits.forget(s)

    def share(self, src: int, dst: int, p0: int, p1: int | None) -> None:
        """See `Runtime.seq_cp`."""
        meaning.check_seq_id(src, self._config.n_seq_max)
        self.change(lambda held: contents.cp(held, src, dst, p0, p1), dst)
        self.extender.copied(src, dst)

    def keep(self, seq_id: int) -> None:
        """See `Runtime.seq_keep`."""
        others = [s for s in range(self._config.n_seq_max) if s != seq_id]
        meaning.check_seq_id(seq_id, self._config.n_seq_max)
        self.change(lambda held: contents.keep(held, seq_id), *others)

    @contextlib.contextmanager
    def without(self, seq_id: int, pos: int) -> Iterator[None]:
        """A cache in which a sequence lacks its tokens from `pos` on, for a look; no row changes.

        Within it nothing may be written, moved or packed.

        Raises:
          CannotRewind: a layer does not keep what a token at `pos` has to see.
        """
        self.flush()
        held = self._host.memory
        self._host.commit(contents.rm(held, seq_id, pos))
        try:
            self._upload()
            yield
        finally:
            self._host.commit(held)

    def move(self, seq_id: int, move: Callable[[CacheContents], contents.Moved]) -> None:
        """A change of positions; cells that seq_id shares are copied first."""
        meaning.check_seq_id(seq_id, self._config.n_seq_max)
        held = self._host.memory
        moved, copies = move(held)
        if all(a is b for a, b in zip(moved.books, held.books, strict=True)):
            return
        self._copy(copies)
        self.logits.forget(seq_id)
        self._host.commit(moved)

    def can_remove(self, seq_id: int, p0: int, p1: int | None) -> bool:
        """See `Runtime.can_remove`."""
        meaning.check_seq_id(seq_id, self._config.n_seq_max)
        try:
            contents.rm(self._host.memory, seq_id, p0, p1)
        except CannotRewind:
            return False
        return True

    def in_blocks(self, seq_id: int) -> bool:
        """Whether a sequence lies in blocks."""
        blocks = self._host.blocks
        return blocks is not None and seq_id in blocks.seqs

    def to_blocks(self, seq_id: int) -> int:
        """See `Runtime.to_blocks`."""
        meaning.check_seq_id(seq_id, self._config.n_seq_max)
        if self.policy or self.extender.moves:
            raise BadConfig(
                f"sequence {seq_id} cannot lie in blocks, where the position is the place: "
                f"{'a policy' if self.policy else 'SelfExtend'} moves positions; do without it"
            )
        if not self._host.counted:
            raise BadConfig(
                f"sequence {seq_id} cannot lie in blocks: no layer of this model keeps the rows of "
                "all positions; set swa_full"
            )
        moved, copies = contents.to_blocks(self._host.memory, seq_id, self._config.block_size)
        self._copy(copies)
        self._host.commit(moved)
        return sum(len(src) for src, _ in copies)

    def to_cells(self, seq_id: int) -> None:
        """See `Runtime.to_cells`."""
        meaning.check_seq_id(seq_id, self._config.n_seq_max)
        self._host.commit(contents.to_cells(self._host.memory, seq_id))

    def own(self, seq_ids: np.ndarray, first: Mapping[int, int]) -> None:
        """Moves sequences in blocks out of what they share and are about to write to.

        Raises:
          CacheFull: sequences lie in blocks, and the tokens do not fit.
        """
        plan = self._host.own(seq_ids, first)
        if plan is not None:
            moved, copies = plan
            self._copy(copies)
            self._host.commit(moved)

    def extend(self, seq_id: int) -> None:
        """The rounds of SelfExtend that are due before the next step."""
        held = self._host.memory
        plans = self.extender.plan(held.books, seq_id)
        if plans:
            self._copy(plan.copies for plan in plans)
            both = zip(held.books, plans, strict=True)
            new = tuple(books.placed(b, plan.cells, b.head) for b, plan in both)
            text = self.extender.moved(held.text, seq_id, plans[0])
            self._host.commit(dataclasses.replace(held, books=new, text=text))
            self.extender.took(seq_id, plans[0])
            self.counts.n_extend += plans[0].n_rounds

    def clear(self) -> None:
        """See `Runtime.clear`."""
        self.forget()
        self.change(contents.clear)

    def forget(self) -> None:
        """Every sequence is gone."""
        self.logits.forget(None)
        self.extender.forget()

    def restored(
        self,
        sources: Mapping[int, int],
        reached: Mapping[int, int],
        logits: Mapping[int, tuple[int, AnyArray]],
    ) -> None:
        """Sequences came from elsewhere: by name here, what they were called there."""
        for here, s in sources.items():
            self.logits.forget(here)
            if s in logits:
                pos, x = logits[s]
                self.logits.put(here, pos, jnp.asarray(x)[None])
        self.extender.restored({h: reached[s] for h, s in sources.items() if s in reached})

    def _fragmented(self, cells: meaning.Cells) -> bool:
        return should_defrag(cells, self._config.defrag_threshold)

    def need(self, n: int, n_free: int) -> None:
        """Refuses n cells where only n_free are empty; raises CacheFull."""
        checks.fits(n, n_free, self._config.n_ctx, shifts=self.policy is not None)

    def _upload(self) -> None:
        """Gives the device the cells that it lacks."""
        for i, ledger in enumerate(self._host.groups):
            if ledger.stale:
                self._device.upload(i, ledger.cells)
                ledger.stale = False

    def _copy(self, copies: Iterable[books.Rows]) -> None:
        for group, rows in enumerate(copies):
            self._device.copy_rows(group, *rows)

    def _defrag(self, group: int, *, by_sequence: bool) -> int:
        ledger = self._host.groups[group]
        cells, plan = plan_defrag(ledger.cells, by_sequence=by_sequence)
        for moves in plan.rounds:
            self._device.copy_rows(group, moves[:, 0], moves[:, 1])
        ledger.set(books.placed(ledger.book, cells, int(meaning.n_used(cells))))
        self.counts.n_defrag += plan.n_moves > 0
        return plan.n_moves
