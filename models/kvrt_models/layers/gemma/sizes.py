"""Sizes of what Gemma 3n and 4 have beside the stream of other decoders."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerInputs:
    """What each layer is given of a token beside the stream: a small embedding of its own.

    Attributes:
      width: channels of a layer's.
      n_vocab: rows of the table, which has those of all layers.

    Source: transformers `Gemma4TextModel.project_per_layer_inputs`.
    """

    width: int
    n_vocab: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class AltUp:
    """Streams of a token beside each other, of which each layer computes one.

    Attributes:
      n_streams: of a token.
      active: the one that is computed.
      scaled: what gates the layers' inputs is multiplied by weights before.

    Source: arXiv:2301.13310.
    """

    n_streams: int
    active: int
    scaled: bool
