"""What the GPU kernels are as machine code, made on a machine without a GPU.

    pip install 'kvrt[aot]'
    python -m scripts.gpu_code --kernels 64,128,256 --target h200,gfx942
    pip install 'kvrt[aot-cuda]'
    python -m scripts.gpu_code --attention mosaic_gpu --target h200

A line a kernel: registers of a thread, bytes spilled, shared memory, occupancy (programs that one
multiprocessor holds), and bytes of keys and values that those have under way. The first kernel of a
form of `pallas_gpu` reads, the second one ends a decode step; they are made by Triton, and XLA has
one of its own, so the figures are close to what runs, not equal. AMD's GPUs have names like gfx942:
registers are a lane's, and spills are counted in registers. Those of `mosaic_gpu` are made by JAX's
package for CUDA, which is what a GPU would run; of their PTX some instructions are counted.
"""

import importlib
import importlib.util
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
from absl import app, flags
from jax.extend.mlir import ir

from kvrt.errors import NoKernel
from scripts import aot
from scripts._lib import chips, commands, measure

_TARGET = flags.DEFINE_list(
    "target", ["h200"], f"What is compiled for: {', '.join(chips.GPUS)}, or gfx942 and the like."
)
_ATTENTION = flags.DEFINE_enum(
    "attention", "pallas_gpu", ["pallas_gpu", "mosaic_gpu"], "Whose kernels."
)

# What XLA is given of a kernel: its grid, Triton's language as MLIR bytecode, and settings.
_KERNEL = re.compile(
    r'grid_x = (\d+) : i32, grid_y = (\d+) : i32, grid_z = (\d+) : i32, ir = "((?:[^"\\]|\\.)*)", '
    r'name = "(\w+)", num_stages = (\d+) : i32, num_warps = (\d+) : i32'
)
_BUFFERS = re.compile(r"local_alloc : \(\) -> !ttg.memdesc<(\d+)x(\d+)x(\d+)x\w+?(\d+)[,x]")
# What Mosaic GPU writes about a kernel where it is told to, and instructions that are counted:
# products, loads of their operands, and copies that nobody waits for.
_DUMPS = {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1"}
_COUNTED = ("mma.sync", "ldmatrix", "cp.async")


class Kernel(NamedTuple):
    """A kernel as Pallas hands it to XLA."""

    name: str
    grid: tuple[int, ...]
    text: str
    n_stages: int
    n_warps: int


def main() -> None:
    mosaic = _ATTENTION.value == "mosaic_gpu"
    unknown = [x for x in _TARGET.value if x not in chips.GPUS and not x.startswith("gfx")]
    unknown += [x for x in _TARGET.value if x.startswith("gfx") and mosaic]
    if unknown:
        raise app.UsageError(f"no such target of {_ATTENTION.value}: {', '.join(unknown)}")
    if mosaic:
        chips.only_gpu(_TARGET.value)
    elif importlib.util.find_spec("triton") is None:
        raise app.UsageError("no compiler: triton is missing; pip install 'kvrt[aot]'")
    jax.config.update("jax_platforms", "cpu")
    for target in _TARGET.value:
        for program in aot.programs(_ATTENTION.value):
            try:
                results = [*(by_mosaic if mosaic else by_triton)(program, target)]
            except NoKernel as error:
                results = [{"refused": str(error)}]
            for found in results:
                measure.emit("gpu code", target=target, program=program.name, **found)


def by_triton(program: aot.Program, target: str) -> Iterator[dict[str, Any]]:
    """What the kernels of a program take, made by Triton."""
    amd = target.startswith("gfx")
    for kernel in kernels(program, "rocm" if amd else "cuda"):
        figures = compiled_for_amd(kernel, target) if amd else compiled(kernel, chips.GPUS[target])
        yield {"kernel": kernel.name, "grid": kernel.grid, **figures}


def by_mosaic(program: aot.Program, target: str) -> Iterator[dict[str, Any]]:
    """What the kernels of a program take, made by XLA and NVIDIA's assembler."""
    device = chips.gpu_device(target)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(_DUMPS, MOSAIC_GPU_DUMP_TO=folder)
        with jax.default_device(device):
            lowered = jax.jit(program.run).lower(*chips.shapes_on(device, program.args))
        lowered.compile()
        for told in sorted(Path(folder).glob("*.ptxas")):
            yield {"kernel": told.stem, **assembled(told, chips.GPUS[target])}


def assembled(told: Path, gpu: chips.Gpu) -> dict[str, Any]:
    """Figures of what the assembler told of a kernel, and of the files beside it."""
    text, code = told.read_text(), told.with_suffix(".ptx").read_text()
    (registers,) = re.findall(r"Used (\d+) registers", text)
    (spilled,) = re.findall(r"frame, (\d+) bytes spill stores", text)
    resources = told.with_suffix(".resources.txt").read_text()
    (shared,) = re.findall(r"smem_scratch_bytes=(\d+)", resources)
    # A warpgroup.
    n = chips.occupancy(gpu, int(registers), int(shared), n_warps=4)
    return {
        "registers": int(registers),
        "spilled_bytes": int(spilled),
        "shared_bytes": int(shared),
        "programs": n,
        **{name: len(re.findall(rf"^.*\b{name}", code, re.MULTILINE)) for name in _COUNTED},
    }


def kernels(program: aot.Program, platform: str = "cuda") -> Iterator[Kernel]:
    """The kernels of a program, lowered to Triton's language."""
    text = chips.lowered(jax.jit(program.run), program.args, platform).mlir_module()
    for *grid, code, name, n_stages, n_warps in _KERNEL.findall(text):
        yield Kernel(name, tuple(map(int, grid)), _text(_bytes(code)), int(n_stages), int(n_warps))


def _bytes(escaped: str) -> bytes:
    r"""A string of MLIR: other bytes than letters are \XX."""
    return re.sub(
        rb"\\([0-9A-F]{2}|.)",
        lambda m: bytes.fromhex(m[1].decode()) if len(m[1]) == 2 else m[1],
        escaped.encode(),
        flags=re.DOTALL,
    )


def _text(code: bytes) -> str:
    """Bytecode as text, which another version of Triton reads; jaxlib alone knows its dialect."""
    with ir.Context() as context:
        importlib.import_module("jaxlib.triton").dialect.register_dialect(context)
        return str(ir.Module.parse(code))


def compiled(kernel: Kernel, gpu: chips.Gpu) -> dict[str, Any]:
    """What a kernel takes as machine code of NVIDIA's."""
    major, minor = gpu.capability
    made = _made(kernel, "cuda", 10 * major + minor, kernel.n_stages)
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(made.asm["cubin"])
        tools = Path(importlib.import_module("triton").__file__ or "").parent / "backends/nvidia"
        command = [str(tools / "bin/cuobjdump"), "-res-usage", str(binary)]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (usage,) = re.findall(r"REG:(\d+) STACK:(\d+)", told)
    registers, spilled = map(int, usage)
    n = chips.occupancy(gpu, registers, made.metadata.shared, kernel.n_warps)
    buffers = [list(map(int, x)) for x in _BUFFERS.findall(made.asm["ttgir"])]
    held = sum(depth * a * b * bits // 8 for depth, a, b, bits in buffers)
    return {
        "registers": registers,
        "spilled_bytes": spilled,
        "shared_bytes": made.metadata.shared + chips.RESERVED,
        "programs": n,
        "loading_bytes": n * held,
    }


def compiled_for_amd(kernel: Kernel, target: str) -> dict[str, Any]:
    """What a kernel takes as machine code of AMD's; two stages, as deep as its shared memory is."""
    made = _made(kernel, "hip", target, 2)
    told = dict(re.findall(r"\.(\w+_count):\s*(\d+)", made.asm["amdgcn"]))
    return {
        "registers": int(told["vgpr_count"]),
        "spilled_registers": int(told["vgpr_spill_count"]) + int(told["sgpr_spill_count"]),
        "shared_bytes": made.metadata.shared,
        "mfma": made.asm["amdgcn"].count("v_mfma"),
    }


def _made(kernel: Kernel, backend: str, architecture: int | str, n_stages: int) -> Any:
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    triton: Any = importlib.import_module("triton")
    targets: Any = importlib.import_module("triton.backends.compiler")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ttir")
        source.write_text(kernel.text)
        # Threads of a warp, or of a wavefront.
        target = targets.GPUTarget(backend, architecture, 32 if backend == "cuda" else 64)
        options = {"num_warps": kernel.n_warps, "num_stages": n_stages}
        return triton.compile(str(source), target=target, options=options)


if __name__ == "__main__":
    commands.run(main)
