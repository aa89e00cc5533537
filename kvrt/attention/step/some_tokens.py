"""Queries of some of a step's tokens, in layers that read the keys and values of others.

So the layers behind the last that keeps any run for those tokens alone whose logits are wanted.

Source: arXiv:2405.05254 (YOCO), sec. 2.3.
"""

import dataclasses
from typing import Protocol, runtime_checkable

import jax.numpy as jnp

from kvrt.arrays import AnyArray, Array, Float, Int
from kvrt.attention import softmax
from kvrt.attention.api import attend
from kvrt.attention.contract import ChunkedStep, Inputs, Outputs, Step
from kvrt.attention.types import (
    AttendArgs,
    GroupView,
    LayerAttention,
    LayerKV,
    LayerStep,
    MaybeArray,
)
from kvrt.attention.view import AnyView, BlockView
from kvrt.errors import BadConfig
from kvrt.store import hadamard


@runtime_checkable
class WholeStep(Protocol):
    """A step of all tokens, as `StepAttention` is one; what is said of its members is there."""

    layers: dict[int, LayerStep]

    def shared(self, layer: int, *, gives_none: bool) -> tuple[Array, Array]:
        """Keys and values of the step's tokens, of the layer that a layer reads."""
        ...

    def is_usual(self, part: GroupView) -> bool:
        """Whether tokens choose nothing of what they read, and none may be refused."""
        ...

    def arguments(
        self, here: LayerStep, part: GroupView, q: Array, k: Array, v: Array, sinks: MaybeArray
    ) -> AttendArgs:
        """What `attend` is given for some tokens."""
        ...

    def output(
        self, layer: int, part: GroupView, tokens: tuple[Array, ...], args: AttendArgs
    ) -> Array:
        """The output for a part's tokens."""
        ...


@dataclasses.dataclass(frozen=True)
class SomeTokens:
    """The `Attend` of tokens `ids` of a step, whose other tokens have made keys and values too."""

    step: WholeStep
    ids: Int[Array, " R"]

    def __call__(
        self, layer: int, q: Array, k: MaybeArray, v: MaybeArray, *, sinks: MaybeArray = None
    ) -> Array:
        """Attention output of one layer; see `kvrt.attention.contract.Attend`."""
        here = self.step.layers[layer]
        k, v = self.step.shared(layer, gives_none=k is None and v is None)
        found, start = None, 0
        for part, (own_k, own_v) in here.by_part(k, v):
            n = part.view.n_tokens
            at = _within(self.ids, start, n)
            some = self._few if self._are_few(part) else self._spread
            out = some((layer, part), at, (q, own_k, own_v), sinks)
            inside = (at < n)[:, None, None]
            found = out if found is None else jnp.where(inside, out, found)
            start += n
        assert found is not None, "a step has tokens"
        return hadamard.transform(found, here.n_hadamard_v) if here.n_hadamard_v else found

    def produce(self, layer: int, k: Array, v: MaybeArray) -> None:
        """Refused: keys and values are those of all tokens."""
        raise self._refusal(layer, "makes keys and values")

    def index(self, layer: int, q: Array, k: Array, weights: Array) -> None:
        """Refused: index keys are those of all tokens."""
        raise self._refusal(layer, "keeps index keys")

    def recur(
        self,
        layer: int,
        step: Step[Outputs],
        inputs: Inputs,
        *,
        chunk: ChunkedStep[Outputs] | None = None,
    ) -> Outputs:
        """Refused: states are those after all tokens."""
        raise self._refusal(layer, "keeps a state")

    def for_tokens(self, ids: Int[Array, " R"]) -> "SomeTokens":
        """The same for some of these tokens."""
        return SomeTokens(self.step, self.ids[ids])

    def _refusal(self, layer: int, does: str) -> BadConfig:
        return BadConfig(
            f"layer {layer} {does} and runs for some of the step's tokens; only layers that read "
            "the keys and values of others can: run it before Attend.for_tokens"
        )

    def _are_few(self, part: GroupView) -> bool:
        """Whether less is to be done for these tokens than for all of a part."""
        usual = self.step.is_usual(part) and part.grouped is None
        lies_here = isinstance(part.view, BlockView) and part.view.shards is None
        # Of no tokens `_spread` gives an array without entries, for which XLA computes nothing.
        return usual and lies_here and 0 < self.ids.shape[0] < part.view.n_tokens

    def _spread(
        self,
        where: tuple[int, GroupView],
        at: Array,
        tokens: tuple[Array, Array, Array],
        sinks: MaybeArray,
    ) -> Float[Array, "R Q D"]:
        """The output by way of all tokens of a part, of which others have no query."""
        layer, part = where
        q, k, v = tokens
        every = jnp.zeros((part.view.n_tokens, *q.shape[1:]), q.dtype).at[at].set(q, mode="drop")
        args = self.step.arguments(self.step.layers[layer], part, every, k, v, sinks)
        out = self.step.output(layer, part, (every, k, v), args)
        return out.at[at].get(mode="fill", fill_value=0)

    def _few(
        self,
        where: tuple[int, GroupView],
        at: Array,
        tokens: tuple[Array, Array, Array],
        sinks: MaybeArray,
    ) -> Float[Array, "R Q D"]:
        """The output over cached cells, and over the step's own tokens as if they were cells."""
        layer, part = where
        q, k, v = tokens
        here, few = self.step.layers[layer], _only(part, at)
        nothing = jnp.zeros((q.shape[0], *k.shape[1:]), k.dtype)
        args = self.step.arguments(here, few, q, nothing, nothing[..., : v.shape[2]], sinks)
        keys = here.compared(part, k)[:, :, here.group.latent_rank :]
        kept = LayerKV(k=jnp.transpose(keys, (1, 2, 0))[None], v=jnp.transpose(v, (1, 0, 2))[None])
        # As few as these are, any device does it as fast as a kernel would.
        own = attend(
            args[0], kept, _as_cells(part.view, few.view), LayerAttention(group=here.group)
        )
        return softmax.merge_outputs(attend(*args), own).astype(q.dtype)


def _only(part: GroupView, at: Int[Array, " R"]) -> GroupView:
    """What tokens `at` of a part see but for the step's own; those beyond its last see nothing."""
    view = dataclasses.replace(
        part.view,
        pos=jnp.asarray(part.view.pos).at[at].get(mode="fill", fill_value=-1),
        bits=jnp.asarray(part.view.bits).at[at].get(mode="fill", fill_value=0),
        own=jnp.asarray(False),
    )
    tables = part.rope
    if tables is not None:
        rotations = tables.tokens.at[:, at].get(mode="clip")
        tables = dataclasses.replace(tables, tokens=rotations)
    return dataclasses.replace(part, view=view, rope=tables)


def _as_cells(of: AnyView, view: AnyView) -> AnyView:
    """What tokens see of the step's own, which are the cells of a single block."""
    return dataclasses.replace(
        view,
        blocks=jnp.zeros(1, jnp.int32),
        n_blocks=jnp.int32(1),
        cell_pos=jnp.asarray(of.pos)[None],
        cell_seqs=jnp.asarray(of.bits)[None],
    )


def _within(ids: Int[AnyArray, " R"], start: int, n: int) -> Int[Array, " R"]:
    """Which tokens of a part these are; n for those that are of another."""
    at = jnp.asarray(ids) - start
    return jnp.where((at >= 0) & (at < n), at, n)
