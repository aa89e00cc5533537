"""Instructions that the sums of few tokens are compiled to, for this processor and for others.

    python -m scripts.bench.layers.sum_code --cpu AVX2,AVX512_VNNI --tokens 1,8
    pip install 'kvrt[aot]'
    python -m scripts.bench.layers.sum_code --cpu znver3,neoverse-n1

One JSON line a sum, number of tokens and CPU: how often the kernel that reads the weights has each
instruction that counts, and whether the form is lost: products of floats that are not vectorized.
The exit code is then 1. "here" is what XLA compiles here,
read by `objdump`; an instruction set of XLA's (AVX2) is the same in a process that may take no
more. A CPU that is named as LLVM does (znver3) need not be here: XLA's code before optimization is
compiled by the LLVM of llvmlite, which is another version than XLA's. Sums that XLA hands to
YNNPACK have no such kernel.
"""

import collections
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

from kvrt_models.layers import int8
from kvrt_models.layers.linear import linear
from scripts._lib import measure

ISAS = ("SSE4_2", "AVX2", "AVX512", "AVX512_VNNI", "AVX512_BF16")
_X86, _ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"
CPUS = {"haswell": _X86, "znver3": _X86, "znver4": _X86, "znver5": _X86, "sapphirerapids": _X86}
CPUS |= {"neoverse-n1": _ARM, "neoverse-v2": _ARM, "apple-m1": _ARM}
SUMS = ("int8", "f16", "bf16")

_CPU = flags.DEFINE_list("cpu", ["here"], f"Of here, {', '.join([*ISAS, *CPUS])}.")
_SUM = flags.DEFINE_list("sum", list(SUMS), f"Of {', '.join(SUMS)}: the type of the weights.")
_TOKENS = flags.DEFINE_list("tokens", ["1", "8"], "For int8; the other sums are of one token.")

# Outputs and inputs of the matrix: one of SmolLM2's.
_SIZE = (3072, 576)
# Products of registers of floats; those of single floats.
_PACKED = re.compile(r"v?mulps|vfn?m(add|sub)\d+ps|fmla|fmul")
_SINGLE = re.compile(r"v?mulss|vfn?m(add|sub)\d+ss|fmadd")
_WIDENED = re.compile(r"v?pmov[sz]xb[wd]|[su]shll2?|vcvtph2ps|fcvtl2?")
_COUNTED = (_PACKED, _SINGLE, _WIDENED)

Counts = Mapping[str, int]


def main(argv: Sequence[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    for value, known in ((_CPU.value, {"here", *ISAS, *CPUS}), (_SUM.value, set(SUMS))):
        if strange := sorted(set(value) - known):
            raise app.UsageError(f"{', '.join(strange)}: not of {', '.join(sorted(known))}")
    lost = False
    for cpu in _CPU.value:
        for line in with_at_most(cpu) if cpu in ISAS else lines(cpu):
            measure.emit("sum code", **line)
            lost |= line.get("lost", False)
    return int(lost)


def lines(cpu: str) -> Iterator[dict[str, Any]]:
    """A line a sum, for a CPU of LLVM's or the one that is here."""
    for kind in _SUM.value:
        for n_tokens in map(int, _TOKENS.value if kind == "int8" else ["1"]):
            yield {"sum": kind, "tokens": n_tokens, "cpu": cpu, **of_sum(kind, n_tokens, cpu)}


def with_at_most(isa: str) -> Iterator[dict[str, Any]]:
    """The lines of a process whose XLA takes no more than an instruction set."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_max_isa={isa}"
    command = [sys.executable, "-m", "scripts.bench.layers.sum_code", "--cpu=here"]
    command += [f"--sum={','.join(_SUM.value)}", f"--tokens={','.join(_TOKENS.value)}"]
    done = subprocess.run(
        command, env=os.environ | {"XLA_FLAGS": flags}, stdout=subprocess.PIPE, text=True
    )
    for line in map(json.loads, done.stdout.splitlines()):
        of = ("sum", "tokens", "counts", "lost", "library")
        yield {"cpu": isa, **{name: line[name] for name in of if name in line}}


def of_sum(kind: str, n_tokens: int, cpu: str) -> dict[str, Any]:
    """The instructions of one sum, and whether they are those that make it fast."""
    n_outputs, n_inputs = _SIZE
    x = jax.ShapeDtypeStruct((n_tokens, n_inputs), jnp.float32)
    if kind == "int8":
        lowered = jax.jit(int8.int8_product).lower(x, int8.shapes(_SIZE))
    else:
        dtype = jnp.float16 if kind == "f16" else jnp.bfloat16
        lowered = jax.jit(linear).lower(x, jax.ShapeDtypeStruct(_SIZE, dtype))
    n_bytes = n_outputs * n_inputs * (1 if kind == "int8" else 2)
    with tempfile.TemporaryDirectory() as folder:
        lowered.compile({"xla_dump_to": folder})
        code = kernel(Path(folder), n_bytes)
        if code is None:
            return {"library": True}
        counts = disassembled(code) if cpu == "here" else by_llvm(code, cpu)
    return {"counts": counts, "lost": is_lost(counts)}


def is_lost(counts: Counts) -> bool:
    """Whether a sum does not take the instructions that its form is for."""
    of_kinds = (_PACKED, _SINGLE)
    n_good, n_bad = (sum(n for x, n in counts.items() if of.fullmatch(x)) for of in of_kinds)
    return n_good <= 2 * n_bad


def kernel(folder: Path, n_bytes: int) -> Path | None:
    """LLVM's text of the kernel that reads so many bytes, of what XLA has written there.

    None where a library reads them.
    """
    said = f"{{i64 {n_bytes}}}"
    return next((x for x in folder.glob("*.ir-no-opt.ll") if said in x.read_text()), None)


def disassembled(code: Path) -> Counts:
    """Instructions of the object that XLA made of a kernel."""
    module = code.name.removesuffix(".ir-no-opt.ll").rpartition(".")[2]
    (path,) = code.parent.glob(f"*.obj-file.{module}.o")
    command = ["objdump", "-d", "--no-show-raw-insn", str(path)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return _counts(re.findall(r"^\s+[0-9a-f]+:\s+(?:\{\w+\} )?(\w+)", text, re.MULTILINE))


def by_llvm(code: Path, cpu: str) -> Counts:
    """Instructions that LLVM makes of a kernel for a CPU of its names."""
    import llvmlite.binding as llvm  # pyright: ignore[reportMissingImports]

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple(CPUS[cpu])
    machine = target.create_target_machine(cpu=cpu, opt=3)
    text = re.sub(r"target (triple|datalayout) = .*\n", "", code.read_text())
    module = llvm.parse_assembly(text)
    module.triple, module.data_layout = CPUS[cpu], str(machine.target_data)
    tuning = llvm.create_pipeline_tuning_options(speed_level=3)
    passes = llvm.create_pass_builder(machine, tuning)
    passes.getModulePassManager().run(module, passes)
    return _counts(re.findall(r"^\s+([a-z]\w*)", machine.emit_assembly(module), re.MULTILINE))


def _counts(names: Sequence[str]) -> Counts:
    found = collections.Counter(names)
    kept = (x for x in found if any(of.fullmatch(x) for of in _COUNTED))
    return {name: found[name] for name in sorted(kept)}


if __name__ == "__main__":
    app.run(main)
