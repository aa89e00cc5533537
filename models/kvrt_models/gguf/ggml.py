"""Storage types of ggml tensors: sizes, and how to dequantize to float32."""

from collections.abc import Mapping

import numpy as np

from kvrt.errors import BadModelFile, UnsupportedModel

# ggml type id -> (name, values a block, bytes a block).
GGML_TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}


# A block of Q8_0; value times scale is a weight.
Q8_0 = np.dtype([("scale", "<f2"), ("values", "i1", 32)])


def to_float32(data: np.ndarray, ggml_type: str, shape: tuple[int, ...]) -> np.ndarray:
    """Dequantizes the stored bytes of one tensor to float32 in C order.

    Args:
      data: the bytes, owned by the caller, who gives them up. `uint8[n_bytes]`
      ggml_type: a name of `GGML_TYPES`.
      shape: in NumPy order, slowest axis first.

    Raises:
      BadModelFile: a value that float32 cannot hold.
      UnsupportedModel: the gguf package cannot dequantize this type.
    """
    plain = {"F32": "<f4", "F16": "<f2", "F64": "<f8"}.get(ggml_type)
    if plain is not None:
        try:
            with np.errstate(over="raise", invalid="ignore"):
                return data.view(plain).astype(np.float32, copy=False).reshape(shape)
        except FloatingPointError as error:
            raise BadModelFile("values beyond float32; fetch the file again") from error
    if ggml_type == "BF16":
        # A bfloat16 is the upper half of a float32.
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
    from gguf import quants  # late: it takes 0.3 s
    from gguf.constants import GGMLQuantizationType

    if 0 in shape:
        return np.zeros(shape, np.float32)
    rows = data.reshape(*shape[:-1], -1)
    try:
        # A damaged block may hold NaN as its scale: that is for the reader of the values to judge.
        with np.errstate(all="ignore"):
            values = quants.dequantize(rows, GGMLQuantizationType[ggml_type])
    except (KeyError, NotImplementedError) as error:
        raise UnsupportedModel(
            f"ggml type {ggml_type} cannot be dequantized by the gguf package; "
            f"convert the model to Q8_0 or F16"
        ) from error
    return np.ascontiguousarray(values, np.float32).reshape(shape)
