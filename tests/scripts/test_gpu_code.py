"""The kernels that scripts/gpu_code.py hands to Triton, which itself would be a gigabyte."""

import aot
import gpu_code
import pytest
from absl import flags


def test_bytes_of_a_string_of_mlir():
    assert gpu_code._bytes('ML\\EFR\\0A\\\\\\"x') == b'ML\xefR\n\\"x'


@pytest.mark.slow
def test_a_decoded_token_has_a_kernel_that_reads_and_one_that_ends():
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    read, end = gpu_code.kernels(aot.kernel_alone("pallas_gpu", 64, "bf16"))
    assert "tt.func public @attend_blocks(" in read.text and "tt.dot" in read.text
    assert "tt.func public @end_of_attention(" in end.text
    # 8 kv heads and 32 query heads; two tiles are loaded while a third is in use.
    assert (read.grid[0], end.grid, read.n_stages) == (8, (4, 8, 1), 5)
