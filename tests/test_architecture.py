"""The shape of the package: who may import whom, how long files and functions may be, what must be documented."""

import ast
import inspect
import sys
from pathlib import Path

import pytest

import hf_specdec
import hf_specdec_eval

PACKAGE = Path(hf_specdec.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
HARNESS = Path(hf_specdec_eval.__file__).parent
EVERY_FILE = [*FILES, *sorted(HARNESS.rglob("*.py"))]
FILE_LINES = 400
FUNCTION_LINES = 60
LOOP_LINES = 150

LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "tree", "verify"),
    ("cache", "state", "stats", "compat"),
    ("target", "processing"),
    ("drafters", "control"),
    ("loop",),
    ("generate", "mixin"),
    ("cli",),
)
"""From the bottom up. A module imports from its own layer and from those below it, never from above."""

PLACES: dict[str, str] = {
    "templates": "tree",
    "noise": "compat",
    "ends": "processing",
    "outputs": "state",
    "proposal": "state",
    "attention": "compat",
    "capability": "compat",
    "kernels": "compat",
    "prompt": "compat",
    "layers": "compat",
    "partial": "target",
    "config": "loop",
    "vllm": "loop",
    "request": "loop",
    "options": "compat",
    "fingerprint": "compat",
    "demo": "cli",
    "demo_model": "cli",
    "demo_prompts": "cli",
}
"""Modules that the design does not name: each lives in the layer of the one it is listed with."""

TORCH_ONLY = ("errors", "tree", "verify")


def unit(path: Path) -> str:
    """The module or sub-package of the top level that a file belongs to; empty for the package's own `__init__`."""
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def layer(name: str) -> int | None:
    """Which layer a unit lives in, or None when nobody has said."""
    name = PLACES.get(name, name)
    return next((index for index, names in enumerate(LAYERS) if name in names), None)


def imports(path: Path) -> list[tuple[int, str, bool]]:
    """`(line, dotted name, at module level)` of every import; names inside the package are absolute."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = ["hf_specdec", *path.relative_to(PACKAGE).parts[:-1]]
    top = {id(node) for node in ast.walk(tree) if isinstance(node, ast.stmt)} - {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for inner in ast.walk(node)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name, id(node) in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            names = [stem] if node.module else [f"{stem}.{alias.name}" for alias in node.names]
            found += [(node.lineno, name, id(node) in top) for name in names]
    return found


def units_imported(path: Path, late: bool = True) -> list[tuple[int, str]]:
    """`(line, unit)` of every import from this package; `late` counts those inside functions too."""
    found = []
    for line, name, at_module_level in imports(path):
        parts = name.split(".")
        if parts[0] == "hf_specdec" and (late or at_module_level):
            found.append((line, parts[1] if len(parts) > 1 else ""))
    return found


def relative(path: Path) -> str:
    """Within the package; of the harness with `eval/` before it."""
    return str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else f"eval/{path.relative_to(HARNESS)}"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_imports_point_downwards(path):
    own = unit(path)
    if own == "":
        return
    here = layer(own)
    assert here is not None, (
        f"{relative(path)} is in no layer: name it in PLACES of {Path(__file__).name}, beside a module of its layer."
    )
    for line, name in units_imported(path):
        if name in ("", "__init__"):
            raise AssertionError(f"{relative(path)}:{line} imports the package itself; import the module instead.")
        there = layer(name)
        assert there is not None, f"{relative(path)}:{line} imports {name}, which is in no layer."
        assert there <= here, (
            f"{relative(path)}:{line}: {own} (layer {here}) imports {name} (layer {there}), which is above."
        )


def test_units_do_not_import_each_other_in_a_ring():
    graph: dict[str, set[str]] = {}
    for path in FILES:
        if unit(path):
            graph.setdefault(unit(path), set()).update(name for _, name in units_imported(path, late=False))
    done: set[str] = set()

    def visit(name: str, line: tuple[str, ...]) -> None:
        assert name not in line, f"a ring of imports: {' -> '.join([*line, name])}"
        if name not in done:
            for other in graph.get(name, set()) - {name}:
                visit(other, (*line, name))
            done.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize("path", [path for path in FILES if unit(path) in TORCH_ONLY], ids=relative)
def test_the_lowest_layer_needs_torch_alone(path):
    allowed = {*sys.stdlib_module_names, "torch", "hf_specdec"}
    for line, imported, _ in imports(path):
        assert imported.split(".")[0] in allowed, (
            f"{relative(path)}:{line} imports {imported}; this layer has torch only."
        )


def test_only_the_global_generator_of_torch_is_used():
    for path in FILES:
        if unit(path) == "cli":
            continue
        for line, name, _ in imports(path):
            assert name.split(".")[0] not in ("random", "numpy"), f"{relative(path)}:{line} imports {name}."


def test_the_harness_is_imported_late_and_by_the_command_line_alone():
    for path in FILES:
        for line, name, at_module_level in imports(path):
            if name.split(".")[0] == "hf_specdec_eval":
                late = unit(path) == "cli" and not at_module_level
                assert late, f"{relative(path)}:{line} imports {name}."


@pytest.mark.parametrize("path", sorted(HARNESS.rglob("*.py")), ids=relative)
def test_the_harness_uses_public_names_only(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "hf_specdec":
            assert node.module == "hf_specdec", f"{relative(path)}:{node.lineno} imports from {node.module}."
            for alias in node.names:
                assert alias.name in hf_specdec.__all__, f"{relative(path)}:{node.lineno}: {alias.name} is not public."


@pytest.mark.parametrize("path", EVERY_FILE, ids=relative)
def test_files_are_short(path):
    limit = LOOP_LINES if relative(path) == "loop.py" else FILE_LINES
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= limit, f"{relative(path)} has {lines} lines, {limit} is the ceiling: find what can be a module."


@pytest.mark.parametrize("path", EVERY_FILE, ids=relative)
def test_functions_are_short(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            lines = (node.end_lineno or first) - first + 1
            assert lines <= FUNCTION_LINES, f"{relative(path)}:{node.lineno} {node.name} has {lines} lines."


def test_nothing_refers_to_files_outside_the_repository():
    for path in (*PACKAGE.rglob("*"), *HARNESS.rglob("*")):
        if path.suffix in (".py", ".yaml", ".json", ".typed", ".md") and path.is_file():
            text = path.read_text(encoding="utf-8")
            for stray in ("../shared", "/work/"):
                assert stray not in text, f"{relative(path)} refers to {stray}"


def test_public_names_exist_once_and_in_order():
    for package in (hf_specdec, hf_specdec_eval):
        assert len(package.__all__) == len(set(package.__all__))
        for name in package.__all__:
            assert hasattr(package, name), f"__all__ names {name}, which is not there"


@pytest.mark.parametrize("name", hf_specdec.__all__)
def test_public_names_are_documented(name):
    value = getattr(hf_specdec, name)
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        return
    own = (value.__dict__.get("__doc__") if inspect.isclass(value) else value.__doc__) or ""
    assert own.strip(), f"{name} has no docstring"
    assert not own.startswith(f"{name}("), f"{name} has only the docstring that dataclass makes"


@pytest.mark.parametrize("name", hf_specdec.__all__)
def test_public_methods_are_documented(name):
    value = getattr(hf_specdec, name)
    if not inspect.isclass(value):
        return
    for attribute, member in vars(value).items():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if attribute.startswith("_") or not inspect.isfunction(function):
            continue
        assert inspect.getdoc(getattr(value, attribute)), f"{name}.{attribute} has no docstring"


@pytest.mark.parametrize("path", EVERY_FILE, ids=relative)
def test_modules_say_what_they_own(path):
    documentation = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert documentation, f"{relative(path)} has no docstring"
    assert len(documentation.splitlines()) <= 10, f"{relative(path)}: a module docstring has ten lines at most"
