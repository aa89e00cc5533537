"""The rooms import downwards only, and JAX is imported late by the command line."""

import subprocess
import sys
import textwrap

import importgraph
import pytest
from importgraph import MODELS, ROOT, imports, module_files, module_name

# Imports point up this list only. Rooms of one line do not import each other.
ORDER = """
    errors
    arrays whole_numbers
    files
    kv_types config_rules state_arrays drafts
    config
    options
    sizes jax_settings
    exclusive
    cells store
    paged
    attention
    upkeep
    policies
    cellcache
    reuse
    session
    program
    cache
    runtime serving
    cli
"""
LINES = [line.split() for line in ORDER.strip().splitlines()]
RANK = {room: rank for rank, rooms in enumerate(LINES) for room in rooms}
# All of kvrt that the models know: what is given to attention, and what has no bytes of a cache.
OF_MODELS = {
    "kvrt.arrays",
    "kvrt.attention.contract",
    "kvrt.config",
    "kvrt.errors",
    "kvrt.exclusive",
    "kvrt.files.atomic",
    "kvrt.files.cache_folder",
    "kvrt.files.kept",
    "kvrt.files.regular",
    "kvrt.kv_types",
}

FILES = [p for p in module_files("kvrt") if p.parent != ROOT / "kvrt"]
FILES += [p for p in (ROOT / "kvrt").glob("*.py") if p.stem not in ("__init__", "__main__")]


def room(module: str) -> str:
    """The room of a module of kvrt; "" of `kvrt` itself and of other packages."""
    parts = module.split(".")
    return parts[1] if parts[0] == "kvrt" and len(parts) > 1 else ""


def rooms(path) -> set[str]:
    return set(map(room, imports(path))) - {""}


def test_a_room_imports_only_rooms_above_it():
    own = {path: room(module_name(path)) for path in FILES}
    others = [(path, other) for path in FILES for other in rooms(path) - {own[path]}]
    assert len(others) > len(FILES)
    assert [(path, x) for path, x in others if RANK[x] >= RANK[own[path]]] == []


def test_only_the_command_line_imports_models():
    found = [p for p in FILES if any(n.split(".")[0] == MODELS.name for n in imports(p))]
    assert {room(module_name(path)) for path in found} == {"cli"}, found


@pytest.mark.slow
def test_models_know_the_attention_contract_and_no_cache():
    packages = {name.rpartition(".")[0] for name in OF_MODELS}
    found = {n for p in module_files(MODELS.name) for n in imports(p) if room(n)}
    assert found - packages == OF_MODELS


def test_every_room_is_known():
    there = {p.name for p in (ROOT / "kvrt").iterdir() if (p / "__init__.py").exists()}
    there |= {p.stem for p in (ROOT / "kvrt").glob("*.py")} - {"__init__", "__main__"}
    assert there == set(RANK)


def circle(module: str, edges: dict[str, set[str]]) -> list[str]:
    """A way from a module back to itself, or nothing."""
    ways, seen = [[module]], set()
    while ways:
        way = ways.pop()
        for other in sorted(edges[way[-1]]):
            if other == module:
                return [*way, module]
            if other not in seen:
                seen.add(other)
                ways.append([*way, other])
    return []


def test_no_modules_import_each_other_in_a_circle():
    inside = {module_name(p): imports(p) for p in FILES if p.name != "__init__.py"}
    edges = {module: set(names) & set(inside) for module, names in inside.items()}
    assert [way for way in (circle(module, edges) for module in edges) if way] == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("def f():\n    from kvrt.session import io", {"kvrt.session", "kvrt.session.io"}),
        ("if TYPE_CHECKING:\n    import kvrt.store.kv", {"kvrt.store.kv"}),
        ("import kvrt\nkvrt.version()\nkvrt.CacheConfig()", {"kvrt", "kvrt.options.cache"}),
        ("from kvrt import CacheConfig, session", {"kvrt.options.cache", "kvrt.session"}),
        ("from . import slots", {"kvrt.cells", "kvrt.cells.slots"}),
        ("from .. import session", {"kvrt.session"}),
        ("from ..session.io import read", {"kvrt.session.io"}),
        ("import_module('kvrt.session.io')", {"kvrt.session.io"}),
        ("import_module(f'kvrt.session.{name}')", {"kvrt.session"}),
        ("HOMES = {'read': 'kvrt.session.io.read'}", {"kvrt.session.io"}),
        ("import numpy", {"numpy"}),
    ],
)
def test_every_kind_of_import_is_seen(code, found, tmp_path, monkeypatch):
    monkeypatch.setattr(importgraph, "module_name", lambda _: "kvrt.cells.edits")
    path = tmp_path / "edits.py"
    path.write_text(textwrap.dedent(code))
    assert imports(path) == found


def test_help_needs_no_jax():
    code = (
        "import sys\n"
        "from kvrt.cli.main import run\n"
        "sys.argv = ['kvrt', 'run', '--help']\n"
        "try:\n    run()\nexcept SystemExit as end:\n    assert end.code in (0, None), end.code\n"
        "assert 'jax' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "--n_predict" in done.stdout
