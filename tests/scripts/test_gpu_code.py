"""The kernels that scripts/gpu_code.py hands to Triton, which itself would be a gigabyte.

In a process of its own, for scripts define flags of the same name.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json
from scripts import aot
from scripts import gpu_code
from absl import flags
flags.FLAGS.mark_as_parsed()
for kernel in gpu_code.kernels(aot.kernel_alone("pallas_gpu", 64, "bf16")):
    print(json.dumps(kernel._asdict()))
"""


def test_a_decoded_token_has_a_kernel_that_reads_and_one_that_ends():
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    read, end = map(json.loads, done.stdout.splitlines())
    assert "tt.func public @attend_blocks(" in read["text"] and "tt.dot" in read["text"]
    assert "tt.func public @end_of_attention(" in end["text"]
    # 8 kv heads and 32 query heads; two tiles are loaded while a third is in use.
    assert (read["grid"][0], end["grid"], read["n_stages"]) == (8, [4, 8, 1], 5)
