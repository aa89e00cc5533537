"""What the GPU kernels are as machine code, made by Triton on a machine without a GPU.

    pip install 'kvrt[aot]'
    python -m scripts.gpu_code --kernels 64,128,256

A line a kernel: registers of a thread, bytes spilled, shared memory, occupancy (programs that one
multiprocessor holds), and bytes of keys and values that those have under way. XLA has a Triton of
its own, so the figures are close to what runs, not equal. The first kernel of a form
reads, the second one ends a decode step.
"""

import importlib
import importlib.util
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from absl import app, flags
from jax.extend.mlir import ir

from scripts import aot
from scripts._lib import chips, measure

_CAPABILITY = flags.DEFINE_integer("capability", 90, "Compute capability that is compiled for.")

# What XLA is given of a kernel: its grid, Triton's language as MLIR bytecode, and settings.
_KERNEL = re.compile(
    r'grid_x = (\d+) : i32, grid_y = (\d+) : i32, grid_z = (\d+) : i32, ir = "((?:[^"\\]|\\.)*)", '
    r'name = "(\w+)", num_stages = (\d+) : i32, num_warps = (\d+) : i32'
)
_BUFFERS = re.compile(r"local_alloc : \(\) -> !ttg.memdesc<(\d+)x(\d+)x(\d+)x\w+?(\d+)[,x]")
# Of a multiprocessor of capability 9.0: registers, bytes of shared memory, warps and programs, and
# the bytes that a program takes for itself.
_REGISTERS, _SHARED, _WARPS, _PROGRAMS, _RESERVED = 65536, 233472, 64, 32, 1024


class Kernel(NamedTuple):
    """A kernel as Pallas hands it to XLA."""

    name: str
    grid: tuple[int, ...]
    text: str
    n_stages: int
    n_warps: int


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if importlib.util.find_spec("triton") is None:
        raise app.UsageError("no compiler: triton is missing; pip install 'kvrt[aot]'")
    jax.config.update("jax_platforms", "cpu")
    for program in aot.programs("pallas_gpu"):
        for kernel in kernels(program):
            found = {"program": program.name, "kernel": kernel.name, "grid": kernel.grid}
            measure.emit("gpu code", **found, **compiled(kernel))


def kernels(program: aot.Program) -> Iterator[Kernel]:
    """The kernels of a program, lowered for CUDA."""
    text = chips.lowered(jax.jit(program.run), program.args, "cuda").mlir_module()
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


def compiled(kernel: Kernel) -> dict[str, Any]:
    """What a kernel takes as machine code."""
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    triton: Any = importlib.import_module("triton")
    backend: Any = importlib.import_module("triton.backends.compiler")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ttir")
        source.write_text(kernel.text)
        target = backend.GPUTarget("cuda", _CAPABILITY.value, 32)
        options = {"num_warps": kernel.n_warps, "num_stages": kernel.n_stages}
        made = triton.compile(str(source), target=target, options=options)
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(made.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        command = [str(tool), "-res-usage", str(binary)]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (usage,) = re.findall(r"REG:(\d+) STACK:(\d+)", told)
    registers, spilled = map(int, usage)
    shared = made.metadata.shared + _RESERVED
    each = -(-registers // 8) * 8 * 32 * kernel.n_warps
    n = min(_REGISTERS // each, _SHARED // shared, _WARPS // kernel.n_warps, _PROGRAMS)
    buffers = [list(map(int, x)) for x in _BUFFERS.findall(made.asm["ttgir"])]
    held = sum(depth * a * b * bits // 8 for depth, a, b, bits in buffers)
    return {
        "registers": registers,
        "spilled_bytes": spilled,
        "shared_bytes": shared,
        "programs": n,
        "loading_bytes": n * held,
    }


if __name__ == "__main__":
    app.run(main)
