"""The rooms import downwards only, and JAX is imported late by the command line."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# DESIGN: imports point up this list only. Rooms of one row do not import each other.
ROWS = [
    ("errors",),
    ("arrays", "row_types"),
    ("config",),
    ("extent",),
    ("cells", "store", "paged"),
    ("attention",),
    ("upkeep",),
    ("policies",),
    ("session",),
    ("engine",),
    ("cli",),
]
RANK = {room: rank for rank, rooms in enumerate(ROWS) for room in rooms}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def rooms(names: set[str]) -> set[str]:
    parts = [name.split(".") for name in names]
    return {p[1] for p in parts if p[0] == "kvrt" and len(p) > 1 and p[1] in RANK}


FILES = sorted(p for p in (ROOT / "kvrt").rglob("*.py") if p.parent != ROOT / "kvrt")
FILES += [
    ROOT / "kvrt" / f"{name}.py" for name in ("errors", "arrays", "row_types", "config", "extent")
]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_room_imports_only_rooms_above_it(path):
    own = path.relative_to(ROOT / "kvrt").parts[0].removesuffix(".py")
    for other in rooms(imports(path)) - {own}:
        assert RANK[other] < RANK[own], f"{own} imports {other}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_only_the_command_line_imports_models(path):
    own = path.relative_to(ROOT / "kvrt").parts[0]
    assert own == "cli" or not any(n.split(".")[0] == "kvrt_models" for n in imports(path))


MODELS = ROOT / "models" / "kvrt_models"
# All of kvrt that the models know: what is given to attention, and what has no bytes of a cache.
MODELS_IMPORT = {
    "kvrt.arrays",
    "kvrt.attention.contract",
    "kvrt.config",
    "kvrt.errors",
    "kvrt.files.regular",
    "kvrt.kv_types",
}


def modules(path: Path) -> set[str]:
    """Modules of kvrt that a file imports from: `from a import b` means a.b where that is one."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {module(name) for name in found if name.split(".")[0] == "kvrt"}


def module(name: str) -> str:
    """The module that has a dotted name: itself, or the one before the last dot."""
    path = ROOT / name.replace(".", "/")
    is_one = path.with_suffix(".py").exists() or (path / "__init__.py").exists()
    return name if is_one else name.rpartition(".")[0]


def test_models_know_the_attention_contract_and_no_cache():
    found = {name for path in MODELS.rglob("*.py") for name in modules(path)}
    assert found == MODELS_IMPORT


def test_wings_of_the_models_stay_small():
    for wing in (MODELS, *(p for p in MODELS.iterdir() if (p / "__init__.py").exists())):
        names = {p.stem for p in wing.glob("*.py")} - {"__init__"}
        assert len(names) <= 12 and wing.name not in names, wing
        assert (wing / "README.md").exists(), wing


def test_every_room_is_known():
    there = {p.name for p in (ROOT / "kvrt").iterdir() if (p / "__init__.py").exists()}
    assert there <= set(RANK)


def test_files_stay_small():
    for path in [*(ROOT / "kvrt").rglob("*.py"), *(ROOT / "models").rglob("*.py")]:
        assert len(path.read_text().splitlines()) <= 400, path


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
