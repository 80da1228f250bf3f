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
from collections import Counter
from collections.abc import Collection, Mapping
from functools import cache
from importlib.util import resolve_name
from itertools import accumulate
from pathlib import Path
from typing import Any

from repro.errors import UserError
from repro.files import ROOT, sha256, write_text

# Dotted names; `x.*` is the package x with all that is in it, `x` only the module or the package's `__init__`.
# Registries list modules by name: a new entry decides nothing for those that do not name it.
REGISTRIES = frozenset({"repro", "repro.baselines", "repro.cells", "repro.jobs", "repro.kernels", "repro.methods"})
# What chooses and stores but decides no number. Jobs store observations and tables compute intervals from them, so
# `repro.record` and `repro.render` decide no row; they do decide a table: its closure leaves out REGISTRIES only.
OURS = ("errors", "files", "strict", "spec.*", "record.*", "judge.*", "render.*", "jobs.job", "jobs.runner")
PLUMBING = REGISTRIES | {f"repro.{name}" for name in OURS}
LIBRARIES = ("torch", "transformers", "tokenizers", "numpy", "safetensors", "lm_eval", "triton")
CUDA = (".cu", ".cuh")
NO_CODE = hashlib.sha256(b"Module()").hexdigest()[:12]  # the unit of a module that has at most a docstring

# C++: a literal, kept; or comments and blanks, replaced by one blank. A quote inside a number (1'000) opens no literal.
CPP = re.compile(
    r"""("(?:\\.|[^"\\\n])*"|(?<!\w)'(?:\\.|[^'\\\n])*')|(?://(?:\\[\s\S]|[^\\\n])*|/\*[\s\S]*?\*/|[ \t]+)+"""
)


# --- units ------------------------------------------------------------------------------------------------------------


def unit(path: Path | str) -> str:
    """Twelve hex digits of what a source file computes; comments, docstrings, formatting and its folder change nothing.

    Own imports count with the file's name, the imported name and the alias, not with the packages above; their order
    does not count, because sorting follows the packages. CUDA sources are hashed without comments and blanks, other
    files by their bytes. A file is read once a process, so that the hash is that of the code which runs.

    Args:
        path: absolute or relative to the checkout; baselines/, kernels/ and methods/ are also reached through repro/.
    """
    return _read((ROOT / path).resolve())[0]


def closure(*modules: Path | str, leave_out: Collection[str] = PLUMBING) -> list[Path]:
    """The given modules and all of this project that they import, function-local imports included; sorted paths.

    Packages above an imported module count, since Python runs their `__init__`. CUDA sources that a module names, and
    the headers that these include, belong to it. Imports under `if TYPE_CHECKING:` do not run and do not count.

    Args:
        modules: paths, absolute or relative to the checkout.
        leave_out: neither listed nor followed: `PLUMBING` for what decides a row, `REGISTRIES` for a rendered table.
    """
    todo, seen = [(ROOT / module).resolve() for module in modules], set()
    while todo:
        path = todo.pop()
        if path not in seen:
            seen.add(path)
            todo += [found for found in _imports(path) if not _is_in(_dotted(found), leave_out)]
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
    before, after = dict(old.items() - new.items()), dict(new.items() - old.items())
    names = set()
    for side, other in ((before, after), (after, before)):
        left = Counter(other.values())
        for name, hash in sorted(side.items()):
            left[hash] -= 1
            if left[hash] < 0:
                names.add(name)
    return sorted(names)


def unit_file(name: str, hash: str, folder: Path = Path("build/units")) -> Path:
    """Snakemake's input for a set of units: a small file, rewritten only when `hash` differs from what it holds."""
    path = folder / f"{name}.txt"
    if not path.is_file() or path.read_text(encoding="utf-8", errors="replace") != f"{hash}\n":
        write_text(path, f"{hash}\n")
    return path


def entry_hash(entry: Mapping[str, Any]) -> str:
    """Twelve hex digits of one entry of a data file (a corpus, task or model); the order of its keys does not count."""
    text = json.dumps(dict(entry), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return _digits(text)


# --- from a file to its unit and imports ------------------------------------------------------------------------------


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


@cache
def _imports(path: Path) -> frozenset[Path]:
    """The files of this project that a file imports, includes or names as CUDA source."""
    _, modules, names = _read(path)
    packages = {package for module in modules for package in accumulate(module.split("."), "{}.{}".format)}
    sources = {path.with_suffix(name) if name in CUDA else path.parent / name for name in names}
    return frozenset({f for name in packages if (f := _file(name))} | {s.resolve() for s in sources if s.is_file()})


@cache
def _read(path: Path) -> tuple[str, frozenset[str], frozenset[str]]:
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
            match statement:
                case ast.Import(names=aliases):  # one module each, own and others'
                    for alias in aliases:
                        if alias.name.split(".")[0] == "repro":
                            imports.append(self.own_import(alias.name, "", alias.asname or alias.name))
                        else:
                            rest.append(self.text(ast.Import(names=[alias])))
                case ast.ImportFrom(names=aliases):
                    package = _dotted(self.path.parent / "__init__.py")
                    module = resolve_name("." * statement.level + (statement.module or ""), package)
                    aliases = [a for a in aliases if (module, a.name) != ("typing", "TYPE_CHECKING")]
                    if module.split(".")[0] == "repro":
                        imports += [self.own_import(module, a.name, a.asname or a.name) for a in aliases]
                    elif aliases:
                        rest.append(self.text(ast.ImportFrom(module=module, names=aliases)))
                case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"), orelse=others):
                    rest += self.statements(others)
                case ast.Expr(value=ast.Constant(value=str())):  # a docstring, or another string that nobody uses
                    pass
                case _:
                    rest.append(self.text(statement))
        return sorted(imports) + rest

    def own_import(self, module: str, name: str, bound: str) -> str:
        """An own import without its packages; the file's name stays, so that `f` of another file is another text."""
        self.modules.add(f"{module}.{name}" if name else module)
        if name and _file(f"{module}.{name}"):
            module, name = name, ""
        return f"Own({module.split('.')[-1]!r},{name!r},{bound!r})"


def _digits(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


# --- commit, environment, device --------------------------------------------------------------------------------------


@cache
def commit() -> str:
    """The short commit of the checkout, `+` behind it when tracked files differ from it.

    Where the tree came without its history, `$REPRO_COMMIT` says it, and it goes before git's own; but it hides no
    difference that git sees. Else `unknown` outside git.
    """
    named = os.environ.get("REPRO_COMMIT") or _git("rev-parse", "--short=10", "HEAD")
    if not named:
        return "unknown"
    differs = bool(_git("status", "-s", "-uno"))
    return named if named.endswith("+") or not differs else f"{named}+"


@cache
def has_commit(commit: str) -> bool:
    """Whether this checkout has a commit; yes where there is no history to ask."""
    return _git("rev-parse", "--git-dir") is None or _git("cat-file", "-e", f"{commit}^{{commit}}") is not None


def _git(*words: str) -> str | None:
    """What git says about this checkout; None where it is none, or git refuses or is missing."""
    try:
        top, said = (
            subprocess.run(["git", "-C", str(ROOT), *each], capture_output=True, text=True, check=True).stdout.strip()
            for each in (("rev-parse", "--show-toplevel"), words)
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return said if Path(top).resolve() == ROOT else None


def environment() -> str:
    """JSON of what decides numbers besides our code: Python, libraries, processor (and GPU where torch sees one)."""
    facts = {"python": platform.python_version(), "machine": platform.machine(), "cpu": _cpu()}
    for name in LIBRARIES:
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return json.dumps(facts, sort_keys=True)


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


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
