"""Sessions by the type of the weights: they go on to the bit, and refuse another type."""

from pathlib import Path

import numpy as np
import pytest

from kvrt import CacheConfig, Runtime, session
from kvrt.errors import KvrtError
from kvrt_models.load import load

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parents[1] / "golden" / "hf"
TYPES = ["f32", "bf16", "int8"]
CONFIG = CacheConfig(n_ctx=64, n_ubatch=8, block_size=16)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def runtime(name, dtype):
    return Runtime(load(GOLDEN / name, dtype=dtype).decoder, CONFIG)


def answer(at, n=12):
    return [token.id for token in at.generate(n)]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*(("llama-tied", dtype) for dtype in TYPES), ("jamba-experts", "int8"), ("gpt-oss", "int8")],
)
def test_a_session_goes_on_with_the_weights_it_had(name, dtype, tmp_path):
    at = runtime(name, dtype)
    at.append(PROMPT)
    first = answer(at)
    session.save(tmp_path / "x.kv", at.snapshot())
    expected = at.append([7, 8], out_ids=range(2))
    found = session.read(tmp_path / "x.kv")
    again = runtime(name, dtype)
    again.append(PROMPT)
    assert answer(again) == first
    again.clear()
    again.restore(found)
    assert np.array_equal(again.append([7, 8], out_ids=range(2)), expected)
    for other in set(TYPES) - {dtype}:
        with pytest.raises(KvrtError, match="weights"):
            runtime(name, other).restore(found)
