"""The kernels under names of their own, to be run on any device.

On the device that a kernel is for (`KVRT_TEST_PLATFORM`) it is compiled, elsewhere XLA operations.
"""

import functools
from unittest import mock

import jax

from kvrt.attention import registry

GPU, TPU = "pallas_gpu_interpret", "pallas_tpu_interpret"
# Blocks of a pass of the interpreted TPU kernel, where it has eight if they are small: its program
# has what is done with a block once for each of them and each head, and compiles four times faster.
_PASS_BLOCKS = 2


def load(module):
    """The kernel "gpu" or "tpu"; asked for late, so that no backend is started by an import."""
    interpret = jax.default_backend() != module
    attend = registry.load_kernel(module, interpret=interpret)
    return _few_blocks(attend) if interpret and module == "tpu" else attend


def _few_blocks(attend):
    from kvrt.attention.pallas import tpu  # late: Pallas takes 0.4 s

    @functools.wraps(attend)
    def attend_few(*args, **told):
        with mock.patch.object(tpu, "_PASS_BLOCKS", _PASS_BLOCKS):
            return attend(*args, **told)

    return attend_few


registry.register(GPU, functools.partial(load, "gpu"), reads_shared=True)
registry.register(TPU, functools.partial(load, "tpu"), reads_shared=True)
