"""Attention over cached keys and values, by positions and owners."""

from kvrt.attention.api import attend
from kvrt.attention.contract import (
    Attend,
    ChunkedStep,
    Decoder,
    KindedDecoder,
    LayeredDecoder,
    ShardedDecoder,
)
from kvrt.attention.types import LayerAttention, LayerKV, TokenQKV
from kvrt.attention.view import BlockView, SeqView

__all__ = [
    "Attend",
    "BlockView",
    "ChunkedStep",
    "Decoder",
    "KindedDecoder",
    "LayerAttention",
    "LayerKV",
    "LayeredDecoder",
    "SeqView",
    "ShardedDecoder",
    "TokenQKV",
    "attend",
]
