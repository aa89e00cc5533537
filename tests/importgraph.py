"""Every import of a module, wherever it stands in it, as dotted names of what it comes from."""

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = {"kvrt": ROOT / "kvrt"}
MODELS = ROOT / "models" / "kvrt_models"

PACKAGES[MODELS.name] = MODELS
_DOTTED = re.compile(rf"({'|'.join(PACKAGES)})(\.[A-Za-z_]\w*)+\.?")


def module_files(package: str) -> list[Path]:
    return sorted(PACKAGES[package].rglob("*.py"))


def module_name(path: Path) -> str:
    """kvrt/cells/slots.py is kvrt.cells.slots, a room's `__init__` the room."""
    for package, folder in PACKAGES.items():
        if path.is_relative_to(folder):
            parts = (package, *path.relative_to(folder).with_suffix("").parts)
            return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    raise ValueError(f"{path} is in none of {list(PACKAGES)}")


def is_module(name: str) -> bool:
    package, *rest = name.split(".")
    if package not in PACKAGES:
        return False
    path = PACKAGES[package].joinpath(*rest)
    return (path / "__init__.py").exists() or path.with_suffix(".py").exists()


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def homes() -> dict[str, str]:
    """Where each name that `kvrt` itself offers comes from."""
    found = {"version": "kvrt", "__version__": "kvrt"}
    for node in ast.walk(_tree(ROOT / "kvrt" / "__init__.py")):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {alias.asname or alias.name: node.module for alias in node.names}
    return found


def _offered(name: str) -> str:
    """What `kvrt.NAME` stands for: a room, a module of it, or the room that NAME comes from."""
    parts = name.split(".")
    if parts[0] != "kvrt" or len(parts) < 2 or is_module(".".join(parts[:2])):
        return name
    if parts[1] not in homes():
        raise ValueError(f"kvrt offers no {parts[1]}")
    return homes()[parts[1]]


def _absolute(node: ast.ImportFrom, path: Path) -> str:
    if not node.level:
        return node.module or ""
    parts = module_name(path).split(".")
    above = parts[: len(parts) - node.level + (path.name == "__init__.py")]
    return ".".join([*above, *([node.module] if node.module else [])])


def _from(node: ast.ImportFrom, path: Path) -> set[str]:
    base = _absolute(node, path)
    if base.split(".")[0] not in PACKAGES:
        return {base}
    names = {f"{base}.{alias.name}" for alias in node.names}
    if base == "kvrt":
        return {_offered(name) for name in names}
    return {base} | {name for name in names if is_module(name)}


def _attributes(tree: ast.Module, name: str) -> set[str]:
    """`kvrt.X` for each attribute X of a name that `import kvrt` bound."""
    nodes = (n for n in ast.walk(tree) if isinstance(n, ast.Attribute))
    return {f"kvrt.{n.attr}" for n in nodes if isinstance(n.value, ast.Name) and n.value.id == name}


def _strings(tree: ast.Module) -> set[str]:
    """Names of modules in strings: what importlib, lazy tables and child processes are given."""
    found = set()
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            continue
        if _DOTTED.fullmatch(node.value):
            name = node.value.rstrip(".")
            while name and not is_module(name):
                name = name.rpartition(".")[0]
            found |= {name} if "." in name else set()
    return found


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Modules that a file imports: at its top, in functions, for types, by name or by a string."""
    tree, found = _tree(path), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "kvrt":
                    found |= set(map(_offered, _attributes(tree, alias.asname or "kvrt")))
                else:
                    found.add(alias.name)
        elif isinstance(node, ast.ImportFrom):
            found |= _from(node, path)
    return frozenset((found | _strings(tree)) - {module_name(path)})
