"""The kernels as XLA operations, which run on any device, under names of their own."""

import functools

from kvrt.attention import registry

GPU, TPU = "pallas_gpu_interpret", "pallas_tpu_interpret"

registry.register(GPU, functools.partial(registry.load_kernel, "gpu", interpret=True))
registry.register(TPU, functools.partial(registry.load_kernel, "tpu", interpret=True))
