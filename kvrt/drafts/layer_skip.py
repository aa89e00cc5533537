"""Drafts by the first layers of the model itself."""

import dataclasses

from kvrt.errors import BadConfig
from kvrt.whole_numbers import take_whole_numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSkip:
    """Drafts what the model says after its first layers, by its own final norm and head.

    The verifying step goes on behind those layers: nothing is computed twice, and there is no cache
    but the model's. A round runs on the device, with the random numbers that the text is sampled
    with. It pays for models that were trained to exit early.

    Attributes:
      exit_layer: E, the layers that draft: [0, E) of L, 0 < E < L.

    Source: arXiv:2404.16710 (LayerSkip).
    """

    exit_layer: int

    def __post_init__(self) -> None:
        """Refuses to draft without a layer; how many the model has is known with it."""
        take_whole_numbers(self)
        if self.exit_layer < 1:
            raise BadConfig(
                f"exit_layer is {self.exit_layer}; at least the model's first layer drafts, so it "
                "must be 1 or more"
            )

    def check(self, n_vocab: int) -> None:
        """Drafts for every vocabulary: its tokens are the model's own."""
