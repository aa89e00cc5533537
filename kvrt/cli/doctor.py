"""`kvrt doctor`: what kvrt finds on a machine, and what computes attention there."""

import dataclasses
import importlib.metadata
import json
import math
import platform
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvrt
from kvrt.attention.choice import AttentionChoice, choose
from kvrt.attention.choice.cases import Case, Query, case_of, cases_of
from kvrt.cli.flags.serving import DoctorOptions
from kvrt.cli.process import output, startup
from kvrt.cli.process.startup import choosing
from kvrt.cli.report.tables import table
from kvrt.cli.setup.config import cache_config
from kvrt.config import GroupSpec, RopeSpec
from kvrt.errors import UsageError
from kvrt.jax_settings import compiler_options
from kvrt.options.cache import CacheConfig
from kvrt.options.size import show_size
from kvrt.program.layout import Layout, cell_layout
from kvrt_models import load
from kvrt_models.decoder import Decoder
from kvrt_models.layers import int8
from kvrt_models.weights.int8_weights import kept_bytes

# Of models of today, where none is named.
_HEAD_SIZES = (64, 128, 256)
_N_KV_HEADS, _N_Q_HEADS = 2, 8
_N_TRAINED = 4096
# Outputs and inputs of a matrix whose products are measured, how many of them, and runs over all.
_SIZE, _N_MATRICES, _N_RUNS = (3072, 576), 8, 15


def execute(options: DoctorOptions) -> int:
    """Runs the command and returns its exit code; raises KvrtError."""
    startup.check_device(options.attention)
    startup.keep_programs_or_warn()
    found = _found(_choice(options))
    output.write_text(json.dumps(found) + "\n" if options.json else _text(found))
    return 0


def _choice(options: DoctorOptions) -> AttentionChoice:
    """What attention is computed by for the model that is named, or for common head sizes."""
    described = None
    if options.model is not None:
        described = load.describe_model(options.model, progress=not options.json)
    config = cache_config(options, described.spec.n_ctx_train if described else _N_TRAINED)

    def cases() -> list[Case]:
        if described is None:
            return _common(config)
        spec, shapes = described.spec, dict[str, Any](described.weights)
        layout = cell_layout(spec.groups, spec.recurrent, config)
        return cases_of(Decoder(spec, shapes), config, layout.stored)

    with choosing(options.attention, quiet=options.json):
        return choose(options.attention, jax.default_backend(), cases)


def _common(config: CacheConfig) -> list[Case]:
    """Cases of common head sizes, with several query heads a kv head."""
    # The decoders of kvrt_models ask in float32, whatever their weights are.
    query = Query(_N_Q_HEADS, "float32", sinks=False)
    found = []
    for size in _HEAD_SIZES:
        rope = RopeSpec(n_rot=size)
        group = GroupSpec(layers=(0,), n_kv_heads=_N_KV_HEADS, head_dim=size, rope=rope)
        layout: Layout = cell_layout((group,), None, config)
        found += [case_of(config, *pair, query) for pair in layout.stored]
    return found


def _found(choice: AttentionChoice) -> dict[str, Any]:
    """All that is said, by name."""
    device, free = jax.devices()[0], startup.available_bytes()
    on_cpu = jax.default_backend() == "cpu"
    ms = product_ms() if on_cpu else None
    return {
        "kvrt": kvrt.version(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "platform": jax.default_backend(),
        "platform_version": " ".join(device.client.platform_version.split()),
        "devices": [x.device_kind for x in jax.devices()],
        "free_bytes": None if math.isinf(free) else int(free),
        "programs": jax.config.jax_compilation_cache_dir,  # pyright: ignore[reportAttributeAccessIssue]
        "attention": dataclasses.asdict(choice),
        "int8_weights": _weights(),
        "int8_products": f"in lanes to {int8.MOST_IN_LANES} tokens, then f32" if on_cpu else None,
        "int8_product_ms": ms,
    }


def product_ms() -> dict[str, float]:
    """Milliseconds of a product of one token with weights of int8 and f32.

    The best of interleaved runs over eight matrices of 3,072 outputs and 576 inputs, a second.
    """
    rng = np.random.default_rng(0)
    wide = [rng.standard_normal(_SIZE, dtype=np.float32) for _ in range(_N_MATRICES)]
    narrow = [int8.for_device(int8.quantize(w)) for w in wide]
    x = jnp.ones((1, _SIZE[1]), jnp.float32)
    sides: dict[str, tuple[Any, list[Any]]] = {
        "int8": (int8.int8_product, jax.device_put(narrow)),
        "f32": (lambda x, w: x @ w.T, jax.device_put(wide)),
    }
    runs = {
        name: (jax.jit(product).lower(x, of[0]).compile(compiler_options()), of)
        for name, (product, of) in sides.items()
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(_N_RUNS):
        for name, (run, matrices) in runs.items():
            begin = time.perf_counter()
            jax.block_until_ready([run(x, matrix) for matrix in matrices])
            times[name].append(time.perf_counter() - begin)
    return {name: round(min(took) / _N_MATRICES * 1e3, 4) for name, took in times.items()}


def _weights() -> dict[str, Any] | None:
    """Where weights of eight bits are kept, and how many bytes of all models."""
    try:
        folder, n_bytes = kept_bytes()
    except UsageError:
        return None
    return {"folder": str(folder), "n_bytes": n_bytes}


def _text(found: dict[str, Any]) -> str:
    kinds = found["devices"]
    n_each = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    free, version, kept = found["free_bytes"], found["platform_version"], found["int8_weights"]
    on = found["platform"] + (f" ({version})" if version != found["platform"] else "")
    rows = [
        ("kvrt", f"{found['kvrt']}, Python {found['python']}"),
        ("JAX", f"{found['jax']}, jaxlib {found['jaxlib']}"),
        ("platform", on),
        ("devices", ", ".join(f"{n} of {kind}" for kind, n in n_each.items())),
        ("memory", "unknown" if free is None else f"{show_size(free)} free"),
        ("programs", found["programs"] or "not kept"),
        (
            "weights",
            f"{show_size(kept['n_bytes'])} of int8 in {kept['folder']}" if kept else "not kept",
        ),
        ("products", found["int8_products"] and f"of int8 weights: {found['int8_products']}"),
        ("measured", found["int8_product_ms"] and _measured_line(found["int8_product_ms"])),
        ("attention", str(AttentionChoice(**found["attention"]))),
    ]
    rows = [(name, value) for name, value in rows if value]
    return table(("", ""), rows)


def _measured_line(ms: dict[str, float]) -> str:
    """A product of one token by type of the weights, and what to do where float32 is faster."""
    line = ", ".join(f"{name} {x:.3f} ms" for name, x in ms.items())
    advice = "; int8 is no faster than f32 here: use --dtype f32"
    return f"a product of one token: {line}" + (advice if ms["f32"] <= ms["int8"] else "")
