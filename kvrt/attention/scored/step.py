"""A step of a model of which some layers keep tokens by score."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp

from kvrt.arrays import AnyArray, Array, Bool, Int32
from kvrt.attention import rope
from kvrt.attention.contract import Inputs
from kvrt.attention.scored.attend import CHUNK, Scored
from kvrt.attention.scored.layers import ScoredGroup
from kvrt.attention.scored.spec import SlotSpec
from kvrt.attention.scored.split import divided_recurrence
from kvrt.attention.step_attention import StepAttention
from kvrt.attention.types import MaybeArray, mark_damage, tempered
from kvrt.attention.view import BlockView
from kvrt.errors import BadConfig
from kvrt.kv_types import CODECS
from kvrt.options.cache import CacheConfig
from kvrt.store import hadamard
from kvrt.store.recurrent import InPlace, advance_chunks, of_one_state


@dataclasses.dataclass(frozen=True)
class ScoredLayer:
    """A layer that keeps tokens by score, and how its group rotates the step's tokens.

    `rope` is None where attention rotates them to their places, or nothing does.
    `n_hadamard` are channels of keys and of values that are transformed together, 0 for none.
    """

    slots: SlotSpec
    rope: rope.RopeTables | None
    n_hadamard: tuple[int, int]


@dataclasses.dataclass
class ScoredStep(StepAttention):
    """The `Attend` of a step; layers in `scored` are recurrences, all others as they are.

    `n_nan` has scores that were NaN by layer and token, `stays` the tokens that were not refused.
    """

    scored: dict[int, ScoredLayer] = dataclasses.field(default_factory=dict)
    pos: Int32[AnyArray, " T"] | None = None
    n_nan: dict[int, Int32[Array, " T"]] = dataclasses.field(default_factory=dict)
    stays: Bool[Array, " T"] | bool = True

    @property
    def n_nan_scores(self) -> Int32[Array, "..."]:
        """Scores that were NaN in the evictions of the step, by token; 0 where no layer evicts."""
        return jnp.where(self.stays, sum(self.n_nan.values(), jnp.int32(0)), 0)

    def keep(self, stays: Bool[Array, " T"]) -> None:
        """As of any step; evictions behind refused tokens count no more."""
        super().keep(stays)
        self.stays = stays

    def __call__(
        self, layer: int, q: Array, k: MaybeArray, v: MaybeArray, *, sinks: MaybeArray = None
    ) -> Array:
        """Attention output of one layer; see `kvrt.attention.contract.Attend`."""
        here = self.scored.get(layer)
        if here is None:
            return super().__call__(layer, q, k, v, sinks=sinks)
        if k is None or v is None:
            raise BadConfig(f"layer {layer} keeps keys and values and gives attend none; give both")
        group, (n_k, n_v) = here.slots.group, here.n_hadamard
        k, v = mark_damage(k, v, n_v)
        pos, plain = jnp.asarray(self.pos), q

        def compared(x: Array) -> Array:
            rotated = x if here.rope is None else here.rope.rotate_tokens(x)
            return hadamard.transform(rotated, n_k) if n_k else rotated

        if group.temperature:
            q = tempered(q, pos, group.temperature)
        rows = compared(q), compared(k), v, pos
        rows = (*rows, plain) if here.slots.n_q_heads else rows
        out, self.n_nan[layer] = self._recurred(layer, divided_recurrence(here.slots, sinks), rows)
        return hadamard.transform(out, n_v) if n_v else out

    def _recurred(self, layer: int, forms: tuple[InPlace, InPlace], rows: Inputs) -> Scored:
        """Outputs by token; the slots are written in place unless tokens may yet be refused."""
        at, (one, many) = self.state_index, forms
        assert at is not None, "slots are states"
        if self.apart is not None:
            return self.recur(layer, of_one_state(one), rows)
        args = self.states[layer], at, one, (many, CHUNK), rows
        self.states[layer], out = advance_chunks(*args, in_place=True)
        return out


def scored_step(
    step: StepAttention,
    groups: Sequence[ScoredGroup],
    pos: Int32[AnyArray, " T"],
    config: CacheConfig,
) -> ScoredStep:
    """The step with layers that keep tokens by score; those of a group share RoPE's tables."""
    found, view = {}, _reads_nothing(pos)
    for scored in groups:
        group, of = scored.group, scored.slots[0]
        here = None if of.by_place else group.rope
        tables = here and rope.make(here, view, config.n_ctx, unrotated=False)
        mixed = [config.hadamard and x in CODECS for x in (of.type_k, of.type_v)]
        n_hadamard = (
            hadamard.size_k(group.dim_k, True) if mixed[0] else 0,
            hadamard.size_v(group.dim_v, True) if mixed[1] else 0,
        )
        for layer, slots in zip(group.layers, scored.slots, strict=True):
            found[layer] = ScoredLayer(slots, tables, n_hadamard)
    fields = {f.name: getattr(step, f.name) for f in dataclasses.fields(step)}
    return ScoredStep(**fields, scored=found, pos=pos)


def _reads_nothing(pos: Int32[AnyArray, " T"]) -> BlockView:
    """A view of tokens at some positions, for RoPE's tables."""
    none = jnp.zeros((0, 1), jnp.int32)
    owners = jnp.zeros((pos.shape[0], 1), jnp.uint32)
    return BlockView(
        pos=jnp.asarray(pos),
        bits=owners,
        blocks=none[:, 0],
        n_blocks=jnp.int32(0),
        cell_pos=none,
        cell_seqs=owners[:0, None],
    )
