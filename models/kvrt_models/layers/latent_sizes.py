"""Sizes of latent attention, and of the indexer that some of it has."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Indexer:
    """What chooses the tokens that a query of latent attention reads.

    Attributes:
      n_heads: index heads.
      head_dim: channels of an index key, the rotated ones first; more than these.
      n_cells: tokens that a query reads at most.

    Source: DeepSeek-V3.2-Exp `inference/model.py`; transformers `modeling_deepseek_v32`.
    """

    n_heads: int
    head_dim: int
    n_cells: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latent:
    """Attention whose keys and values are all made of one latent a token (MLA).

    Attributes:
      rank: channels of the latent, which is normalised.
      n_rope: rotated channels of a head; those of the keys are the same in all heads.
      n_nope: other channels of a head's queries and keys.
      n_value: channels of a head's values.
      q_rank: channels of a latent that queries are made of; 0 where they come from the stream.
      norm_eps: epsilon of the latents' norms.
      indexer: chooses what queries read; None is all that they see.

    Source: arXiv:2405.04434, sec. 2.1.
    """

    rank: int
    n_rope: int
    n_nope: int
    n_value: int
    q_rank: int = 0
    norm_eps: float = 1e-6
    indexer: Indexer | None = None
