"""Implementations of attention that are measured: all that are registered and run here.

A new kernel needs no line here: whatever the registry makes with `load_kernel` is a kernel, whose
tiles are searched where its module takes a table of them and `CHOICES` has its sizes.
"""

import functools
import importlib
import inspect
import itertools
from collections.abc import Mapping
from typing import Any

import jax

from kvrt.attention import registry
from kvrt.attention.pallas import attend, tiles
from kvrt.errors import NoKernel

# The whole score matrix at once is for tests, and "auto" is one of the others.
_LEFT_OUT = ("reference", "auto")
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


class Implementations:
    """Names of what can run here, and names under which a table of tiles is in force.

    `kernels` are modules by the names of Pallas kernels, `others` the names of all else.
    """

    def __init__(self, *, interpret: bool = False):
        """Looks them up; with `interpret` kernels of every platform run, as XLA operations."""
        self._interpret, self._numbers = interpret, itertools.count()
        self.kernels: dict[str, str] = {}
        self.others: list[str] = []
        for name, make in registry.IMPLEMENTATIONS.items():
            if name in _LEFT_OUT or " " in name:
                continue
            module = _module(make)
            if not (_interprets(module) if interpret and module else _runs_here(name)):
                continue
            if module:
                self.kernels[name] = module
            else:
                self.others.append(name)

    def tile_sizes(self, name: str) -> dict[str, tuple[int, ...]]:
        """Sizes that may be tried, by name; none of a kernel that takes no table."""
        module = self.kernels.get(name, "")
        return CHOICES.get(module, {}) if module and _takes_table(module) else {}

    def registered(self, name: str, table: tiles.Table | None) -> str:
        """A name for `CacheConfig.attention`: the implementation with that table in force."""
        module = self.kernels.get(name)
        if module is None or (table is None and not self._interpret):
            return name
        options: dict[str, object] = {"interpret": True} if self._interpret else {}
        if table is not None and _takes_table(module):
            options["table"] = table
        new = f"{name} {next(self._numbers)}"
        registry.register(new, functools.partial(_with_options, module, options))
        return new


def sizes_in_force(key: tiles.Key | None, table: tiles.Table | None) -> Mapping[str, int]:
    """Measured sizes that a kernel takes from a table, or from its own."""
    table = tiles.packaged_table() if table is None else table
    return table.get(key, {}) if key else {}


def _with_options(module: str, options: Mapping[str, Any]) -> registry.AttendFunction:
    """What `registry.load_kernel` makes, of a kernel that is given more."""
    made = importlib.import_module(f"kvrt.attention.pallas.{module}").kernel(**options)
    return functools.partial(attend.attend, made)


def _module(make: object) -> str | None:
    """The module of a kernel of Pallas, None of another implementation."""
    if isinstance(make, functools.partial) and make.func is registry.load_kernel:
        return make.args[0]
    return None


@functools.cache
def _takes_table(module: str) -> bool:
    kernel = importlib.import_module(f"kvrt.attention.pallas.{module}").kernel
    return "table" in inspect.signature(kernel).parameters


def _interprets(module: str) -> bool:
    try:
        registry.load_kernel(module, interpret=True)
    except NoKernel:
        return False
    return True


def _runs_here(name: str) -> bool:
    try:
        registry.require(name, jax.default_backend())
    except NoKernel:
        return False
    return True
