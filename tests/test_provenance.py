"""Where a number comes from: which code decides it, and whether it was committed."""

import ast
import json
import os
import platform
import shutil
import subprocess
import textwrap

import pytest

from repro.files import ROOT
from repro.record import provenance
from repro.record.provenance import (
    REGISTRIES,
    changed,
    closure,
    entry_hash,
    environment,
    unit,
    unit_file,
    units,
    units_hash,
)

GRID = """
    \"\"\"A module.\"\"\"
    from dataclasses import dataclass

    import torch as t
    from repro.errors import UserError

    EPSILON = 1e-6

    @dataclass
    class Grid:
        \"\"\"A class.\"\"\"
        bits: int = 4

        async def fit(self, x, *, low=None):
            \"\"\"A method.\"\"\"
            from repro.models import lowbit
            return lowbit.fit(x * EPSILON, {**x, None: low})
"""


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A project of the test's own: call it with path=code."""
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.delenv("REPRO_COMMIT", raising=False)
    provenance.commit.cache_clear()

    def add(files):
        provenance._read.cache_clear()
        provenance._imports.cache_clear()
        for path, code in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(textwrap.dedent(code))
        return tmp_path

    yield add
    provenance.commit.cache_clear()


@pytest.fixture
def hash_of(tree):
    """The unit of a module with this text."""

    def write(text, path="repro/a.py"):
        return unit(tree({path: text}) / path)

    return write


def sources():
    """Every source file of the project, each once."""
    folders = ("repro", "baselines", "methods", "kernels")
    found = {
        p.resolve() for folder in folders for kind in ("py", "cu", "cuh") for p in (ROOT / folder).rglob(f"*.{kind}")
    }
    return sorted(found)


# --- unit -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "old, new",
    [
        ('"""A module."""', ""),
        ('"""A module."""', '"""A module whose docstring names `w4a16.cu`."""'),
        ('"""A class."""', '"""Another."""'),
        ('"""A method."""', '"""Another\n\n            of two lines."""'),
        ("EPSILON = 1e-6", "# a comment\n\n\n    EPSILON  =  (1e-06)  # another"),
        ("bits: int = 4", 'bits: int = 4\n        """A field."""'),
        ("low=None):", "low=None,\n        ):"),
        ("import torch as t\n", "import torch as t\n    from typing import TYPE_CHECKING\n"),
        ("EPSILON =", "if TYPE_CHECKING:\n        from torch import Tensor\n        import repro.x\n    EPSILON ="),
        ("EPSILON =", "if typing.TYPE_CHECKING:\n        x = 1\n    EPSILON ="),
        ("from repro.errors import UserError", "from repro.base.errors import UserError"),
        ("from repro.models import lowbit", "from repro.low import lowbit"),
        ("from repro.models import lowbit", "import repro.low.lowbit as lowbit"),
        ("from repro.models import lowbit", "from .low import lowbit"),
    ],
)
def test_what_does_not_run_and_where_it_is_changes_no_unit(tree, hash_of, old, new):
    tree({"repro/models/lowbit.py": "x = 1", "repro/low/lowbit.py": "x = 1"})
    assert old in textwrap.dedent(GRID) or old in GRID
    assert hash_of(GRID.replace(old, new)) == hash_of(GRID)


@pytest.mark.parametrize(
    "old, new",
    [
        ("1e-6", "2e-6"),
        ("1e-6", "1e-6 + 1e-6"),
        ("EPSILON", "EPS"),
        ("bits: int = 4", "bits: int = 4.0"),
        ("bits: int = 4", "bits: int = True"),
        ("bits: int = 4", "bits: float = 4"),
        ("low=None", "low"),
        ("None: low", "**low"),
        ("async def", "def"),
        ("import torch as t", "import torch as u"),
        ("import torch as t", "import torch"),
        ("from repro.errors import UserError", "from repro.errors import UserError as Error"),
        ("from repro.errors import UserError", "from repro.errors import unknown"),
        ("from repro.errors import UserError", "from repro.files import UserError"),
        ("from repro.models import lowbit", "from repro.models import lowbit as low"),
        ("from repro.models import lowbit", "pass"),
        ("x * EPSILON", '"x" * EPSILON'),
        ("return lowbit.fit", 'x = "a string that is used"\n            return lowbit.fit'),
    ],
)
def test_what_runs_changes_the_unit(tree, hash_of, old, new):
    tree({"repro/models/lowbit.py": "x = 1"})
    assert old in GRID
    assert hash_of(GRID.replace(old, new)) != hash_of(GRID)


def test_a_unit_is_twelve_hex_digits_that_do_not_depend_on_the_python_version(hash_of):
    """Rows travel between machines: `ast.dump`, say, differs between Python 3.11, 3.12 and 3.13."""
    assert hash_of("def f(x, *, y=None):\n    return f'{x:.3f}' + y[1:]\n") == "93d1e8a197ea"


def test_own_imports_count_in_any_order_as_sorting_follows_the_packages(hash_of):
    first = hash_of("import os\nfrom repro.a import f, g\nfrom repro.b import h\nx = 1\n")
    assert first == hash_of(
        "import os\nfrom repro.b import h\nfrom repro.c.a import g\nfrom repro.c.a import f\nx = 1\n"
    )
    assert first != hash_of("import os\nfrom repro.b import f, g\nfrom repro.a import h\nx = 1\n")
    assert hash_of("import os\nimport re\n") == hash_of("import os, re\n") != hash_of("import re\nimport os\n")


def test_the_same_file_elsewhere_is_the_same_unit(hash_of):
    assert hash_of(GRID, "repro/a.py") == hash_of(GRID, "repro/deep/er/b.py")


def test_a_file_is_read_once_a_process(tree, hash_of):
    """Who edits code while jobs run does not change what is noted for the code that runs."""
    old = hash_of("x = 1")
    path = tree({}) / "repro/a.py"
    assert unit(path) == old
    path.write_text("x = 2")
    assert unit(path) == old != hash_of("x = 2")


CU = """
    // Multiplies.
    #include "ptx.cuh"
    #define ROWS 4  /* two
       lines */
    __global__ void f(float* y) { asm("mov // no comment"); y[1'000] = 'x'; }
"""


@pytest.mark.parametrize(
    "old, new",
    [
        ("// Multiplies.", "// Another comment that it's hard to parse \\\n going on"),
        ("/* two\n       lines */", ""),
        ("{ asm", "{ /* here */\tasm"),
        ("'x'; }", "'x'; }\n\n\n"),
    ],
)
def test_a_comment_in_cuda_changes_nothing(hash_of, old, new):
    assert old in CU
    assert hash_of(CU.replace(old, new), "kernels/a.cu") == hash_of(CU, "kernels/b.cuh")


@pytest.mark.parametrize("old, new", [("4", "8"), ("// no", "//  no"), ("ptx.cuh", "b.cuh"), ("#define", "// #define")])
def test_code_in_cuda_changes_the_unit(hash_of, old, new):
    assert hash_of(CU.replace(old, new), "kernels/a.cu") != hash_of(CU, "kernels/a.cu")


def test_other_files_are_hashed_by_their_bytes(hash_of):
    assert hash_of("a: 1  # one", "data/a.yaml") != hash_of("a: 1", "data/a.yaml") == hash_of("a: 1", "data/b.yaml")


def test_a_process_reads_and_parses_each_file_once():
    """Hashing all units takes 0.35 s of one core for 95 files; every job asks for it."""
    provenance._read.cache_clear()
    hashes = [unit(path) for path in sources()]
    parsed = provenance._read.cache_info().misses
    assert len(hashes) > 50 and hashes == [unit(path) for path in sources()]
    assert provenance._read.cache_info().misses == parsed <= len(hashes)


# --- closure ----------------------------------------------------------------------------------------------------------


def names(*files, **options):
    return {p.relative_to(provenance.ROOT).as_posix() for p in closure(*files, **options)}


def test_a_step_brings_what_it_stands_on_and_no_other():
    found = names("baselines/gptq.py")
    assert found >= {"baselines/gptq.py", "baselines/grid.py", "repro/models/lowbit.py", "repro/models/__init__.py"}
    assert not found & {"baselines/rtn.py", "baselines/awq.py", "baselines/__init__.py", "methods/__init__.py"}
    assert not any(name.startswith(("repro/spec/", "repro/record/", "repro/render/")) for name in found)
    assert not found & {"repro/__init__.py", "repro/errors.py", "repro/files.py", "repro/strict.py"}


@pytest.mark.parametrize("verb", ["compress", "tokens"])
def test_a_job_stands_on_no_method_that_it_was_not_given(verb):
    assert not any(name.startswith(("baselines/", "methods/")) for name in units(f"repro/jobs/{verb}.py"))


def test_a_kernel_brings_its_cuda_sources_and_their_headers():
    assert names("kernels/w4a16_gemm.py") >= {"kernels/w4a16_gemm.cu", "kernels/w4a16_wgmma.cu", "kernels/unpack.cuh"}
    assert not any(name.endswith((".cu", ".cuh")) for name in names("kernels/packing.py"))


def test_two_spellings_of_a_path_are_one_unit():
    spellings = ("repro/baselines/gptq.py", "baselines/gptq.py", ROOT / "baselines" / "gptq.py")
    assert len({tuple(closure(each)) for each in spellings}) == 1
    assert units(*spellings) == units("baselines/gptq.py")
    assert closure("repro/methods/spear/__init__.py") == closure("methods/spear/__init__.py")


def test_follows_every_form_of_import(tree):
    root = tree(
        {
            "repro/__init__.py": "",
            "repro/a.py": "from repro import b\nimport os, numpy\n",
            "repro/b.py": "import repro.c as c\ndef f():\n    from repro.d.e import thing\n",
            "repro/c.py": "import repro.a\n",
            "repro/d/__init__.py": "import repro.h\n",
            "repro/d/e.py": "from repro.errors import UserError\nfrom . import f\nfrom ..g import thing\n",
            "repro/d/f.py": "",
            "repro/errors.py": "",
            "repro/g.py": "",
            "repro/h.py": "x = 1\n",
            "repro/unused.py": "",
        }
    )
    found = [str(p.relative_to(root)) for p in closure("repro/a.py")]
    inside = ["repro/d/__init__.py", "repro/d/e.py", "repro/d/f.py"]
    assert found == ["repro/a.py", "repro/b.py", "repro/c.py", *inside, "repro/g.py", "repro/h.py"]
    assert set(units("repro/a.py")) == set(found) - {"repro/d/f.py", "repro/g.py"}, "files without code"


def test_an_import_for_types_alone_is_not_followed(tree):
    guarded = (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from repro import b\nelse:\n    from repro import c\n"
    )
    tree({"repro/a.py": guarded, "repro/b.py": "x = 1", "repro/c.py": "x = 1"})
    assert names("repro/a.py") == {"repro/a.py", "repro/c.py"}


def test_plumbing_and_registries_decide_no_row_and_rendering_decides_a_table(tree):
    tree(
        {
            "repro/__init__.py": "x = 1",
            "repro/jobs/__init__.py": "x = 1",
            "repro/jobs/score.py": "from repro import errors, models\nfrom repro.jobs import job\n",
            "repro/jobs/job.py": "from repro.render import render\nfrom repro.spec.recipe import parse\n",
            "repro/models/__init__.py": "from repro.methods import METHODS\nfrom repro.record.store import save\n",
            "repro/methods/__init__.py": "from repro.methods import mine\n",
            "repro/methods/mine.py": "x = 1",
            "repro/spec/recipe.py": "x = 1",
            "repro/spectrum.py": "x = 1",
            "repro/record/store.py": "import repro.spectrum",
            "repro/render/render.py": "x = 1",
            "repro/errors.py": "x = 1",
        }
    )
    row = ["repro/jobs/score.py", "repro/models/__init__.py"]
    assert list(units("repro/jobs/score.py")) == row
    assert list(units("repro/jobs/score.py", "repro/methods/mine.py")) == [row[0], "repro/methods/mine.py", row[1]]
    drawn = {"repro/jobs/job.py", "repro/spec/recipe.py", "repro/record/store.py", "repro/render/render.py"}
    rendered = units("repro/jobs/score.py", leave_out=REGISTRIES)
    assert rendered.keys() == {*row, *drawn, "repro/errors.py", "repro/spectrum.py"}
    before = units_hash(units("repro/jobs/score.py"))
    tree({"repro/methods/__init__.py": "from repro.methods import mine, yours\n", "repro/methods/yours.py": "x = 2"})
    tree({"repro/jobs/__init__.py": "x = 2", "repro/record/store.py": "x = 2", "repro/errors.py": "x = 2"})
    assert units_hash(units("repro/jobs/score.py")) == before


def test_nobody_imports_in_a_form_that_is_not_followed():
    for path in sources():
        if path.suffix == ".py" and path.name != "kernel_list.py":  # no job goes through the list of kernels to time
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                name = getattr(node, "attr", getattr(node, "id", None))
                assert name not in ("import_module", "__import__"), f"{path}: {name}"


# --- sets of units ----------------------------------------------------------------------------------------------------

PROJECT = {
    "repro/job.py": "from repro import lowbit\nfrom repro.grid import fit\nlowbit.f(fit)\n",
    "repro/grid.py": "fit = 1e-6\n",
    "repro/lowbit.py": "def f(x):\n    return x\n",
}


def test_moved_files_leave_the_hash_and_an_edit_is_named(tree):
    root = tree(PROJECT)
    before = units("repro/job.py")
    assert list(before) == ["repro/grid.py", "repro/job.py", "repro/lowbit.py"]
    assert len(units_hash(before)) == 12 and changed(before, before) == []
    for name in ("grid", "lowbit", "job"):
        (root / f"repro/{name}.py").unlink()
    tree({"repro/models/__init__.py": '"""Models."""\n', "repro/models/lowbit.py": PROJECT["repro/lowbit.py"]})
    tree({"repro/quant/grid.py": PROJECT["repro/grid.py"]})
    job = "# moved\nfrom repro.models import lowbit\nfrom repro.quant.grid import fit\n\nlowbit.f(fit)\n"
    tree({"repro/jobs/job.py": job})
    after = units("repro/jobs/job.py")
    assert list(after) == ["repro/jobs/job.py", "repro/models/lowbit.py", "repro/quant/grid.py"]
    assert units_hash(after) == units_hash(before) and changed(before, after) == []
    tree({"repro/quant/grid.py": "fit = 1e-6 + 1e-6\n"})
    edited = units("repro/jobs/job.py")
    assert units_hash(edited) != units_hash(after)
    assert changed(after, edited) == ["repro/quant/grid.py"]
    assert changed(before, edited) == ["repro/grid.py", "repro/quant/grid.py"]


@pytest.mark.parametrize(
    "old, new, expected",
    [
        ({"a": "1"}, {"a": "1", "b": "2"}, ["b"]),
        ({"a": "1", "b": "2"}, {"a": "1"}, ["b"]),
        ({"a": "1", "b": "2"}, {"a": "2", "b": "1"}, []),
        ({"a": "1", "b": "1"}, {"c": "1"}, ["b"]),
        ({"a": "1"}, {"a": "1", "b": "1"}, ["b"]),
        ({}, {}, []),
    ],
)
def test_changed_is_empty_exactly_when_the_hash_is_the_same(old, new, expected):
    assert changed(old, new) == expected
    assert (units_hash(old) == units_hash(new)) == (not expected)


def test_a_unit_file_is_rewritten_only_when_the_hash_changes(tmp_path):
    path = unit_file("score-gptq", "0" * 12, tmp_path / "units")
    assert path == tmp_path / "units" / "score-gptq.txt" and path.read_text() == "000000000000\n"
    os.utime(path, (1, 1))
    assert unit_file("score-gptq", "0" * 12, tmp_path / "units") == path and path.stat().st_mtime == 1
    unit_file("score-gptq", "1" * 12, tmp_path / "units")
    assert path.read_text() == "111111111111\n" and path.stat().st_mtime > 1
    assert os.listdir(tmp_path / "units") == ["score-gptq.txt"]


def test_a_unit_file_is_in_the_build_folder_of_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert unit_file("a", "0" * 12).resolve() == tmp_path / "build" / "units" / "a.txt"


def test_an_entry_is_hashed_by_its_values():
    entry = {"name": "wikitext2", "source": {"revision": "b08601e", "rows": [1, 2]}}
    again = {"source": {"rows": [1, 2], "revision": "b08601e"}, "name": "wikitext2"}
    assert entry_hash(entry) == entry_hash(again) and len(entry_hash(entry)) == 12
    others = [
        entry | {"name": "c4"},
        entry | {"new": None},
        entry | {"source": {"revision": "b08601e", "rows": [2, 1]}},
    ]
    assert len({entry_hash(each) for each in (entry, *others)}) == 4
    with pytest.raises(TypeError):
        entry_hash({"name": object()})


# --- commit, environment, device --------------------------------------------------------------------------------------


def git(folder, *words):
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True)


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_says_whether_the_tree_differs_from_it(tree):
    root = tree({"a.py": "x = 1\n"})
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-qm", "one")
    head = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    assert provenance.commit() == head[:10]
    (root / "a.py").write_text("x = 2\n")
    assert provenance.commit() == head[:10], "asked once a process"
    provenance.commit.cache_clear()
    assert provenance.commit() == head[:10] + "+"
    (root / "a.py").write_text("x = 1\n")
    (root / "untracked.txt").write_text("")
    provenance.commit.cache_clear()
    assert provenance.commit() == head[:10]


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_a_commit_that_is_given_hides_no_difference(tree, monkeypatch):
    root = tree({"a.py": "x = 1\n"})
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-qm", "one")
    for given, clean, edited in [("0123456789",) * 2 + ("0123456789+",), ("0123456789+",) * 3]:
        monkeypatch.setenv("REPRO_COMMIT", given)
        for text, wanted in {"x = 1\n": clean, "x = 2\n": edited}.items():
            (root / "a.py").write_text(text)
            provenance.commit.cache_clear()
            assert provenance.commit() == wanted


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_outside_a_checkout_the_commit_is_unknown(tree, monkeypatch):
    root = tree({"inside/a.py": ""})
    assert provenance.commit() == "unknown"
    git(root, "init", "-q")
    provenance.commit.cache_clear()
    assert provenance.commit() == "unknown", "no commit yet"
    git(root, "add", ".")
    git(root, "commit", "-qm", "one")
    monkeypatch.setattr(provenance, "ROOT", root / "inside")
    provenance.commit.cache_clear()
    assert provenance.commit() == "unknown", "somebody else's checkout around it"


def test_without_git_the_commit_is_unknown(tree, monkeypatch):
    tree({})
    monkeypatch.setenv("PATH", "")
    assert provenance.commit() == "unknown"
    monkeypatch.setenv("REPRO_COMMIT", "0123456789")
    assert provenance.commit() == "unknown", "asked once a process"
    provenance.commit.cache_clear()
    assert provenance.commit() == "0123456789", "a tree that came without its history is told"


def test_the_environment_names_what_decides_numbers():
    facts = json.loads(environment())
    assert facts["python"] == platform.python_version() and {"torch", "transformers", "tokenizers"} <= set(facts)
    assert environment() == json.dumps(facts, sort_keys=True)
    assert provenance.device_name("cpu") == facts["cpu"] != ""
