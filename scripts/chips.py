"""Chips that this machine does not have, described so that programs can be lowered for them."""

from jax.sharding import AbstractDevice, AbstractMesh

# From JAX 0.11 on kernels ask which GPU they are lowered for.
H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
ONE_H200 = AbstractMesh((1,), ("x",), abstract_device=H200)
