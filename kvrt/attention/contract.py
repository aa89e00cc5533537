"""What a model sees of the cache: one function a layer calls with its own queries, keys, values."""

from typing import Protocol, runtime_checkable

from kvrt.arrays import Array, Float, Int
from kvrt.config import GroupSpec


@runtime_checkable
class Attend(Protocol):
    """Attention of one layer over everything its tokens may see, themselves included.

    Positions, rotation, masks, owners and storage are the cache's business: q and k come as the
    projections made them, without RoPE.
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


@runtime_checkable
class Decoder(Protocol):
    """A decoder that `Runtime` can run: any flax nnx module with these members."""

    groups: tuple[GroupSpec, ...]
    n_vocab: int

    def __call__(
        self, tokens: Int[Array, " T"], attend: Attend, out_ids: Int[Array, " R"]
    ) -> Float[Array, "R V"]:
        """Returns the logits of the rows `out_ids` of `tokens`, calling `attend` once a layer."""
        ...
