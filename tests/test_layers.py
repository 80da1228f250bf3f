"""Imports go one way: from a folder of the package to folders below it, never up, wherever in a file they stand."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from repro.core.files import ROOT

LAYERS = (  # the lowest first; a folder imports from itself and from those before it
    "core", "papers", "kernels", "models", "data", "store", "train", "methods", "baselines", "recipes", "engine",
    "bench", "stats", "jobs", "metrics", "specs", "workflow", "generation", "results", "verdicts", "studies", "render",
    "make", "cli",
)  # fmt: skip


def layer_of(module: str) -> str:
    """The folder below repro/ of a module; that of `repro` itself and of `repro.__main__` counts as cli."""
    words = module.split(".")
    return words[1] if len(words) > 1 and words[1] in LAYERS else "cli"


def imported(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """The modules of this package that a file imports at its head or in a function, and the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                yield f"{node.module}.{alias.name}" if node.module == "repro" else str(node.module), node.lineno


def upward(module: str, text: str) -> list[str]:
    """The imports of a file that point to a folder above its own."""
    result = []
    own = layer_of(module)
    for name, line in imported(ast.parse(text)):
        if name.split(".")[0] != "repro" or name == "repro.__version__":
            continue
        if LAYERS.index(layer_of(name)) > LAYERS.index(own):
            result.append(f"line {line}: {own} imports {name}")
    return result


def modules(layer: str) -> dict[str, Path]:
    """Every module of a folder, tests excepted: those of kernels are next to what they test."""
    folder = (ROOT / "repro" / layer).resolve()
    paths = sorted(folder.rglob("*.py"))
    ours = [path for path in paths if not path.name.startswith(("test_", "conftest"))]
    return {f"repro.{layer}.{'.'.join(path.relative_to(folder).with_suffix('').parts)}": path for path in ours}


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_go_one_way(layer):
    edges = []
    for name, path in modules(layer).items():
        edges += [f"{name}: {edge}" for edge in upward(name, path.read_text())]
    assert not edges


def test_every_folder_is_a_layer():
    assert {path.parent.name for path in (ROOT / "repro").glob("*/__init__.py")} == set(LAYERS) - {"kernels"}
    assert {path.name for path in (ROOT / "repro").glob("*.py")} == {"__init__.py", "__main__.py"}


def test_an_edge_that_points_up_is_found():
    """At the head, in a function, as a module of the package."""
    assert upward("repro.core.files", "from repro.cli import options") == ["line 1: core imports repro.cli"]
    assert upward("repro.stats.x", "def f():\n    import repro.render.page") == [
        "line 2: stats imports repro.render.page"
    ]
    assert upward("repro.store.x", "from repro import jobs, models") == ["line 1: store imports repro.jobs"]
    assert upward("repro.render.x", "from repro.stats import quantity\nfrom repro.render import page\nimport os") == []
