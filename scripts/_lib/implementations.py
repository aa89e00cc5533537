"""Implementations of attention that run here, with tile sizes of one's own or interpreted.

A new kernel needs no line here: whatever the registry makes with `load_kernel` is a kernel, whose
tiles are searched where its module takes a table of them and `CHOICES` has its sizes.
"""

import functools
import importlib
import inspect
import itertools

import jax

from kvrt.attention import registry
from kvrt.attention.pallas import attend, tiles
from kvrt.errors import NoKernel

# Sizes that are tried, by the kernel's module.
CHOICES: dict[str, dict[str, tuple[int, ...]]] = {
    "gpu": {
        "cells": (16, 32, 64, 128),
        "stages": (2, 3, 4, 6),
        "warps": (2, 8),
        "programs": (256, 512, 2048, 4096),
        "queries": (16, 32, 128),
    },
    "tpu": {
        "pass_bytes": (1 << 18, 1 << 19, 1 << 21, 1 << 22),
        "queries": (32, 64, 256),
    },
}
_NUMBERS = itertools.count()


def kernel_module(name: str) -> str | None:
    """The module of a kernel of Pallas, None of another implementation."""
    make = registry.IMPLEMENTATIONS[plain_name(name)]
    if isinstance(make, functools.partial) and make.func is registry.load_kernel:
        return make.args[0]
    return None


def plain_name(name: str) -> str:
    """The implementation that a name of `with_options` is of."""
    return name.split()[0]


def running(*, interpret: bool = False) -> list[str]:
    """Names of what can run here; with `interpret` kernels of every platform, as XLA operations."""
    # The whole score matrix at once is for tests.
    names = [x for x in registry.IMPLEMENTATIONS if x != "reference" and " " not in x]
    return [x for x in names if refusal(x, interpret=interpret) is None]


def refusal(name: str, *, interpret: bool = False) -> str | None:
    """Why this device cannot run an implementation, None where it can."""
    try:
        module = kernel_module(name)
        if interpret and module:
            registry.load_kernel(module, interpret=True)
        else:
            registry.require(name, jax.default_backend())
    except NoKernel as error:
        return str(error)
    return None


def tile_choices(name: str) -> dict[str, tuple[int, ...]]:
    """Sizes that may be tried, by name; none of a kernel that takes no table."""
    module = kernel_module(name)
    return CHOICES.get(module, {}) if module and _takes_table(module) else {}


def with_options(name: str, table: tiles.Table | None, *, interpret: bool = False) -> str:
    """A name for `CacheConfig.attention`: the implementation with that table in force."""
    module = kernel_module(name)
    if module is None or (table is None and not interpret):
        return name
    options: dict[str, object] = {"interpret": True} if interpret else {}
    if table is not None and _takes_table(module):
        options["table"] = table
    made = importlib.import_module(f"kvrt.attention.pallas.{module}").kernel(**options)
    new = f"{name} {next(_NUMBERS)}"
    registry.register(new, lambda: functools.partial(attend.attend, made))
    return new


@functools.cache
def _takes_table(module: str) -> bool:
    kernel = importlib.import_module(f"kvrt.attention.pallas.{module}").kernel
    return "table" in inspect.signature(kernel).parameters
