"""What a model sees of the cache: one object that its layers call with their own tokens.

An attention layer calls it with queries, keys and values; a recurrent layer hands it the
recurrence of one token.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar, runtime_checkable

from kvrt.arrays import Array, Float, Int
from kvrt.config import GroupSpec, RecurrentSpec

State = tuple[Array, ...]
Inputs = tuple[Array, ...]
Outputs = TypeVar("Outputs", Array, tuple[Array, ...])
Step = Callable[[State, Inputs], tuple[State, Outputs]]


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
        k: Float[Array, "T H D"],
        v: Float[Array, "T H D"],
        *,
        sinks: Float[Array, " Q"] | None = None,
    ) -> Float[Array, "T Q D"]:
        """Returns the attention output of each query head.

        Args:
          layer: index of the layer, as in the model's `groups`.
          q: queries; head h reads kv head h // (Q / H).
          k: keys, unrotated.
          v: values.
          sinks: a logit a head that joins the softmax and carries no value (gpt-oss), or None.
        """
        ...

    def recur(self, layer: int, step: Step[Outputs], inputs: Inputs) -> Outputs:
        """Returns what a recurrence gives at each token, after the tokens before it.

        Args:
          layer: index of the layer, as in the model's `recurrent`.
          step: recurrence of one token, from (state, its part of each input) to (state, output).
            The state has the spec's shapes, in float32, and is zero before the first token.
          inputs: arrays with tokens on the first axis. `[T, ...]`

        Returns:
          The outputs of `step` by token. `[T, ...]`
        """
        ...


@runtime_checkable
class Decoder(Protocol):
    """A decoder that `Runtime` can run: any flax nnx module with these members.

    `groups` are its attention layers (none where all are recurrent), `recurrent` the others, which
    keep a state, or None; together they are all layers.
    """

    groups: tuple[GroupSpec, ...]
    recurrent: RecurrentSpec | None
    n_vocab: int

    def __call__(
        self, tokens: Int[Array, " T"], attend: Attend, out_ids: Int[Array, " R"]
    ) -> Float[Array, "R V"]:
        """Returns the logits of tokens `out_ids` of the step, calling `attend` once a layer."""
        ...
