"""JAX's process-wide settings that change results or stop a step, as kvrt computes under them.

An environment variable (JAX_ENABLE_X64) or `jax.config.update` sets them for a whole process.
Calls of a `Runtime` or an `Engine` run under kvrt's values whatever the process has, and leave its
own as they were; a command sets them once. Random numbers name what they need in
`kvrt.program.sample`.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax

# The name of each, kvrt's values of which the first is set, and the context that sets it.
_OWN: dict[str, tuple[tuple[Any, ...], Callable[[Any], AbstractContextManager]]] = {
    "jax_enable_x64": ((False,), jax.enable_x64),
    "jax_disable_jit": ((False,), jax.disable_jit),
    "jax_threefry_partitionable": ((True,), jax.threefry_partitionable),
    "jax_default_matmul_precision": ((None,), jax.default_matmul_precision),
    "jax_transfer_guard_host_to_device": (("allow", None), jax.transfer_guard_host_to_device),
    "jax_transfer_guard_device_to_device": (("allow", None), jax.transfer_guard_device_to_device),
    "jax_transfer_guard_device_to_host": (("allow", None), jax.transfer_guard_device_to_host),
}


@contextlib.contextmanager
def own_settings() -> Iterator[None]:
    """Kvrt's settings in this thread, for a call."""
    with contextlib.ExitStack() as stack:
        for name in _others():
            values, context = _OWN[name]
            stack.enter_context(context(values[0]))
        yield


def set_for_process() -> None:
    """Kvrt's settings in all threads of a process that does nothing else: a command's."""
    for name in _others():
        jax.config.update(name, _OWN[name][0][0])
    # JAX has no context that ends it for a call.
    jax.config.update("jax_no_tracing", False)


def _others() -> list[str]:
    """Settings that are not kvrt's, mostly none."""
    return [x for x, (values, _) in _OWN.items() if getattr(jax.config, x) not in values]


def compiler_options() -> dict[str, str | bool] | None:
    """XLA's options for each program that kvrt compiles: on CPU vectors as wide as there are.

    With the 256 bits that are XLA's default a step of SmolLM2 with int8 weights takes 8.4 ms
    instead of 7.0 (Zen 5, `python -m scripts.bench.decode --what beside --dtype int8`).
    """
    on_cpu = jax.default_backend() == "cpu"
    return {"xla_cpu_prefer_vector_width": "512"} if on_cpu else None
