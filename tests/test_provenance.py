"""Where a number comes from: which files decide it, and whether they were committed."""

import ast
import json
import platform
import shutil
import subprocess

import pytest

from repro import provenance
from repro.files import ROOT
from repro.provenance import closure, code_hash, environment


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A project of the test's own: call it with path=code."""
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.delenv("REPRO_COMMIT", raising=False)
    provenance._imports.cache_clear()
    provenance.commit.cache_clear()

    def add(files):
        for path, code in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(code)
        return tmp_path

    yield add
    provenance._imports.cache_clear()
    provenance.commit.cache_clear()


def names(*files):
    return {str(p.relative_to(ROOT)) for p in closure(*files)}


def test_a_step_brings_what_it_stands_on_and_no_other():
    found = names("repro/jobs/compress.py", "repro/baselines/gptq.py")
    assert found >= {"repro/jobs/compress.py", "baselines/gptq.py", "baselines/grid.py", "repro/lowbit.py"}
    assert found >= {"repro/models.py", "repro/corpora.py"}
    assert not found & {"baselines/rtn.py", "baselines/awq.py", "repro/render.py", "repro/table.py", "repro/claims.py"}
    assert not found & {"repro/recipe.py", "repro/errors.py", "repro/files.py", "repro/strict.py"}


def test_a_measurement_does_not_depend_on_how_it_is_shown():
    for verb in ("compress", "perplexity", "tokens", "zeroshot"):
        found = names(f"repro/jobs/{verb}.py")
        assert not any(p.startswith(("baselines/", "methods/")) for p in found), verb
        assert not found & {"repro/render.py", "repro/table.py", "repro/jobs/tables.py", "repro/workflow.py"}, verb
    assert {"repro/render.py", "repro/table.py", "repro/claims.py", "repro/jobs/tables.py"} <= names(
        "repro/jobs/tables.py"
    )


def test_the_same_file_by_either_path():
    assert closure("repro/baselines/gptq.py") == closure("baselines/gptq.py") == closure(ROOT / "baselines" / "gptq.py")


def test_follows_every_form_of_import(tree):
    root = tree(
        {
            "repro/__init__.py": "",
            "repro/a.py": "from repro import b\nimport os, numpy\n",
            "repro/b.py": "import repro.c as c\ndef f():\n    from repro.d.e import thing\n",
            "repro/c.py": "import repro.a\n",
            "repro/d/e.py": "from repro.errors import UserError\n",
            "repro/errors.py": "",
            "repro/unused.py": "",
        }
    )
    found = [str(p.relative_to(root)) for p in closure("repro/a.py")]
    assert found == ["repro/a.py", "repro/b.py", "repro/c.py", "repro/d/e.py"]


def test_nobody_imports_in_a_form_that_is_not_followed():
    for path in sorted(
        {p.resolve() for folder in ("repro", "baselines", "methods") for p in (ROOT / folder).rglob("*.py")}
    ):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path}: a relative import"
            if path.name != "kernel_list.py":  # kernels are timed by name; no quality job goes through their list
                assert not (isinstance(node, ast.Attribute) and node.attr == "import_module"), f"{path}: import_module"


def test_one_byte_changes_the_hash_of_what_needs_it(tree):
    root = tree({"repro/a.py": "from repro import b\n", "repro/b.py": "x = 1\n", "repro/c.py": "x = 1\n"})
    first, other = code_hash(closure("repro/a.py")), code_hash(closure("repro/c.py"))
    assert first == code_hash(list(reversed(closure("repro/a.py")))) and len(first) == 8
    (root / "repro/b.py").write_text("x = 2\n")
    assert code_hash(closure("repro/a.py")) != first and code_hash(closure("repro/c.py")) == other


def test_a_name_is_part_of_the_hash(tree):
    root = tree({"a.py": "", "b.py": ""})
    assert code_hash([root / "a.py"]) != code_hash([root / "b.py"])


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
