"""Modules of a schema in sequences of a runtime, and prompts that share their cells.

Each module is computed at its own positions, behind the lead and without the other modules; the
placeholders of its parameters are computed with it and removed. A prompt owns the cells of the
modules that it names, none of them copied or moved, and computes its arguments and what stands
behind. So a module does not know the modules before it, and all behind the first is approximate.

Source: arXiv:2311.04934 (Prompt Cache), sec. 3.3 and 3.4.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from kvrt.arrays import Array, Float
from kvrt.errors import BadRange, BadSequence, SessionMismatch, UsageError
from kvrt.options.compose import check_together
from kvrt.reuse.schema import PlacedModule, PlacedSchema, modules_of
from kvrt.runtime.runtime import Runtime


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """What a prompt of modules gave.

    Attributes:
      logits: of its last token. `[1, V]`
      n_shared: tokens whose cells are the modules'.
      n_computed: tokens of arguments, and of the text behind the modules.
    """

    logits: Float[Array, "1 V"]
    n_shared: int
    n_computed: int


class PromptCache:
    """The modules of one schema, computed once, for any number of prompts."""

    def __init__(self, runtime: Runtime, layout: PlacedSchema, first_seq: int = 1):
        """Takes modules that are in the runtime, as after `encode` or from a session of it.

        Args:
          runtime: holds the modules; closed by whoever made it.
          layout: from `kvrt.reuse.schema.lay_out`.
          first_seq: the modules lie in this sequence and those behind it, one for each choice of
            the largest union.

        Raises:
          SessionMismatch: the sequences do not hold this layout's modules.
        """
        self.runtime, self.layout = runtime, layout
        self._first = first_seq
        for module in layout.modules:
            self._check_held(module)

    @classmethod
    def encode(
        cls, runtime: Runtime, layout: PlacedSchema, first_seq: int = 1, scratch: int = 0
    ) -> "PromptCache":
        """Computes all modules, each by itself; `scratch` is a sequence, empty before and after.

        Raises:
          BadSequence: fewer sequences than the modules need, or `scratch` is one of them.
          BadRange: one of the sequences is not empty.
          BadConfig: keys share a scale with their neighbours.
          CannotRewind, CacheFull, BadToken: as in `Runtime.fill`.
        """
        stores = range(first_seq, first_seq + layout.n_choices)
        _check_room(runtime, [*stores, scratch])
        try:
            if layout.lead:
                runtime.fill(layout.lead, stores[0], 0)
            for module in layout.modules:
                runtime.seq_cp(stores[0], scratch, 0, len(layout.lead))
                runtime.fill(module.ids.tolist(), scratch, module.start)
                for at, n in module.reserved.values():
                    runtime.seq_rm(scratch, at, at + n)
                runtime.seq_cp(scratch, stores[module.choice], module.start, module.end)
                runtime.seq_rm(scratch)
        except BaseException:
            for s in (*stores, scratch):
                runtime.seq_rm(s)
            raise
        return cls(runtime, layout, first_seq)

    def serve(
        self,
        seq_id: int,
        names: Sequence[str],
        suffix: Sequence[int],
        arguments: Mapping[tuple[str, str], Sequence[int]] | None = None,
    ) -> Served:
        """Puts a prompt into an empty sequence: modules, arguments, and a suffix behind them.

        Args:
          seq_id: the sequence.
          names: of the modules, in any order; those without a name are in every prompt.
          suffix: tokens behind the schema's last position, at least one.
          arguments: tokens of parameters, by module and parameter; those left out stay empty.

        Raises:
          UsageError: an unknown module or parameter, two of one union, an argument that is longer
            than its parameter, no suffix.
          BadRange: the sequence is not empty.
          BadSequence, BadToken, CacheFull: as in `Runtime.fill`; the sequence is empty again.
        """
        modules, given = modules_of(self.layout, names), dict(arguments or {})
        fills = _fills(modules, given)
        if not len(suffix):
            raise UsageError("nothing stands behind the modules; give at least one token")
        runtime, layout = self.runtime, self.layout
        _check_empty(runtime, seq_id)
        try:
            if layout.lead:
                runtime.seq_cp(self._first, seq_id, 0, len(layout.lead))
            for module in modules:
                store = self._first + module.choice
                runtime.seq_cp(store, seq_id, module.start, module.end)
            n_shared = len(runtime.token_history(seq_id)[1])
            for at, ids in fills:
                runtime.fill(ids, seq_id, at)
            runtime.fill(suffix, seq_id, layout.end)
        except BaseException:
            runtime.seq_rm(seq_id)
            raise
        n_computed = sum(len(ids) for _, ids in fills) + len(suffix)
        logits = runtime.last_logits(seq_id)
        return Served(logits=logits, n_shared=n_shared, n_computed=n_computed)

    def _check_held(self, module: PlacedModule) -> None:
        """Refuses sequences that do not hold a module's tokens where it stands."""
        inside = {at + i for at, n in module.reserved.values() for i in range(n)}
        wanted = {
            module.start + i: t
            for i, t in enumerate(module.ids.tolist())
            if module.start + i not in inside
        }
        pos, ids = self.runtime.token_history(self._first + module.choice)
        held = dict(zip(pos.tolist(), ids.tolist(), strict=True))
        if any(held.get(at) != t for at, t in wanted.items()):
            raise SessionMismatch(
                f"module {module.name!r} is not at position {module.start} of sequence "
                f"{self._first + module.choice}; the schema has changed: encode it again"
            )


def _fills(
    modules: Sequence[PlacedModule], given: dict[tuple[str, str], Sequence[int]]
) -> list[tuple[int, list[int]]]:
    """Positions and tokens of the arguments, ascending."""
    out = []
    for module in modules:
        for name, (at, n) in module.reserved.items():
            ids = list(given.pop((module.name, name), ()))
            if len(ids) > n:
                raise UsageError(
                    f"{name!r} of module {module.name!r} has {len(ids)} tokens, and {n} are "
                    "reserved; shorten it, or raise its length in the schema"
                )
            if ids:
                out.append((at, ids))
    if given:
        module, name = next(iter(given))
        known = [f"{m.name}.{x}" for m in modules for x in m.reserved]
        raise UsageError(
            f"no parameter {name!r} in module {module!r}; the prompt's modules have "
            f"{', '.join(known) or 'none'}"
        )
    return out


def _check_room(runtime: Runtime, seq_ids: Sequence[int]) -> None:
    check_together({"modules": ""}, runtime.config.traits)
    n = runtime.config.n_seq_max
    if len(set(seq_ids)) < len(seq_ids) or max(seq_ids) >= n:
        raise BadSequence(
            f"modules need sequences {seq_ids[0]} to {seq_ids[-2]} and an empty one beside them, "
            f"n_seq_max is {n}; raise it"
        )
    for s in seq_ids:
        _check_empty(runtime, s)


def _check_empty(runtime: Runtime, seq_id: int) -> None:
    end = runtime.seq_pos_max(seq_id)
    if end >= 0:
        raise BadRange(f"sequence {seq_id} holds tokens up to position {end}; take an empty one")
