"""A bare checkout runs, `pip install .` gives a package that works elsewhere, and what is imported is declared."""

import ast
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import dag
import pytest

from repro import __version__
from repro.core.files import ROOT

PROVIDED_BY = {"yaml": "pyyaml", "pynvml": "nvidia-ml-py", "cuda": "cuda-core"}  # modules of another name
LOCAL = ("repro", "conftest", "snakemake")
# Peers of kernel times, in environments of their own.
PEERS = {"bitblas", "cutlass", "flashinfer", "gemlite", "hqq", "marlin", "sgl_kernel", "torchao", "vllm", "tvm"}


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def imported(*folders: str) -> dict[str, set[str]]:
    """Top-level module to the files that import it."""
    result: dict[str, set[str]] = {}
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
                for name in names:
                    result.setdefault(name.split(".")[0], set()).add(str(path.relative_to(ROOT)))
    return {name: files for name, files in result.items() if name not in sys.stdlib_module_names and name not in LOCAL}


def declared(words: list[str]) -> set[str]:
    return {re.match(r"[\w-]+", word)[0].lower().replace("_", "-") for word in words}


def test_declared_dependencies_are_those_imported():
    at = project()
    needed, extra = declared(at["dependencies"]), {k: declared(v) for k, v in at["optional-dependencies"].items()}
    result = imported("repro", "baselines", "methods", "kernels")
    names = {PROVIDED_BY.get(name, name).lower().replace("_", "-"): files for name, files in result.items()}
    undeclared = {n: files for n, files in names.items() if n not in needed | set().union(*extra.values()) | PEERS}
    assert not undeclared, f"imported, but not declared: {undeclared}"
    for name in set(names) & (extra["dev"] - extra["train"]):
        assert all("test" in file for file in names[name]), f"{name} is for tests alone"
    assert needed - set(names) - {"snakemake"} == set(), "declared, but not imported"  # that one is a program
    locked = (ROOT / "requirements.lock").read_text().lower().replace("_", "-")
    assert all(f"\n{name}==" in locked for name in needed)


def test_a_bare_checkout_runs(tmp_path):
    checkout = dag.copy_checkout(tmp_path / "source", spec=None)
    done = dag.run(dag.repro("list"), checkout, checkout)
    assert done.code == 0 and done.err == "", done.text
    assert re.search(r"^tables +spear/table1, ", done.out, re.MULTILINE) and "perplexity" in done.out
    version = dag.run(dag.repro("--version"), checkout, checkout)
    assert version.out == f"lowbit-repro {__version__}\n"


@pytest.mark.timeout(300)
def test_an_installed_package_works_elsewhere(tmp_path):
    checkout = dag.copy_checkout(tmp_path / "source", spec=None)
    (checkout / "config" / "tiny.yaml").unlink()
    shutil.copytree(ROOT / "results", checkout / "results")
    shutil.copytree(ROOT / "repro" / "pocket", checkout / "repro" / "pocket", symlinks=True, dirs_exist_ok=True)
    target, elsewhere = tmp_path / "target", tmp_path / "elsewhere"
    elsewhere.mkdir()
    words = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--target", target, "."]
    done = dag.run([sys.executable, "-m", "pip", "install", "--quiet", *words], checkout, checkout)
    assert done.code == 0, done.text
    shutil.rmtree(checkout)  # nothing is read from it
    listed = dag.quick(dag.repro("list"), elsewhere, target, SCALE="")
    assert listed.code == 0, listed.text
    assert "spear/table1, spear/table2, " in listed.out and "spear/figure13" in listed.out
    refused = dag.quick(dag.repro("coverage", "--scale", "nope"), elsewhere, target, SCALE="")
    assert refused.code == 2 and refused.err.startswith("error: ") and "Traceback" not in refused.err
    shown = dag.quick(dag.repro("show", "spear/table15"), elsewhere, target, SCALE="")
    assert shown.code == 0 and "from stored results" in shown.out, shown.text


def test_only_functions_that_exceed_the_limits_are_excused_from_them():
    """Ruff's limits on complexity hold for new files; a file leaves the list when it is below them."""
    lint = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    limits = [rule for rule in lint["select"] if rule.startswith(("C9", "PL"))]
    assert limits == ["C901", "PLR0912", "PLR0915"]
    excused = {file: set(rules) for file, rules in lint["per-file-ignores"].items() if "*" not in file}
    words = ["-m", "ruff", "check", "--isolated", "--exit-zero", "--output-format", "json", "--line-length", "120"]
    listed = subprocess.run(
        [sys.executable, *words, "--select", ",".join(limits), *excused], cwd=ROOT, capture_output=True
    )
    exceeded: dict[str, set[str]] = {}
    for one in json.loads(listed.stdout):
        exceeded.setdefault(str(Path(one["filename"]).relative_to(ROOT)), set()).add(one["code"])
    assert exceeded == excused


def test_the_tracked_files_stay_below_58_megabytes():
    """Two thirds are weights; the rest has to hold all that is measured, so that results are packed and pruned."""
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout")
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    names = subprocess.run(command, capture_output=True, check=True, text=True).stdout.split("\0")
    sizes = {name: (ROOT / name).lstat().st_size for name in names if name and (ROOT / name).exists()}
    assert sizes and sum(sizes.values()) < 58_000_000, "python -m repro prune; then look at the largest files"
