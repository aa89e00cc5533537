"""What a model sees of the cache: one object that its layers call with their own tokens.

An attention layer calls it with queries, keys and values; a recurrent layer hands it the
recurrence of one token, and if it can that of many.
"""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar, runtime_checkable

from jax.sharding import PartitionSpec

from kvrt.arrays import Array, Float, Int
from kvrt.config import GroupSpec, RecurrentSpec

State = tuple[Array, ...]
Inputs = tuple[Array, ...]
Outputs = TypeVar("Outputs", Array, tuple[Array, ...])
Step = Callable[[State, Inputs], tuple[State, Outputs]]
# Where a parameter lies in its module, as `flax.nnx.to_flat_state` names it.
ParamPath = tuple[Hashable, ...]


@dataclasses.dataclass(frozen=True)
class ChunkedStep(Generic[Outputs]):
    """A recurrence of many tokens of one sequence at once, where a `Step` is that of one.

    Attributes:
      run: from (state, inputs, n) to (state, outputs), as the step would give them token by token
        up to rounding. Inputs have at most `size` tokens on the first axis, of which the first n
        (int32, at run time) count: the others change nothing, and may have any finite output.
      size: tokens that one call takes at most.
    """

    run: Callable[[State, Inputs, Array], tuple[State, Outputs]]
    size: int


@runtime_checkable
class Attend(Protocol):
    """One layer's access to the cache, for the tokens of a step.

    Positions, rotation, masks, owners and storage are the cache's business: q and k come as the
    projections made them, without RoPE, and a recurrence does not know whose state it is given.
    """

    def __call__(
        self,
        layer: int,
        q: Float[Array, "T Q D"],
        k: Float[Array, "T H D"] | None,
        v: Float[Array, "T H D"] | None,
        *,
        sinks: Float[Array, " Q"] | None = None,
    ) -> Float[Array, "T Q D"]:
        """Returns the attention output of each query head.

        Args:
          layer: index of the layer, as in the model's `groups`.
          q: queries; head h reads kv head h // (Q / H).
          k: keys, unrotated; None in a layer that reads those of another (`GroupSpec.kv_of`). It
            sees the step's own as that layer gave them, which has to run before it in the step.
          v: values, or None likewise; None too in a layer that keeps a latent
            (`GroupSpec.latent_rank`): they are the first R channels of k, and so is the output.
          sinks: a logit a head that joins the softmax and carries no value (gpt-oss), or None.
        """
        ...

    def produce(
        self, layer: int, k: Float[Array, "T H D"], v: Float[Array, "T H D"] | None
    ) -> None:
        """Keeps keys and values of a layer that has no queries: others read them, in the same step.

        Args:
          layer: index of the layer, which may be none of the model's own, as in its `groups`.
          k: keys, unrotated.
          v: values; None where the layer keeps a latent.
        """
        ...

    def index(
        self,
        layer: int,
        q: Float[Array, "T Hi D"],
        k: Float[Array, "T 1 D"],
        weights: Float[Array, "T Hi"],
    ) -> None:
        """Says what a layer's queries choose by (`GroupSpec.indexed`), before it attends.

        A token's score is the sum over index heads of weight * max(q . k, 0).

        Args:
          layer: index of the layer, whose own queries come afterwards.
          q: index queries, unrotated; first the channels that RoPE leaves alone, as in k.
          k: index keys, which are kept.
          weights: of index heads, with all factors of the scores.
        """
        ...

    def for_tokens(self, ids: Int[Array, " R"]) -> "Attend":
        """Returns the same for queries of some of the step's tokens, R of them.

        Layers take such queries that read the keys and values of others: those of all T tokens of
        the step, as the layers that made them gave them.

        Args:
          ids: which tokens, in any order; a token may come several times.
        """
        ...

    def recur(
        self,
        layer: int,
        step: Step[Outputs],
        inputs: Inputs,
        *,
        chunk: ChunkedStep[Outputs] | None = None,
    ) -> Outputs:
        """Returns what a recurrence gives at each token, after the tokens before it.

        Args:
          layer: index of the layer, as in the model's `recurrent`.
          step: recurrence of one token, from (state, its part of each input) to (state, output).
            The state has the spec's shapes, in float32, and is zero before the first token.
          inputs: arrays with tokens on the first axis. `[T, ...]`
          chunk: the same recurrence of many tokens, or None. It runs wherever a sequence has
            several tokens in the step whose states nobody keeps, as in a prompt; the last
            `n_rs_seq` + 1 of a sequence go token by token.

        Returns:
          The outputs of `step` by token. `[T, ...]`
        """
        ...


@runtime_checkable
class Decoder(Protocol):
    """A decoder that `Runtime` can run: any flax nnx module with these members.

    `groups` are its attention layers (none where all are recurrent), those that read the keys and
    values of others among them, and those that only make some (`Attend.produce`); `recurrent` the
    others, which keep a state, or None; together they are all layers.
    """

    # Properties, so that attributes may be of narrower types: `self.recurrent = None`.
    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        """Attention layers by shape, RoPE and mask."""
        ...

    @property
    def recurrent(self) -> RecurrentSpec | None:
        """Recurrent layers, or None."""
        ...

    @property
    def n_vocab(self) -> int:
        """Width of the logits."""
        ...

    def __call__(
        self, tokens: Int[Array, " T"], attend: Attend, out_ids: Int[Array, " R"]
    ) -> Float[Array, "R V"]:
        """Returns the logits of tokens `out_ids` of the step, calling `attend` once a layer.

        `out_ids` may be empty where the last layers only read the keys and values of others: these
        have nothing to do then. Name all sizes of a reshape, for -1 beside 0 is undefined.
        """
        ...


@runtime_checkable
class LayeredDecoder(Decoder, Protocol):
    """A decoder that can be run in parts; the residual stream goes from one to the next."""

    def embed(self, tokens: Int[Array, " T"]) -> Float[Array, "T E"]:
        """Returns the residual stream before the first layer."""
        ...

    def layers(
        self, x: Float[Array, "T E"], attend: Attend, first: int, last: int
    ) -> Float[Array, "T E"]:
        """Returns the residual stream after layers [first, last)."""
        ...

    def head(self, x: Float[Array, "R E"]) -> Float[Array, "R V"]:
        """Returns the logits of vectors of the residual stream."""
        ...


@runtime_checkable
class KindedDecoder(LayeredDecoder, Protocol):
    """A decoder that tells which layers are alike, so that one program serves all of a kind."""

    def layer_kinds(self) -> Sequence[tuple[Hashable, ParamPath]]:
        """Returns of each layer its kind, and the path that its parameters stand under.

        Layers of equal kinds compute the same of the stream, of their own parameters and of what
        `attend` gives: one traced with the parameters of another computes that one. The index of a
        layer may be used for `attend` alone. Parameters under no path are those of `embed` and
        `head`.
        """
        ...


@runtime_checkable
class ShardedDecoder(Decoder, Protocol):
    """A decoder that says how a mesh divides its parameters.

    Without this method each device has all parameters, which a mesh with a tensor axis warns of;
    the logits are the same up to the order of sums.
    """

    def shardings(self) -> Mapping[ParamPath, PartitionSpec]:
        """Returns how devices divide parameters, by path; a parameter not named is whole on each.

        A path is that of `nnx.to_flat_state(nnx.state(self))`, e.g. ("blocks", 0, "up", "kernel").
        The axis "tensor" divides kv heads too, so a layer's products go in pairs: the first by its
        outputs, the second by its inputs. For kernels [I, O] of `nnx.Linear` that is
        `{("up", "kernel"): P(None, "tensor"), ("down", "kernel"): P("tensor")}`. An empty mapping
        says that nothing is divided. Asked once, when programs are made; values are not needed.
        """
        ...
