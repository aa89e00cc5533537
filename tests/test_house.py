"""The size of things: parameters, functions, files, rooms, and names that mean one thing.

Tables of exceptions may only shrink: one that is no exception any more fails.
"""

import ast
import functools
from collections import defaultdict
from pathlib import Path

import pytest
from importgraph import MODELS, PACKAGES, ROOT, module_files, module_name

MAX_PARAMETERS, MAX_BODY, MAX_FILE, MAX_ROOM = 6, 40, 600, 12
SCRIPTS = sorted((ROOT / "scripts").rglob("*.py"))
MODULES = [path for package in PACKAGES for path in module_files(package)]
# A family of models is a file, however many there are.
FAMILIES = MODELS / "families"
FOLDERS = sorted({path.parent for path in [*MODULES, *SCRIPTS]} - {FAMILIES})

# Functions with more than six parameters, and why: ten at most.
PARAMETERS = {
    "runtime:Runtime.generate": "what a user may say of one answer, all but the first by keyword",
    "llama:read": "files of llama.cpp say little of themselves: the caller says the rest",
    "llama:write": "the same, for writing",
    "mlx:write": "the same, for mlx-lm",
}

# Functions of more than 40 lines, and how many they have.
BODIES: dict[str, int] = {}

# Folders with more than a dozen files, and how many they have.
ROOMS = {}

# Public classes and functions with several definitions: one interface with several implementations.
# Where all of them are, and what they have in common.
INTERFACES = {
    "Decoder": ("kvrt", "the protocol of a model, and our models"),
    "apply": ("kvrt.cell", "an edit of a sequence, applied by each part of the host's bookkeeping"),
    "apply_shift": ("kvrt.upkeep", "the K-shift on one device, and on each of a mesh"),
    "attend": ("kvrt.attention", "four arguments: XLA, the reference, kernels, a mesh, the choice"),
    "clear": ("kvrt.cell", "the empty form of cells, a group, states, and all of them"),
    "clear_kv": ("kvrt.store", "the same on one device, and on each of a mesh"),
    "copy_blocks": ("kvrt.store", "as `clear_kv`"),
    "create": ("kvrt", "the first value of what a module is about: cells, stores, cache, sampler"),
    "resume_gaps": ("kvrt.cellcache", "where a sequence cannot be cut back to: windows, states"),
    "forward": ("kvrt.program", "a step of a batch, and the program of one"),
    "execute": ("kvrt.cli", "a command, from its flags to its exit code"),
    "keep_runs": ("kvrt.store", "as `clear_kv`"),
    "kernel": ("kvrt.attention.pallas", "the kernel of a platform, for `attend`"),
    "main": ("kvrt", "the entry of a program of its own"),
    "move_kv": ("kvrt.store", "as `clear_kv`"),
    "move_blocks": ("kvrt.store", "as `clear_kv`"),
    "n_past": ("kvrt.cellcache", "the next position of a sequence: in cells, and in states"),
    "open_session": ("kvrt.session", "a container of sessions, a file or a folder, and the choice"),
    "put_blocks": ("kvrt.store", "as `clear_kv`"),
    "put_kv": ("kvrt.store", "as `clear_kv`"),
    "read": ("kvrt.session", "a snapshot from a file: ours, a folder's, llama.cpp's, mlx-lm's"),
    "read_cells": ("kvrt.session", "as `open_session`"),
    "read_manifest": ("kvrt.session", "as `open_session`"),
    "read_parts": ("kvrt.session", "as `open_session`"),
    "save": ("kvrt.session", "as `open_session`"),
    "sums": ("kvrt.attention.pallas", "as `kernel`"),
    "take_blocks": ("kvrt.store", "as `clear_kv`"),
    "take_kv": ("kvrt.store", "as `clear_kv`"),
    "write": ("kvrt.session.interop", "a snapshot for another program"),
    "write_kv": ("kvrt.store", "as `clear_kv`"),
}


def functions(tree: ast.Module, stem: str):
    """("file:function", node) of each function of a file, "file:Class.method" of each method."""

    def walk(node, prefix):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                continue
            name = f"{prefix}{getattr(child, 'name', '')}"
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield name, child
                yield from walk(child, f"{name}.")
            elif isinstance(child, ast.ClassDef):
                yield from walk(child, f"{name}.")
            else:
                yield from walk(child, prefix)

    yield from ((f"{stem}:{name}", node) for name, node in walk(tree, ""))


@functools.cache
def outline(path: Path):
    """(name, parameters, lines) of each function of a file, and its public names; not its tree."""
    tree = ast.parse(path.read_text())
    sizes = [(name, n_parameters(x), n_lines(x)) for name, x in functions(tree, path.stem)]
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    names = [node.name for node in tree.body if isinstance(node, kinds)]
    return sizes, [name for name in names if not name.startswith("_")]


def all_functions():
    """Those of the package, the models and the scripts."""
    return [found for path in [*MODULES, *SCRIPTS] for found in outline(path)[0]]


def n_parameters(function: ast.FunctionDef) -> int:
    """What a caller may give, without self; *args and **rest are one each."""
    a = function.args
    names = [p.arg for p in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"])) + bool(a.vararg) + bool(a.kwarg)


def n_lines(function: ast.FunctionDef) -> int:
    """Lines of a function's body, without its docstring."""
    body = function.body
    if isinstance(body[0], ast.Expr) and ast.get_docstring(function) is not None:
        body = body[1:]
    return function.end_lineno - body[0].lineno + 1 if body else 0


def too_many_parameters() -> dict[str, int]:
    found = {name: n for name, n, _ in all_functions()}
    return {name: n for name, n in found.items() if n > MAX_PARAMETERS}


def too_long() -> dict[str, int]:
    found = {name: n for name, _, n in all_functions()}
    return {name: n for name, n in found.items() if n > MAX_BODY}


def too_many_files() -> dict[str, int]:
    names = {str(folder.relative_to(ROOT)): folder for folder in FOLDERS}
    found = {
        name: sum(p.name != "__init__.py" for p in folder.glob("*.py"))
        for name, folder in names.items()
    }
    return {name: n for name, n in found.items() if n > MAX_ROOM}


def test_functions_take_at_most_six_parameters():
    found = too_many_parameters()
    assert set(found) <= set(PARAMETERS), found
    assert len(PARAMETERS) <= 10 and all(PARAMETERS.values())


def test_functions_stay_short():
    found = too_long()
    assert all(n <= BODIES.get(name, 0) for name, n in found.items()), found


def test_files_stay_small():
    sizes = {path: len(path.read_text().splitlines()) for path in [*MODULES, *SCRIPTS]}
    assert {path: n for path, n in sizes.items() if n > MAX_FILE} == {}


def test_no_folder_is_a_warehouse():
    found = too_many_files()
    assert all(n <= ROOMS.get(name, 0) for name, n in found.items()), found


@pytest.mark.slow
def test_no_exception_is_out_of_date():
    """What is no exception any more leaves its table, and a count becomes what it is."""
    assert set(PARAMETERS) <= set(too_many_parameters())
    assert too_long() == BODIES
    assert too_many_files() == ROOMS
    assert set(INTERFACES) <= set(shared_names())


def test_every_room_says_what_it_is():
    rooms = [p for p in (ROOT / "kvrt").iterdir() if (p / "__init__.py").exists()]
    for folder in [*rooms, MODELS if (MODELS / "README.md").exists() else MODELS.parent]:
        text = (folder / "README.md").read_text()
        assert 4 <= len(text.splitlines()) <= 30, folder


def shared_names() -> dict[str, list[str]]:
    """Public classes and functions that are defined in more than one module, and where."""
    places = defaultdict(list)
    for path in MODULES:
        for name in outline(path)[1]:
            places[name].append(module_name(path))
    return {name: modules for name, modules in sorted(places.items()) if len(modules) > 1}


def test_a_name_means_one_thing():
    """A second thing gets a name of its own; implementations of one interface share theirs."""
    for name, modules in shared_names().items():
        assert name in INTERFACES, f"{name} is defined in {', '.join(modules)}"
        room = INTERFACES[name][0]
        assert all(module.startswith(room) for module in modules), f"{name}: {modules}"
