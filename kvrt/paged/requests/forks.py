"""A request that begins with another's tokens: in shared blocks and in copies."""

from collections.abc import Sequence

from kvrt.errors import CannotRewind
from kvrt.paged.hashing import Chain
from kvrt.paged.kinds import FullKind, Moving, ceil_div
from kvrt.paged.layout.spec import NULL
from kvrt.paged.pool import BlockPool
from kvrt.paged.requests.copies import BlockCopy, Copies
from kvrt.paged.requests.request_blocks import RequestBlocks


class Forks:
    """Forks of requests in the pools of all groups."""

    def __init__(self, kinds: Sequence[FullKind], pools: Sequence[BlockPool], copies: Copies):
        """For these groups and pools."""
        self._kinds, self._pools, self._copies = kinds, pools, copies

    def shared_tables(
        self, src: RequestBlocks, n_tokens: int, moving: Moving | None
    ) -> list[list[int]]:
        """By group, the entries that a token after n_tokens may see, null before them.

        With `moving` those that one sees after a drop as well.

        Raises:
          CannotRewind: one of them is gone.
        """
        return [self._shared_table(g, src, n_tokens, moving) for g in range(len(self._kinds))]

    def own_from(
        self,
        tables: Sequence[Sequence[int]],
        n_tokens: int,
        n_shared: int | None,
        moving: Moving | None,
    ) -> list[int]:
        """By group, the first entry that a fork at n_tokens has a copy of; see `BlockManager.fork`.

        It writes in the block that n_tokens end within, if they do.
        """
        out = []
        for kind, table in zip(self._kinds, tables, strict=True):
            first = len(table) - (len(table) > 0 and n_tokens % kind.block_size > 0)
            if n_shared is not None and not kind.keeps_states:
                # What slides out of a window would not come back to who reserved it.
                shared = 0 if is_passing(moving, kind) else n_shared
                first = min(first, shared // kind.block_size)
            out.append(first)
        return out

    def own_copies(self, tables: Sequence[list[int]], own: Sequence[int]) -> list[BlockCopy]:
        """Holds blocks of tables for one request more, from `own` on in copies; what to copy."""
        out = []
        for g, (kind, table, first) in enumerate(zip(self._kinds, tables, own, strict=True)):
            p = kind.pool
            self._pools[p].touch(table[:first])
            for i in range(first, len(table)):
                if table[i] != NULL:
                    (block,) = self._pools[p].take(1)
                    out.append(BlockCopy(g, self._copies.source(p, table[i]), block))
                    table[i] = block
        return out

    def forked(
        self,
        src: RequestBlocks,
        tables: list[list[int]],
        n_tokens: int,
        chain: Chain | None,
        moving: Moving | None,
    ) -> RequestBlocks:
        """A request that begins with n_tokens of another one, in the blocks of tables."""
        n_full = [n_tokens // kind.block_size for kind in self._kinds]
        request = RequestBlocks(
            tables=tables,
            chain=chain,
            n_tokens=n_tokens,
            first=list(src.first) if moving else [0] * len(tables),
            n_registered=[min(x) for x in zip(src.n_registered, n_full, strict=True)],
            marks=src.marks,
            moving=moving,
            gaps=list(src.gaps) or [0] * len(tables) if moving else [],
        )
        request.note_room(self._kinds, n_tokens)
        return request

    def _shared_table(
        self, g: int, src: RequestBlocks, n_tokens: int, moving: Moving | None
    ) -> list[int]:
        kind, table = self._kinds[g], src.tables[g]
        if not kind.has_blocks:
            return []
        n_blocks = ceil_div(src.cell(g, n_tokens), kind.block_size)
        moving = src.moving if moving is None else moving
        n_skipped = kind.n_skipped(n_tokens, moving)
        end = min(src.cell(g, n_skipped) // kind.block_size, n_blocks)
        n_head = min(kind.n_head(moving), end)
        out = table[:n_head] + [NULL] * (end - n_head) + table[end:n_blocks]
        lost = NULL in out[:n_head] + out[end:]
        if kind.keeps_states:
            overwritten = n_tokens % kind.block_size > 0 and n_blocks < len(table)
            lost |= overwritten or (g, n_blocks - 1) in src.stale
        if lost:
            raise CannotRewind(
                f"a token after {n_tokens} needs what a {kind.group.kind} group no longer holds; "
                f"fork where the sequence ends, or compute {n_tokens} tokens again"
            )
        return out


def is_passing(moving: Moving | None, kind: FullKind) -> bool:
    """Whether blocks of what a request keeps go all the same, for no later token sees them."""
    return (
        moving is not None and kind.slides and kind.n_head(moving) * kind.block_size < moving.n_keep
    )
