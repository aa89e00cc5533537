"""The kernels under names of their own, to be run on any device.

On the device that a kernel is for (`KVRT_TEST_PLATFORM`) it is compiled, elsewhere XLA operations.
"""

import functools

import jax

from kvrt.attention import registry

GPU, TPU = "pallas_gpu_interpret", "pallas_tpu_interpret"


def load(module):
    """The kernel "gpu" or "tpu"; asked for late, so that no backend is started by an import."""
    return registry.load_kernel(module, interpret=jax.default_backend() != module)


registry.register(GPU, functools.partial(load, "gpu"), reads_shared=True)
registry.register(TPU, functools.partial(load, "tpu"), reads_shared=True)
