"""Where a number comes from: the commit, the code that decided it, the environment. A row of every results file.

Code is hashed by unit, a unit being one module: its syntax tree without docstrings, comments, formatting and the folder
that it is in. A comment, a blank line, `ruff format` or a moved file changes no hash; a renamed variable or another
constant does. The same source has the same hash under every supported Python version, because rows travel.
"""

import ast
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import time
from collections import Counter
from collections.abc import Collection, Mapping
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from repro.errors import UserError, unknown
from repro.files import ROOT, sha256, short_hash, write_text

# Dotted names; `x.*` is the package x with all that is in it, `x` only the module or the package's `__init__`.
# Registries list modules by name: a new entry decides nothing for those that do not name it.
REGISTRIES = frozenset({"repro", "repro.baselines", "repro.cells", "repro.jobs", "repro.kernels", "repro.methods"})
# What chooses and stores but decides no number. Jobs store observations and tables compute intervals from them, so
# `repro.record` and `repro.render` decide no row; they do decide a table: its closure leaves out REGISTRIES only.
PLUMBING = REGISTRIES | {
    *(
        "repro.errors",
        "repro.files",
        "repro.strict",
        "repro.spec.*",
        "repro.record.*",
        "repro.judge.*",
        "repro.render.*",
    ),
    *("repro.jobs.job", "repro.jobs.runner"),
}
LIBRARIES = ("torch", "transformers", "tokenizers", "numpy", "safetensors", "lm_eval", "triton")
DEVICE_CLASSES = ("cpu", "cuda")
CUDA = (".cu", ".cuh")
NO_CODE = hashlib.sha256(b"Module()").hexdigest()[:12]  # the unit of a module that has at most a docstring
SETTLED = 2 * 10**9  # ns; younger files are known by content: edits in one tick of the clock share time and size
Version = str | tuple[int, int]

# C++: a literal, kept; or comments and blanks, replaced by one blank. A quote inside a number (1'000) opens no literal.
CPP = re.compile(
    r"""("(?:\\.|[^"\\\n])*"|(?<!\w)'(?:\\.|[^'\\\n])*')|(?://(?:\\[\s\S]|[^\\\n])*|/\*[\s\S]*?\*/|[ \t]+)+"""
)


# --- units ------------------------------------------------------------------------------------------------------------


def unit(path: Path | str) -> str:
    """Twelve hex digits of what a source file computes; comments, docstrings, formatting and its folder change nothing.

    Own imports count with the file's name, the imported name and the alias, not with the packages above; their order
    does not count, because sorting follows the packages. CUDA sources are hashed without comments and blanks, other
    files by their bytes.
    """
    path = _path(path)
    return _read(path, _version(path))[0]


def closure(*modules: Path | str, leave_out: Collection[str] = PLUMBING) -> list[Path]:
    """The given modules and all of this project that they import, function-local imports included; sorted paths.

    Packages above an imported module count, since Python runs their `__init__`. CUDA sources that a module names, and
    the headers that these include, belong to it. Imports under `if TYPE_CHECKING:` do not run and do not count.

    Args:
        modules: paths, absolute or relative to the checkout, or dotted names (`repro.jobs.perplexity`).
        leave_out: neither listed nor followed: `PLUMBING` for what decides a row, `REGISTRIES` for a rendered table.
    """
    todo, seen = [_path(module) for module in modules], set()
    while todo:
        path = todo.pop()
        if path not in seen:
            seen.add(path)
            todo += [found for found in _imports(path, _version(path)) if not _is_in(_dotted(found), leave_out)]
    return sorted(seen)


def units(*modules: Path | str, leave_out: Collection[str] = PLUMBING) -> dict[str, str]:
    """The unit of each file in a closure by its path in the checkout; files without code are left out."""
    hashes = {path.relative_to(ROOT).as_posix(): unit(path) for path in closure(*modules, leave_out=leave_out)}
    return {name: hash for name, hash in hashes.items() if hash != NO_CODE}


def units_hash(units: Mapping[str, str]) -> str:
    """Twelve hex digits of several units, whatever their files are called."""
    return _digits(" ".join(sorted(units.values())))


def changed(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """The files that differ between two sets of units, sorted: edited, new or gone; a moved file is none of these.

    The list is empty exactly when `units_hash` is the same.
    """
    same = {name for name in old.keys() & new.keys() if old[name] == new[name]}
    before, after = ({n: h for n, h in units.items() if n not in same} for units in (old, new))
    moved = Counter(before.values()) & Counter(after.values())
    names: set[str] = set()
    for side in (before, after):
        left = Counter(moved)
        for name, hash in sorted(side.items()):
            if left[hash]:
                left[hash] -= 1
            else:
                names.add(name)
    return sorted(names)


def unit_file(name: str, hash: str, folder: Path = Path("build/units")) -> Path:
    """Snakemake's input for a set of units: a small file, rewritten only when `hash` differs from what it holds."""
    path = folder / f"{name}.txt"
    try:
        if path.read_text(encoding="utf-8") == f"{hash}\n":
            return path
    except (OSError, UnicodeDecodeError):
        pass
    write_text(path, f"{hash}\n")
    return path


def entry_hash(entry: Mapping[str, Any]) -> str:
    """Twelve hex digits of one entry of a data file (a corpus, task or model); the order of its keys does not count."""
    text = json.dumps(dict(entry), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return _digits(text)


def code_hash(paths: list[Path]) -> str:
    """Eight hex digits of the contents of code files."""
    return short_hash("\n".join(f"{p.relative_to(ROOT)} {sha256(p)}" for p in sorted(paths)))


# --- from a file to its unit and imports ------------------------------------------------------------------------------


def _path(module: Path | str) -> Path:
    """The one resolved path of a module (baselines/, kernels/ and methods/ are also reached through repro/)."""
    if isinstance(module, str) and "/" not in module and not module.endswith((".py", *CUDA)):
        path = _file(module)
        if path is None:
            raise ModuleNotFoundError(f"no module {module!r} in {ROOT}", name=module)
        return path
    return (ROOT / module).resolve()


def _file(module: str) -> Path | None:
    """The resolved source file of a dotted name; None when this project has no such module."""
    stem = ROOT.joinpath(*module.split("."))
    candidates = (stem / "__init__.py", stem.with_suffix(".py"))
    return next((path.resolve() for path in candidates if path.is_file()), None)


def _dotted(path: Path) -> str:
    """The dotted name of a resolved path."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "repro" else ("repro", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _is_in(module: str, names: Collection[str]) -> bool:
    return any(f"{module}.".startswith(n[:-1]) if n.endswith(".*") else module == n for n in names)


def _version(path: Path) -> Version:
    """What tells one content of a file from another within this process; cheap for files that were not just edited."""
    stat = path.stat()
    return (stat.st_mtime_ns, stat.st_size) if time.time_ns() - stat.st_mtime_ns > SETTLED else sha256(path)


@cache
def _imports(path: Path, version: Version) -> frozenset[Path]:
    """The files of this project that a file imports, includes or names as CUDA source."""
    _, modules, names = _read(path, version)
    packages = {package for module in modules for package in accumulate(module.split("."), "{}.{}".format)}
    sources = {path.with_suffix(name) if name in CUDA else path.parent / name for name in names}
    return frozenset({f for name in packages if (f := _file(name))} | {s.resolve() for s in sources if s.is_file()})


@cache
def _read(path: Path, version: Version) -> tuple[str, frozenset[str], frozenset[str]]:
    """A file's unit, the dotted names of its own imports, and the names of the CUDA files that it mentions."""
    if path.suffix == ".py":
        reader = _Reader(path)
        text = reader.text(ast.parse(path.read_text(encoding="utf-8"), str(path)))
        return _digits(text), frozenset(reader.modules), frozenset(reader.sources)
    if path.suffix in CUDA:
        text = CPP.sub(lambda found: found[1] or " ", path.read_text(encoding="utf-8"))
        text = "\n".join(line.strip() for line in text.splitlines() if line.strip())
        return _digits(text), frozenset(), frozenset(re.findall(r'^# ?include ?"([^"]+)"', text, re.MULTILINE))
    return sha256(path)[:12], frozenset(), frozenset()


class _Reader:
    """Turns a syntax tree into canonical text and collects own imports on the way, in one pass for speed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.modules: set[str] = set()
        self.sources: set[str] = set()

    def text(self, node: Any) -> str:
        """A syntax tree as text that is the same in every Python version (`ast.dump` is not).

        Empty fields are left out: newer versions add fields that are empty in older code.
        """
        if isinstance(node, ast.Name):  # most nodes are names
            return f"Name({node.id!r})"
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str) and node.value.endswith(CUDA):
                self.sources.add(node.value)
            return f"Constant({node.value!r})"
        if isinstance(node, ast.AST):
            texts = []
            for field in node._fields:
                value = getattr(node, field, None)
                if value is not None and field != "ctx" and field != "type_comment" and (text := self.text(value)):
                    texts.append(f"{field}={text}")
            return f"{type(node).__name__}({','.join(texts)})"
        if isinstance(node, list):
            texts = self.statements(node) if node and isinstance(node[0], ast.stmt) else [self.text(n) for n in node]
            return f"[{','.join(texts)}]" if texts else ""
        return repr(node)

    def statements(self, block: list[ast.stmt]) -> list[str]:
        """The statements of a block that run, own imports first and sorted."""
        imports, rest = [], []
        for statement in block:
            if isinstance(statement, ast.Import):  # one module each, own and others'
                for alias in statement.names:
                    if alias.name.split(".")[0] == "repro":
                        imports.append(self.own_import(alias.name, "", alias.asname or alias.name))
                    else:
                        rest.append(self.text(ast.Import(names=[alias])))
            elif isinstance(statement, ast.ImportFrom):
                module = _absolute(statement, self.path)
                names = [a for a in statement.names if (module, a.name) != ("typing", "TYPE_CHECKING")]
                if module.split(".")[0] == "repro":
                    imports += [self.own_import(module, a.name, a.asname or a.name) for a in names]
                elif names:
                    rest.append(self.text(ast.ImportFrom(module=module, names=names)))
            elif isinstance(statement, ast.If) and _is_type_checking(statement.test):
                rest += self.statements(statement.orelse)
            elif not _is_string(statement):
                rest.append(self.text(statement))
        return sorted(imports) + rest

    def own_import(self, module: str, name: str, bound: str) -> str:
        """An own import without its packages; the file's name stays, so that `f` of another file is another text."""
        self.modules.add(f"{module}.{name}" if name else module)
        if name and _file(f"{module}.{name}"):
            module, name = name, ""
        return f"Own({module.split('.')[-1]!r},{name!r},{bound!r})"


def _absolute(statement: ast.ImportFrom, path: Path) -> str:
    """The dotted name that a `from` import in file `path` starts from."""
    if not statement.level:
        return statement.module or ""
    package = _dotted(path.parent / "__init__.py").split(".")
    return ".".join(filter(None, [*package[: len(package) - statement.level + 1], statement.module]))


def _is_type_checking(test: ast.expr) -> bool:
    return getattr(test, "id", None) == "TYPE_CHECKING" or getattr(test, "attr", None) == "TYPE_CHECKING"


def _is_string(statement: ast.stmt) -> bool:
    """Whether a statement is a docstring or another bare string."""
    value = getattr(statement, "value", None)
    return isinstance(statement, ast.Expr) and isinstance(value, ast.Constant) and isinstance(value.value, str)


def _digits(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


# --- commit, environment, device --------------------------------------------------------------------------------------


@cache
def commit() -> str:
    """The short commit of the checkout, `+` behind it when tracked files differ from it.

    Where the tree came without its history, `$REPRO_COMMIT` says it and goes before git; else `unknown` outside git.
    """
    if named := os.environ.get("REPRO_COMMIT"):
        return named

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout

    try:
        if Path(git("rev-parse", "--show-toplevel").strip()).resolve() != ROOT:
            return "unknown"
        return git("rev-parse", "--short=10", "HEAD").strip() + ("+" if git("status", "-s", "-uno").strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def environment() -> str:
    """JSON of what decides numbers besides our code: Python, libraries, processor (and GPU where torch sees one)."""
    facts = {"python": platform.python_version(), "machine": platform.machine(), "cpu": _cpu()}
    for name in LIBRARIES:
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return json.dumps(facts, sort_keys=True)


def origin(device: str, code: str) -> dict[str, str]:
    """What is written beside raw scores: the device, the commit, the hash of the deciding code, the environment."""
    return {"device": device_name(device), "commit": commit(), "code": code, "environment": environment()}


def device_name(device: str) -> str:
    """What a device calls itself: the GPU's name, or the processor's.

    Raises:
        UserError: there is no such device.
    """
    if device == "cpu":
        return _cpu()
    import torch

    if not torch.cuda.is_available():
        raise UserError(f"device {device!r}: this machine has no CUDA device; choose a scale whose device is cpu")
    return torch.cuda.get_device_name(device)


def device_class(device: object) -> str:
    """`cpu` or `cuda`, whatever the index or the model: `cuda:1` is `cuda`.

    Raises:
        UserError: a device of another kind.
    """
    kind = str(device).split(":")[0]
    if kind not in DEVICE_CLASSES:
        raise unknown("device", device, DEVICE_CLASSES)
    return kind


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
