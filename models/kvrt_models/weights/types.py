"""What a model's matrices may be in memory, and which of it is taken where nobody says."""

from typing import Literal

WeightType = Literal["f32", "bf16", "f16", "int8"]
WeightChoice = Literal["f32", "bf16", "f16", "int8", "auto"]


def default_type(platform: str) -> WeightType:
    """The type of weights on a platform of JAX: int8 on CPU, bf16 on GPU and TPU."""
    return "int8" if platform == "cpu" else "bf16"
