"""Bad input is one clear sentence that names what is wrong, exit code 2 (Snakemake: 1), and nothing half-written."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import dag
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from repro import corpora, models, record, spec
from repro.__main__ import main
from repro.files import sha256
from repro.workflow import Workflow

CSV = Path("mine.csv")
ROW = {
    **{"paper": "spear", "kind": "table", "number": "1", "row": "RTN pc", "col": "Wiki", "model": "Llama-3.2-1B"},
    **{"metric": "perplexity", "printed": "", "value": 20.0, "status": "ok", "grade": "C", "live": "live"},
    **{"stand_in": "pocket-3m", "recipe": "rtn-w4-pc", "protocol": "gptq-2048-v1", "profile": "pocket"},
    **{"device": "cpu", "commit": "0123456789", "code": "01234567", "environment": "{}"},
}
COMPRESS = ("compress", "--model", dag.MODEL, "--out", "out.safetensors", "--recipe")
SCORE = ("perplexity", "--model", dag.MODEL, "--tokens", "tokens.safetensors", "--out", "out.parquet", "--length", "64")
TOKENS = ("tokens", "--model", dag.MODEL, "--out", "out.safetensors", "--corpus")
SHOTS = ("zeroshot", "--model", dag.MODEL, "--out", "out.parquet", "--tasks")
RTN = "rtn-w4-g128"
WITH = ("--configfile", "mine.yaml")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the tiny model, token ids and a compressed model, made once."""
    place = dag.folder(tmp_path_factory.mktemp("bad") / "place")
    ids = np.random.default_rng(0).integers(0, 257, 4000).astype(np.int32)
    meta = {"corpus": "pydoc-topics", "label": "pydoc-topics", "corpus_sha256": "0"}
    corpora.save_tokens(place / "tokens.safetensors", ids, meta)
    before = Path.cwd()
    os.chdir(place)
    try:
        assert main(["compress", "--model", dag.MODEL, "--recipe", RTN, "--out", "weights.safetensors"]) == 0
    finally:
        os.chdir(before)
        models.fingerprint.cache_clear()
    return place


@pytest.fixture
def here(place, tmp_path, monkeypatch):
    """A copy of that folder to spoil, as the working directory; no data folder and no profile are set."""
    shutil.copytree(place, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    for name in ("REPRO_DATA", "PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(models, "fingerprint", models.fingerprint.__wrapped__)
    return tmp_path / "here"


def refused(capfd: pytest.CaptureFixture, words: tuple[object, ...], *named: str) -> None:
    """Run a verb in process; it must say one sentence with each of `named`, return 2 and leave the folder as it was."""
    before = dag.listing(Path.cwd())
    capfd.readouterr()
    assert main([str(word) for word in words]) == 2
    check(capfd.readouterr().err, *named)
    assert dag.listing(Path.cwd()) == before


def check(err: str, *named: str) -> None:
    """Assert that stderr is one sentence that names what is wrong."""
    assert "Traceback" not in err
    lines = [line for line in re.split(r"[\r\n]+", err) if line.strip() and "%|" not in line]  # without progress bars
    assert len(lines) == 1 and lines[0].startswith("error: "), err
    assert len(lines[0]) < 700
    for word in named:
        assert word in lines[0], lines[0]


# --- names that do not exist ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("mkae", "all"), ("unknown verb", "'mkae'", "make")),
        (("make",), ("targets",)),
        (("make", "all", "--coers", "2"), ("--coers",)),
        (("make", "all", "--cores", "0"), ("cores", "0")),
        (("make", "tables/spear/table99.tex"), ("unknown target", "tables/spear/table99.tex", "did you mean")),
        (("make", "tables/spaer/table1.tex"), ("unknown target", "did you mean 'tables/spear/table1.tex'")),
        (("make", "all", "--profile", "pockett"), ("unknown profile", "did you mean 'pocket'")),
        (("make", "all", *WITH), ("mine.yaml", "no such file")),
        (("show", "spear/table99"), ("unknown target", "table99")),
        (("show", "spear/table1"), ("tables/spear/table1.md", "not built yet")),
        (("table", "spaer/table1"), ("unknown table", "'spaer/table1'")),
        (("plan", "tables/spear/table99.tex"), ("unknown target",)),
        (("verify", "spear/table99"), ("unknown table", "spear/table99")),
        (("coverage", "--profile", "nope"), ("unknown profile", "'nope'", "pocket-real")),
        ((*COMPRESS, "gpqt-w4"), ("recipe 'gpqt-w4'", "did you mean 'gptq'")),
        ((*COMPRESS, "rtn-w4-quick"), ("recipe 'rtn-w4-quick'", "'quick'", "bits")),
        ((*COMPRESS, "rtn-w1"), ("bits is 1",)),
        ((*COMPRESS, "rtn-w4-clip=some"), ("recipe 'rtn-w4-clip=some'", "clip", "mse")),
        ((*COMPRESS, "fp16"), ("fp16", "not compressed")),
        ((*COMPRESS, "rtn-w4-g96"), ("do not divide into groups of 96",)),
        ((*COMPRESS, "gptq-w4"), ("calibration",)),
        ((*COMPRESS, RTN, "--threads", "0"), ("threads", "0")),
        (("compress", "--model", "pocket-33m", "--recipe", RTN, "--out", "o"), ("unknown model", "'pocket-33m'")),
        (("compress", "--model", "a/b@main", "--recipe", RTN, "--out", "o"), ("a/b@main", "revision")),
        (("compress", "--model", "a/b@0123456789", "--recipe", RTN, "--out", "o"), ("a/b@0123456789", "hub: true")),
        ((*TOKENS, "wikitext3"), ("unknown corpus", "did you mean 'wikitext2'")),
        ((*TOKENS, "wikitext2"), ("wikitext2", "REPRO_DATA", "hub: true")),
        ((*TOKENS, "c4-hub"), ("c4-hub", "hub: true")),
        ((*SHOTS, "piqa"), ("REPRO_DATA", "piqa")),
        ((*SCORE[:-1], "5000"), ("no full window of 5000", "4000 tokens")),
        ((*SCORE, "--windows", "0"), ("window", "0")),
        ((*SCORE, "--weights", "none.safetensors"), ("none.safetensors",)),
        (("accept", "none.csv"), ("none.csv", "no such file")),
        (("pretrain", "pocket-33m"), ("unknown pocket model", "pocket-33m")),
        (("pretrain", "pocket-3m"), ("--corpus", "REPRO_DATA")),
    ],
    ids=lambda value: "-".join(Path(str(v)).name for v in value[-2:]) if isinstance(value, tuple) else "",
)
def test_names(here, capfd, words, named):
    refused(capfd, words, *named)


def test_data_folder_without_the_data(here, capfd, monkeypatch):
    monkeypatch.setenv("REPRO_DATA", str(here))
    refused(capfd, (*TOKENS, "wikitext2"), "wikitext-2/wikitext-2-raw-v1.test.rows.jsonl", "REPRO_DATA=", "hub: true")
    refused(capfd, (*SHOTS, "piqa"), "piqa_valid.jsonl", "REPRO_DATA")
    refused(capfd, (*SHOTS, "pica"), "unknown zero-shot task", "did you mean 'piqa'")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(here, capfd):
    refused(capfd, (*COMPRESS, RTN, "--device", "cuda"), "cuda")


# --- profiles ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"abuot": 1}, ("unknown key 'abuot'", "did you mean 'about'")),
        ({"threads": "two"}, ("threads", "expected int", "'two'")),
        ({"threads": 0}, ("threads", "0")),
        ({"device": "gpu"}, ("device", "unknown value 'gpu'", "cuda")),
        ({"perplexity": {"windows": 1.5}}, ("perplexity", "windows", "1.5")),
        ({"calibration": None}, ("calibration",)),
        ({"base": "pockett"}, ("base", "unknown profile 'pockett'")),
        ({"models": {"Llama-3.2-1B": "nowhere"}}, ("unknown model 'nowhere'",)),
        ({"corpora": {"c4": "pydoc-topics"}}, ("corpus", "'wikitext2'")),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_profile(here, capfd, change, named):
    Path("mine.yaml").write_text(json.dumps(dag.PROFILE | change))
    refused(capfd, ("plan", "tables/spear/table1.tex", *WITH), *named)


@pytest.mark.parametrize("text", ["[1, 2]", "name: [", "", "\x00", "name: a\nname: b\n"])
def test_profile_that_is_none(here, capfd, text):
    Path("mine.yaml").write_text(text)
    refused(capfd, ("make", "tables/spear/table1.tex", *WITH), "mine.yaml")
    refused(capfd, ("coverage", *WITH), "mine.yaml")


# --- damaged models and files -----------------------------------------------------------------------------------------


def cut(path: str) -> None:
    """Keep the first half of a file."""
    content = Path(path).read_bytes()
    Path(path).write_bytes(content[: len(content) // 2])


def flip(path: str) -> None:
    """Turn one bit, near the end of a file."""
    content = bytearray(Path(path).read_bytes())
    content[-100] ^= 4
    Path(path).write_bytes(content)


def with_nan(path: str) -> None:
    """Put one NaN into a checkpoint."""
    tensors = load_file(path)
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = torch.nan
    save_file(tensors, path, {"format": "pt"})


def without_layer(path: str) -> None:
    """Leave one tensor out of a checkpoint."""
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, path, {"format": "pt"})


def pickled(path: str) -> None:
    """Replace a checkpoint by a pickled one."""
    torch.save(load_file(path), Path(path).with_name("pytorch_model.bin"))
    Path(path).unlink()


def without_shard(path: str) -> None:
    """Save in shards, and lose one."""
    Path(path).unlink()
    dag.save_model(Path(dag.MODEL), shards=True)
    sorted(Path(dag.MODEL).glob("*.safetensors"))[-1].unlink()


def emptied(path: str) -> None:
    """Leave nothing in a file."""
    Path(path).write_bytes(b"")


def removed(path: str) -> None:
    """Remove a file."""
    Path(path).unlink()


CHECKPOINT = f"{dag.MODEL}/model.safetensors"


@pytest.mark.parametrize(
    ("damage", "file", "words", "named"),
    [
        (cut, CHECKPOINT, (*COMPRESS, RTN), (CHECKPOINT, "not a whole safetensors file")),
        (emptied, CHECKPOINT, (*COMPRESS, RTN), (CHECKPOINT, "not a whole safetensors file")),
        (with_nan, CHECKPOINT, (*COMPRESS, RTN), ("down_proj", "NaN")),
        (without_layer, CHECKPOINT, (*COMPRESS, RTN), ("layers.1.mlp.down_proj.weight", "not in its files")),
        (pickled, CHECKPOINT, (*COMPRESS, RTN), ("pickled", "pytorch_model.bin")),
        (without_shard, CHECKPOINT, (*COMPRESS, RTN), ("shard", "missing", "model.safetensors.index.json")),
        (removed, CHECKPOINT, (*COMPRESS, RTN), ("no *.safetensors",)),
        (cut, f"{dag.MODEL}/config.json", (*COMPRESS, RTN), (dag.MODEL, "config")),
        (removed, f"{dag.MODEL}/config.json", (*COMPRESS, RTN), ("no config.json",)),
        (removed, f"{dag.MODEL}/tokenizer.json", (*TOKENS, "pydoc-topics"), (dag.MODEL, "no tokenizer")),
        (cut, f"{dag.MODEL}/tokenizer.json", (*TOKENS, "pydoc-topics"), (dag.MODEL, "no tokenizer")),
        (cut, "tokens.safetensors", SCORE, ("tokens.safetensors", "not a whole file of token ids")),
        (flip, "tokens.safetensors", SCORE, ("tokens.safetensors", "not those that it was saved with")),
        (cut, "weights.safetensors", (*SCORE, "--weights", "weights.safetensors"), ("weights.safetensors",)),
        (flip, "weights.safetensors", (*SCORE, "--weights", "weights.safetensors"), ("weights.safetensors", "SHA-256")),
        (flip, CHECKPOINT, (*SCORE, "--weights", "weights.safetensors"), ("weights.safetensors", "another model")),
    ],
    ids=lambda value: value.__name__ if callable(value) else Path(value).stem if isinstance(value, str) else "",
)
def test_damage(here, capfd, damage: Callable[[str], None], file, words, named):
    damage(file)
    refused(capfd, words, *named)


def test_pocket_weights_with_a_flipped_bit(here, capfd, monkeypatch):
    monkeypatch.setattr(models, "POCKET", here)
    (here / "SHA256SUMS").write_text(f"{sha256(CHECKPOINT)}  {CHECKPOINT}\n")
    assert main([*COMPRESS, RTN]) == 0
    Path("out.safetensors").unlink()
    flip(CHECKPOINT)
    refused(capfd, (*COMPRESS, RTN), CHECKPOINT, "SHA256SUMS", "check it out again")


@pytest.mark.parametrize("measure", ["perplexity", "zeroshot"])
def test_damaged_scores(here, capfd, monkeypatch, measure):
    profile = dag.PROFILE | {"zeroshot": {}}
    Path("mine.yaml").write_text(json.dumps(profile))
    write_spec(monkeypatch, f"title: t\nrows: {{FP16: fp16}}\ncolumns: {{ZS: {{measure: {measure}, corpus: c4}}}}\n")
    flow = Workflow(profile)
    (file,) = [f for f in flow.table_inputs("spear", "1") if f.endswith(".parquet")]
    Path(file).parent.mkdir(parents=True)
    Path(file).write_bytes(b"PAR1 no more")
    refused(capfd, ("table", "spear/table1", *WITH), file, "not a whole Parquet file")


# --- specs and predicates ---------------------------------------------------------------------------------------------


def write_spec(monkeypatch: pytest.MonkeyPatch, text: str, name: str = "tables/spear/table1.yaml") -> None:
    """Let `text` be a spec of a checkout that has no other."""
    path = Path("checkout") / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    monkeypatch.setattr(spec, "ROOT", Path("checkout").resolve())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("GPTQ g128", "GPTQ g129"), ("tables/spear/table1.yaml", "unknown printed row 'GPTQ g129'", "extra")),
        (("  C4:", "  C5:"), ("tables/spear/table1.yaml", "unknown printed column 'C5'")),
        (("rtn-w4-pc", "rnt-w4-pc"), ("recipe 'rnt-w4-pc'", "did you mean 'rtn'")),
        (("perplexity,", "perplexty,"), ("tables/spear/table1.yaml", "unknown value 'perplexty'")),
        (("corpus: c4", "corpus: c5"), ("corpus", "'c5'")),
        (("rows:", "lines:"), ("tables/spear/table1.yaml", "unknown key 'lines'")),
        (("title:", "extra: nothing\ntitle:"), ("tables/spear/table1.yaml", "extra", "expected a list")),
    ],
    ids=lambda value: "",
)
def test_spec(here, capfd, monkeypatch, change, named):
    Path("mine.yaml").write_text(json.dumps(dag.PROFILE))
    assert change[0] in dag.SPEC
    write_spec(monkeypatch, dag.SPEC.replace(*change))
    refused(capfd, ("plan", "tables/spear/table1.tex", *WITH), *named)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("b / f - 1", "b / g - 1"), ("unknown name 'g'", "b / g - 1")),
        (("b / f - 1", "open('x')"), ("open('x')", "only arithmetic")),
        (("b / f - 1", "b / / f"), ("b / / f", "not an expression")),
        (("C005", "C999"), ("unknown claim of spear 'C999'",)),
        (("RTN pc | Wiki", "RTN pc | Wikki"), ("RTN pc | Wikki", "Llama-3.2-1B")),
        (("claims:", "clams:"), ("tables/table1.yaml", "unknown key 'clams'")),
    ],
    ids=lambda value: "",
)
def test_predicate(here, capfd, monkeypatch, change, named):
    Path("mine.yaml").write_text(json.dumps(dag.PROFILE | {"models": {}}))
    assert change[0] in dag.HEADLINE
    write_spec(monkeypatch, dag.HEADLINE.replace(*change), "tables/table1.yaml")
    refused(capfd, ("headline", *WITH), *named)


# --- accepted files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"value": "nan"}, ("mine.csv, line 2", "value is nan", "not finite")),
        ({"value": "much"}, ("mine.csv, line 2", "'much'", "not a number")),
        ({"status": "fine"}, ("unknown status 'fine'",)),
        ({"paper": "spaer"}, ("unknown paper 'spaer'", "did you mean 'spear'")),
        ({"number": "99"}, ("unknown table '99'",)),
        ({"col": "Wikki"}, ("Wikki",)),
        ({"model": "Llama-9"}, ("Llama-9",)),
        ({"commit": "0123456789+"}, ("0123456789+", "commit")),
        ({"environment": ""}, ("environment is empty",)),
        ({"lo": "21", "hi": "22"}, ("20.0", "outside its interval")),
        ({"floor": "30"}, ("20.0", "30.0", "device allows")),
        ({"live": "recorded"}, ("mine.csv", "no measured row")),
        ("row,value\nRTN pc,3\n", ("mine.csv", "not a file of measurements")),
        ("\x00\x01", ("mine.csv",)),
        ("short", ("mine.csv, line 2", "cut short")),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_accept(here, capfd, monkeypatch, change, named):
    results = here / "results"
    monkeypatch.setattr(record.accept, "__defaults__", (results,))
    line = {**dict.fromkeys(record.COLUMNS, ""), **ROW, **(change if isinstance(change, dict) else {})}
    whole = ",".join(record.COLUMNS) + "\n" + ",".join(str(line[c]) for c in record.COLUMNS) + "\n"
    CSV.write_text(whole if isinstance(change, dict) else whole[:-40] if change == "short" else change)
    refused(capfd, ("accept", CSV), *named)


def test_what_is_accepted(here, monkeypatch):
    monkeypatch.setattr(record.accept, "__defaults__", (here / "results",))
    line = {**dict.fromkeys(record.COLUMNS, ""), **ROW}
    CSV.write_text(",".join(record.COLUMNS) + "\n" + ",".join(str(line[c]) for c in record.COLUMNS) + "\n")
    assert main(["accept", str(CSV)]) == 0
    assert len(record.from_csv(here / "results" / "cpu" / "spear-table1.csv")) == 1


# --- folders that cannot be written -----------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """Mount a tmpfs with the given options; skips where that is not allowed."""
    mounted = []

    def mount(options: str) -> Path:
        folder = tmp_path / "disk"
        folder.mkdir()
        words = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        try:
            done = subprocess.run(words, capture_output=True, timeout=30)
        except FileNotFoundError:
            pytest.skip("there is no mount here")
        if done.returncode:
            pytest.skip("this user may not mount a tmpfs")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True, timeout=30)


def test_full_disk(here, capfd, small_disk):
    disk = small_disk("size=64k")
    refused(capfd, (*COMPRESS[:4], disk / "w.safetensors", "--recipe", RTN), "w.safetensors", "disk is full")
    (disk / "filler").write_bytes(bytes(60 * 1024))
    refused(capfd, (*TOKENS[:4], disk / "t.safetensors", "--corpus", "pydoc-topics"), "t.safetensors", "disk is full")
    refused(capfd, ("audit", "--out", disk), "audit", "disk is full")
    assert [p.name for p in disk.iterdir()] == ["filler"]


def test_read_only_folder(here, capfd, small_disk):
    disk = small_disk("ro,size=64k")
    refused(capfd, (*COMPRESS[:4], disk / "w.safetensors", "--recipe", RTN), "w.safetensors", "cannot be written")
    refused(capfd, (*SCORE[:6], disk / "new" / "s.parquet", *SCORE[7:]), "s.parquet", "cannot be written")
    refused(capfd, ("audit", "--out", disk), "audit", "cannot be written")


@pytest.mark.parametrize(("code", "said"), [(errno.ENOSPC, "disk is full"), (errno.EACCES, "cannot be written")])
def test_the_same_without_a_mount(here, capfd, monkeypatch, code, said):
    def fails(*args: object, **kwargs: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(tempfile, "mkstemp", fails)
    refused(capfd, (*COMPRESS, RTN), "out.safetensors", said)


def test_a_file_where_a_folder_should_be(here, capfd):
    Path("tables").write_text("")
    refused(capfd, ("audit",), "tables", "audit")


# --- commands ---------------------------------------------------------------------------------------------------------


def test_another_snakemake_at_work(here, capfd):
    lock = here / ".snakemake" / "locks" / "0.output.lock"
    lock.parent.mkdir(parents=True)
    lock.write_text("tables/spear/table1.csv\n")
    (here / "snakemake").write_text("import time\ntime.sleep(60)\n")
    other = subprocess.Popen([sys.executable, "snakemake"], cwd=here)
    try:
        refused(capfd, ("make", "tables/spear/table1.csv"), str(here), f"process {other.pid}", "at work here")
        assert lock.is_file()
    finally:
        other.kill()
        other.wait()


def test_python_too_old(source, tmp_path):
    old = tmp_path / "python3.9"
    code = "import sys; sys.version_info = (3, 9, 1); exec(sys.argv[2])"
    old.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{code}" "$@"\n')
    old.chmod(0o755)
    words = ["make", "VENV=elsewhere", f"PYTHON={old}", "env"]
    done = dag.run(words, source, source)
    assert done.code == 2 and not (source / "elsewhere").exists()
    said = [line for line in done.err.splitlines() if not line.startswith("make")]
    assert len(said) == 1 and "Python 3.11 or newer is needed" in said[0] and "3.9" in said[0]


@pytest.mark.parametrize(
    ("words", "env", "named"),
    [
        (("tables/spear/table99.tex",), {}, ("unknown target", "table99")),
        (("tables/spear/table1.tex",), {"PROFILE": "tinny"}, ("unknown profile 'tinny'", "did you mean 'tiny'")),
    ],
    ids=["target", "profile"],
)
def test_make(source, words, env, named):
    before = dag.listing(source)
    done = dag.run(["make", "CORES=2", f"PYTHON={sys.executable}", *words], source, source, **env)
    assert done.code == 2 and not done.out.strip()
    check("\n".join(line for line in done.err.splitlines() if not line.startswith("make: ***")), *named)
    assert dag.listing(source) == before


@pytest.mark.parametrize(
    ("words", "env", "named"),
    [
        (("tables/spear/table1.csv",), {"PROFILE": "tinny"}, ("unknown profile 'tinny'",)),
        (("--configfile", "mine.yaml", "--", "tables/spear/table1.csv"), {}, ("unknown key 'abuot'",)),
        (("tables/spear/table99.csv",), {}, ("unknown table of spear '99'",)),
        (("--configfile", "short.yaml", "--", "tables/spear/table1.csv"), {}, ("missing", "shard")),
    ],
    ids=["profile", "key", "table", "shard"],
)
def test_snakemake(source, here, words, env, named):
    Path("mine.yaml").write_text(json.dumps(dag.PROFILE | {"abuot": 1}))
    Path("short.yaml").write_text(json.dumps(dag.PROFILE))
    if "shard" in named:
        without_shard(CHECKPOINT)
    done = dag.run(dag.snakemake(source, *words), here, source, **env)
    assert done.code == 1
    assert not (here / "tables").exists() and not (here / "build").exists() or "shard" in named
    said = [line for line in done.text.splitlines() if line.startswith("error: ")]
    check("\n".join(said), *named)
    assert "Traceback" not in done.text and 'File "' not in done.text
