"""Programs compiled for chips that no machine here has, by scripts/aot.py.

libtpu is fetched once into the cache folder and not installed: every start of JAX without
JAX_PLATFORMS would look for a TPU and say on the error stream that there is none, and die of
XLA_FLAGS that libtpu does not know.
"""

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest

from kvrt_models.hub import cache_dir

ROOT = Path(__file__).parents[2]
KERNEL_HEADS = "64"
SHAPE = ("--shape", "llama-3.1-8b", "--layers", "2")


def libtpu():
    """A folder with the pinned version, for PYTHONPATH."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    (pin,) = (x for x in extras["aot"] if x.startswith("libtpu=="))
    folder = cache_dir() / pin.replace("==", "-")
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as partial:
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
            subprocess.run([*pip, "--target", f"{partial}/whole", pin], check=True)
            Path(partial, "whole").rename(folder)
    return folder


def run(*args, path=()):
    python_path = os.pathsep.join([*map(str, (*path, ROOT)), os.environ.get("PYTHONPATH", "")])
    # libtpu ends a process whose XLA_FLAGS name one that it does not know, as conftest.py's do.
    env = os.environ | {"PYTHONPATH": python_path, "XLA_FLAGS": ""}
    command = [sys.executable, "-m", "scripts.aot", *SHAPE, *args]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {x["program"]: x for x in map(json.loads, done.stdout.splitlines())}


@pytest.mark.model
def test_a_step_for_v5e_writes_its_cache_in_place_and_copies_no_rows():
    found = run("--topology", "v5e", "--kernels", KERNEL_HEADS, path=[libtpu()])
    for attention in ("chunked", "pallas_tpu"):
        step = found[f"decode step, {attention}"]
        assert step["chip"] == "v5e"
        assert step["alias_bytes"] == step["cache_bytes"] > 2 * step["row_bytes"]
        assert step["temp_bytes"] < step["row_bytes"] / 2
    for rows in ("f32", "bf16", "int8"):
        kernel = found[f"kernel, head of {KERNEL_HEADS}, {rows}"]
        # XLA counts what it moves itself, the rows not among it.
        assert kernel["bytes_accessed"] < kernel["row_bytes"] / 2
        assert kernel["temp_bytes"] < kernel["row_bytes"] / 2


@pytest.mark.slow
def test_a_step_for_cuda_calls_the_kernel():
    found = run("--topology", "", "--lower", "cuda", "--kernels", KERNEL_HEADS)
    assert len(found) == 6
    for name, figures in found.items():
        assert figures["chip"] == "cuda"
        assert figures["module_bytes"] > 10_000
        # One reads, one ends, or reads the own tokens of a prompt; layers of one kind share them.
        assert figures["n_kernel_calls"] == (0 if name == "decode step, chunked" else 2)
