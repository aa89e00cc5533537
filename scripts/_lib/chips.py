"""Chips that this machine does not have, described so that programs can be made for them."""

from typing import Any, NamedTuple

import jax
import jax.export
from absl import app
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh

# What XLA calls a GPU kernel of Pallas.
GPU_CALL = "__gpu$xla.gpu.triton"
MOSAIC_CALL = "mosaic_gpu_v2"
GPU_CALLS_ALLOWED = [
    jax.export.DisabledSafetyCheck.custom_call(name) for name in (GPU_CALL, MOSAIC_CALL)
]
# From JAX 0.11 on kernels ask which GPU they are lowered for.
H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")


class Gpu(NamedTuple):
    """An NVIDIA GPU as XLA is given it to compile for; shared memory is of a multiprocessor."""

    kind: str
    capability: tuple[int, int]
    n_cores: int
    shared_bytes: int
    l2_mib: int
    memory_gib: int
    bandwidth_gb_s: int
    clock_ghz: float


GPUS = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 167936, 40, 80, 2039, 1.41),
    "h200": Gpu("NVIDIA H200", (9, 0), 132, 233472, 50, 141, 4800, 1.98),
    "b200": Gpu("NVIDIA B200", (10, 0), 148, 233472, 126, 180, 8000, 1.96),
}
# Alike in the three: of a multiprocessor registers, warps and programs, and the bytes of shared
# memory that a program takes for itself.
REGISTERS, WARPS, PROGRAMS, RESERVED = 65536, 64, 32, 1024

_CONFIG = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared_bytes}
  shared_memory_per_block_optin: {optin}
  threads_per_core_limit: 2048
  core_count: {gpu.n_cores}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {gpu.bandwidth_gb_s}000000000
  l2_cache_size: {l2_bytes}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {memory_bytes}
  cuda_compute_capability {{ major: {gpu.capability[0]} minor: {gpu.capability[1]} }}
  registers_per_core_limit: {registers}
  registers_per_block_limit: {registers}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 12 minor: 9 patch: 0 }}
device_description_str: "{gpu.kind}"
"""


def only_gpu(names: list[str]) -> None:
    """Refuses to compile for several GPUs in one process.

    Raises:
      UsageError: there are several.
    """
    gpus = [x for x in names if x in GPUS]
    if len(gpus) > 1:
        raise app.UsageError(
            f"{', '.join(gpus)} in one process: Mosaic GPU (JAX 0.11.2) keeps the first as what "
            "its kernels are assembled for; name one and run this again for the next"
        )


def gpu_device(name: str) -> Any:
    """A GPU of `GPUS` that XLA compiles for and that is not there.

    Raises:
      UsageError: JAX's package for CUDA is not installed.
    """
    gpu = GPUS[name]
    config = _CONFIG.format(
        gpu=gpu,
        optin=gpu.shared_bytes - RESERVED,
        l2_bytes=gpu.l2_mib << 20,
        memory_bytes=gpu.memory_gib << 30,
        registers=REGISTERS,
    )
    try:
        slice_ = topologies.get_topology_desc(
            name, platform="cuda", target_config=config, topology="1x1x1"
        )
    # Without the package NotImplementedError, which is one; what its compiler does not take is a
    # JaxRuntimeError, which is another, and says so in its text.
    except RuntimeError as error:
        raise app.UsageError(
            f"no compiler for {name}: {error}; pip install 'kvrt[aot-cuda]'"
        ) from error
    return slice_.devices[0]


def shapes_on(device: Any, args: tuple) -> tuple:
    """Shapes of arguments that lie on a GPU of `gpu_device`.

    Kernels look for the capability that they are made for at `jax.default_device`, so programs are
    traced and lowered under it.
    """
    where = jax.sharding.SingleDeviceSharding(device)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), args)


def occupancy(gpu: Gpu, registers: int, shared_bytes: int, n_warps: int) -> int:
    """Programs that one multiprocessor holds, by what each of them takes."""
    each = -(-registers // 8) * 8 * 32 * n_warps
    shared = shared_bytes + RESERVED
    return min(REGISTERS // each, gpu.shared_bytes // shared, WARPS // n_warps, PROGRAMS)


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
