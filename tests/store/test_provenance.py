"""Where a number comes from: the commit, the environment, the device."""

import json
import platform
import shutil
import subprocess
import textwrap

import pytest

from repro.store import provenance
from repro.store.provenance import entry_hash, environment


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A project of the test's own: call it with path=code."""
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.delenv("REPRO_COMMIT", raising=False)
    provenance.commit.cache_clear()

    def add(files):
        for path, code in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(textwrap.dedent(code))
        return tmp_path

    yield add
    provenance.commit.cache_clear()


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


def test_the_code_that_draws_is_known_by_its_bytes(tree):
    root = tree({"repro/a.py": "x = 1\n", "repro/render/b.py": "", "repro/c.csv": "1", "methods/m.py": ""})
    (root / "repro" / "methods").symlink_to("../methods")
    was = provenance.sources_hash()
    tree({"methods/m.py": "edited = 1\n", "repro/c.csv": "2"})
    assert provenance.sources_hash() == was, "steps draw nothing, and data are inputs of their own"
    tree({"repro/render/b.py": "# edited\n"})
    assert provenance.sources_hash() != was
    tree({"repro/render/b.py": ""})
    assert provenance.sources_hash() == was and len(was) == 12


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
    for named, clean, edited in [("0123456789",) * 2 + ("0123456789+",), ("0123456789+",) * 3]:
        monkeypatch.setenv("REPRO_COMMIT", named)
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
