"""Chips that this machine does not have, described so that programs can be lowered for them."""

import jax
import jax.export
from jax.sharding import AbstractDevice, AbstractMesh

# What XLA calls a GPU kernel of Pallas.
GPU_CALL = "__gpu$xla.gpu.triton"
GPU_CALLS_ALLOWED = [jax.export.DisabledSafetyCheck.custom_call(GPU_CALL)]
# From JAX 0.11 on kernels ask which GPU they are lowered for.
H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")


def lowered(run: jax.stages.Wrapped, args: tuple, platform: str) -> jax.export.Exported:
    """A jitted function with GPU kernels, lowered for "cuda" or "rocm".

    Args:
      run: the jitted function.
      args: its arguments, or their shapes.
      platform: of the GPU.
    """
    one = AbstractMesh((1,), ("x",), abstract_device=H200)
    export = jax.export.export(run, platforms=[platform], disabled_checks=GPU_CALLS_ALLOWED)
    with jax.sharding.use_abstract_mesh(one):
        return export(*args)
