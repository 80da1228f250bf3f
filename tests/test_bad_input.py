"""Bad input is one clear sentence that names what is wrong, exit code 2, no traceback, and nothing half-written."""

import errno
import json
import lzma
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import dag
import disk_errors
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_results import tiny_jobs  # noqa: F401

from repro import models
from repro.__main__ import main
from repro.core import files
from repro.core.files import HOME, ROOT, write_text
from repro.data import corpora, sources
from repro.specs import figures, names, scale, scale_files, tables
from repro.store import accepted, kernel_rows
from repro.store.measurement import COLUMNS

LONG = "x" * 5000
DEEP = "[" * 10_000
MODEL = "model"
MINE = ("--configfile", "mine.yaml")
SCALE = dag.SCALE | {"name": "mine", "models": {"Llama-3.2-1B": MODEL}}
Prepare = Callable[[Path], object] | None
Case = tuple[tuple[object, ...], tuple[str, ...], Prepare]


def write(name: str, text: str | bytes) -> Callable[[Path], object]:
    """Put one file into the working folder."""

    def prepare(here: Path) -> None:
        path = here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())

    return prepare


def folder(name: str) -> Callable[[Path], object]:
    """Put a folder where a file should be."""
    return lambda here: (here / name).mkdir(parents=True)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working folder; no data folder and no scale are set."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in ("REPRO_DATA", "SCALE"):
        monkeypatch.delenv(name, raising=False)
    yield tmp_path / "here"
    models.fingerprint.cache_clear()  # `model` is another one in every test


def sentence(err: str, *named: object) -> None:
    """Assert that stderr is one short sentence with each of `named`."""
    assert "Traceback" not in err
    assert err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n"), err
    assert len(err) < 400, err
    for word in named:
        assert str(word) in err, err


def refused(capfd: pytest.CaptureFixture, words: tuple[object, ...], *named: object) -> None:
    """Run a verb in this process; it must say one sentence, return 2 and leave nothing but logs and finished jobs."""
    before = dag.listing(Path.cwd())
    capfd.readouterr()
    models.fingerprint.cache_clear()  # a command remembers no model from the one before
    assert main([str(word) for word in words]) == 2
    sentence(capfd.readouterr().err, *named)
    after = {path: what for path, what in dag.listing(Path.cwd()).items() if before.get(path) != what}
    new = [Path(path).relative_to(Path.cwd()) for path, what in after.items() if what != "folder"]
    new = [path for path in new if path != Path(".snakemake/repro.lock")]
    assert all(path.parts[0] == "build" and not path.name.startswith(".") for path in new), new
    for path in new:
        finished = (path.parent / "job.json").is_file()
        noted = path.name == "log.txt" or path.parts[1] in ("versions", "logs", "benchmarks")
        assert finished or noted, f"{path} is half-written"


# --- verbs, options, names --------------------------------------------------------------------------------------------

NAMES: list[Case] = [
    (("mkae", "all"), ("unknown verb 'mkae'", "did you mean 'make'"), None),
    ((LONG,), ("unknown verb 'xxx", "choose from"), None),
    (("make",), ("targets", "--help"), None),
    (("make", "all", "--coers", "2"), ("--coers 2", "--help"), None),
    (("make", "all", "--cores", "0"), ("--cores", "'0' is not a whole number of 1 or more"), None),
    (("make", "all", "--cores", LONG), ("--cores", "is not a whole number"), None),
    (("make", "tables/spear/table99.tex"), ("unknown target", "tables/spear/table99.tex", "did you mean"), None),
    (("make", LONG), ("unknown target", "choose from: all"), None),
    (("make", "figures/spear/figure99.svg"), ("unknown target", "figures/spear/figure9.svg"), None),
    (("make", "all", "--scale", "pockett"), ("unknown scale", "did you mean 'pocket'"), None),
    (("make", "all", *MINE), ("mine.yaml", "no such file"), None),
    (("make", "tables/table1.tex", "--config", "threads"), ("--config threads", "KEY=VALUE", "threads=2"), None),
    (("make", "tables/table1.tex", "--config", "thread=2"), ("unknown key 'thread'", "did you mean 'threads'"), None),
    (("make", "tables/table1.md"), ("build/lock", "in its place"), write("build", "")),
    (("run", "spear/table1", "--side-by-side", "0"), ("--side-by-side", "'0'", "1 or more"), None),
    (("run", "spear/table1", "--gpus", "-1"), ("--gpus", "'-1'", "0 or more"), None),
    (("run", "spear/table1", "--minutes", "nan"), ("--minutes", "'nan' is not a number of 0 or more"), None),
    (("run", "spear/table1", "--minutes", "-1"), ("--minutes", "'-1'"), None),
    (("run", "spear/table8", "--save", "."), (".: cannot be written", "in its place"), None),
    (("compress", "pocket-3m", "--seed", "text"), ("--seed", "'text'", "whole number"), None),
    (("compress", "pocket-3m", "--seed", "9" * 5000), ("--seed", "'999"), None),
    (("perplexity", "pocket-3m"), ("--corpus", "--help"), None),
    (("perplexity", "pocket-3m", "--corpus", "c4", "--show", "kk"), ("--show", "'kk'", "'top1'"), None),
    (("by_error", "pocket-3m", "--base", "rtn-w4-pc", "--quartile", "x"), ("--quartile", "'x'", "whole number"), None),
    (("by_error", "pocket-3m", "--base", "rtn-w4-pc", "--quartile", "5"), ("quartile is 5", "1, 2, 3 or 4"), None),
    (("similarity", "pocket-3m", "--show", "trace", "--sequence", "9"), ("sequence is 9", "there are 9"), None),
    (("table", "spear/table99"), ("unknown table 'spear/table99'", "did you mean 'spear/table9'"), None),
    (("table", "spear/figure99"), ("unknown figure", "spear/figure9"), None),
    (("table", "audit"), ("tables/audit.csv", "cannot be written"), write("tables", "")),
    (("verify", "--seed", "1"), ("--seed and --minutes belong to a draw; add --sample N",), None),
    (("verify", "--sample", "0"), ("'0' is not a whole number of 1 or more",), None),
    (("verify", "spear/table99"), ("unknown table 'spear/table99'",), None),
    (("verify", "spear/table25"), ("unknown table with a spec 'spear/table25'",), None),
    (("verify", "bitbybit/table8"), ("nothing is stored for bitbybit/table8 at scale pocket",), None),
    (("coverage", "--scale", "nope"), ("unknown scale 'nope'", "pocket"), None),
    (("coverage", "--scale", "../config/pocket"), ("unknown scale '../config/pocket'",), None),
    (("pretrain", "pocket-33m"), ("unknown pocket model 'pocket-33m'", "did you mean"), None),
    (("pretrain", "pocket-3m"), ("--corpus", "REPRO_DATA"), None),
    (("pretrain", "pocket-3m", "--device", "cpu", "--corpus", "nowhere"), ("nowhere", "train-*.txt.xz"), None),
    (("pretrain", "pocket-3m", "--stop-after", "nan"), ("--stop-after", "'nan'"), None),
    (("tune", "nope"), ("unknown kernel 'nope'", "attention"), None),
    (("bench", "--shapes", "4096"), ("--shapes", "'4096'", "4096x14336"), None),
    (("bench", "--counts", "0"), ("--counts", "'0'"), None),
    (("card", "--device", "tpu"), ("--device", "'tpu'", "'cuda'"), None),
    (("regress", "none.json", "--against", "none.json"), ("none.json", "no such file"), None),
    (
        ("regress", ".", "--against", "j"),
        (".: cannot be read (Is a directory); name a file of pytest --benchmark-json",),
        None,
    ),
    (("regress", "j", "--against", "j", "--threshold", "nan"), ("--threshold", "'nan'"), None),
    (("regress", "j", "--against", "j"), ("j: not a file of pytest --benchmark-json",), write("j", DEEP * 20)),
    (
        ("regress", "j", "--against", "j"),
        ("j: not a file of pytest --benchmark-json",),
        write("j", '{"benchmarks": 3}'),
    ),
]


def name_of(value: object) -> str:
    """A short id of a case."""
    return "-".join(str(v)[:20] for v in value[:1] + value[-2:]) if isinstance(value, tuple) and value else ""


@pytest.mark.parametrize(("words", "named", "prepare"), NAMES, ids=name_of)
def test_verbs_and_options(here, capfd, words, named, prepare):
    if prepare:
        prepare(here)
    refused(capfd, words, *named)


def test_version_and_list(here, capfd):
    assert main(["--version"]) == 0 and capfd.readouterr().out.startswith("lowbit-repro 0.")
    assert main(["list"]) == 0
    out = capfd.readouterr().out
    assert all(word in out for word in ("spear/table1", "spear/figure13", "pocket", "gptq", "pocket-3m", "storage"))


# --- scales -----------------------------------------------------------------------------------------------------------

CONFIG = [
    ("threads=abc", "threads: expected int, got str 'abc'"),
    ("threads=-1", "threads is -1; it must be 1 or more"),
    ("device=$(touch x)", "device: unknown value '$(touch x)'; choose from: any, cpu, cuda"),
    ("=2", "unknown key ''"),
    ("name=other", "unknown scale 'other'"),
    ("models=null", "models: expected a mapping"),
    ("models={a: [", "--config models: not valid YAML (line 1: expected the node content"),
    ("threads=!!python/object/apply:os.getcwd []", "could not determine a constructor"),
    ("threads=2024-99-99", "'2024-99-99' is no timestamp"),
    (f"threads={5000 * '9'}", "is no int that can be read"),
    (f"threads=0x{5000 * 'f'}", "is no int that can be read"),
    ("threads=!!int ''", "'' is no int that can be read"),
    ("perplexity={windows: 0}", "perplexity: windows is 0; it must be 1 or more"),
    ("perplexity={window: 3}", "perplexity: unknown key 'window'; did you mean 'windows'"),
    ("zeroshot={tasks: [piq]}", "zeroshot: unknown zero-shot task 'piq'; did you mean 'piqa'"),
    ("calibration={corpus: c5}", "calibration: corpus: unknown corpus 'c5'"),
    ("calibration={sequences: 0}", "calibration: sequences is 0; it must be 1 or more"),
    ("corpora={wikitext2: wikitext3}", "corpora: wikitext2: unknown corpus 'wikitext3'; did you mean 'wikitext2'"),
    ("replicate={windows: 0}", "replicate: windows is 0; it must be 1 or more"),
    ("replicate={seconds: 120}", "replicate: unknown key 'seconds'"),
    (
        "replicate={recipes: {spaer: [pocket-3m]}}",
        "replicate: recipe 'spaer': unknown step 'spaer'; did you mean 'spear'",
    ),
    ("device=gpu", "device: unknown value 'gpu'"),
]


@pytest.mark.parametrize(("word", "message"), CONFIG, ids=lambda value: value[:30])
def test_single_keys_of_a_scale(here, capfd, word, message):
    refused(capfd, ("coverage", "--config", word), message)


SCALES: list[tuple[str | bytes, str]] = [
    ("", "mine.yaml: not a scale; expected a mapping"),
    ("[1, 2]", "mine.yaml: not a scale; expected a mapping"),
    ("name: [", "mine.yaml: not valid YAML (line 1"),
    ("\x00", "mine.yaml: not valid YAML (unacceptable character"),
    (b"\xff\xfe\x00", "mine.yaml: not valid YAML ('utf-8' codec"),
    ("name: mine\nname: b\n", "mine.yaml: not valid YAML (line 1: key 'name' is given twice)"),
    ("name: mine\nmodels:\n\ta: b\n", r"mine.yaml: not valid YAML (line 3: found character '\t'"),
    ("name: other\n", "mine.yaml: its name is 'other'; a scale is named like its file, 'mine'"),
    ("name: mine\n", "mine.yaml: key 'about' is missing"),
    ("name: mine\nbase: pockett\n", "base: unknown scale 'pockett'; did you mean 'pocket'"),
    ("name: mine\nbase: pocket\nabuot: x\n", "mine.yaml: unknown key 'abuot'; did you mean 'about'"),
    ("name: mine\nbase: pocket\nprotocols: {}\n", "mine.yaml: unknown key 'protocols'; choose from"),
    ("name: mine\nbase: pocket\nmodels: {Llama-3.2-1B: nowhere}\n", "unknown model 'nowhere'"),
    ("name: mine\nbase: pocket\nmodels: {Llama-3.2-1B: a/b@main}\n", "'main' is not a pinned revision"),
]


@pytest.mark.parametrize(("text", "message"), SCALES, ids=lambda value: str(value)[:30])
def test_files_of_scales(here, capfd, text, message):
    write("mine.yaml", text)(here)
    refused(capfd, ("run", "spear/table1", "--dry-run", *MINE), message)


def test_scales_that_are_no_files(here, capfd):
    refused(capfd, ("coverage", "--configfile", "."), ".: cannot be read (Is a directory)")
    refused(capfd, ("coverage", "--configfile", LONG), "cannot be read (File name too long)")


# --- recipes, models, texts -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """The tiny model, saved once."""
    return dag.save_model(tmp_path_factory.mktemp("saved") / MODEL)


@pytest.fixture
def with_model(here, saved):
    """A working folder with a copy of the tiny model to spoil, and a scale of its own."""
    shutil.copytree(saved, here / MODEL)
    (here / "mine.yaml").write_text(json.dumps(SCALE))
    return here


RECIPES = {
    LONG: ("unknown step 'xxx", "choose from"),
    "rtn(" + 3000 * "[": ("recipe 'rtn(", "unbalanced brackets"),
    "gptg-w4": ("unknown step 'gptg'", "did you mean 'gptq'"),
    "rtn-w4-quick": ("rtn has no option 'quick'", "options: bits"),
    "rtn-w1": ("bits is 1",),
    "rtn(w=$(touch x))": ("bits: expected int",),
    "rtn-w4-clip=.nan": ("'.nan' is no value for clip",),
    "fp16-w4": ("fp16 is full precision",),
    "": ("unknown step ''", "gptq"),
    "rtn-\udce9": ("rtn has no option",),
    "rtn-w4-g96": ("do not divide into groups of 96",),
    "rtn-w4-pc + spear + spear": ("a second compensator is refused",),
    "spear": ("there are none", "rtn-w4-pc + spear"),
    "spear + rtn-w4-pc": ("there are none", "rtn-w4-pc + spear"),
    "gptq(w=4, percdamp=-1)": ("percdamp is -1.0", "0 or more"),
    "bitbybit(w=3, any_precision)": ("3 bits are not nested in a master of 8", "choose from: 8, 4, 2"),
    "bitbybit(schedule=[w2a16, w4a16, w2a16])": ("rises from w2a16 to w4a16", "order=D"),
    "bitbybit(g=96, tokens=64)": ("q_proj", "do not divide into groups of 96"),
    "bitbybit-w2": ("trains on 8,388,608 tokens an epoch", "the calibration text has", "tokens="),
    "staged_ap-w2": ("trains on 8,388,608 tokens an epoch", "the calibration text has", "tokens="),
    "efficientqat-w2": ("trains on 8,388,608 tokens an epoch", "the calibration text has", "tokens="),
    "spinquant-w2": ("trains on 1,638,400 tokens an epoch", "the calibration text has", "tokens="),
    "spinquant(w=2, a=16)": ("nothing is quantized while it trains", "solver=rtn"),
    "smoothquant-asym": ("takes no asym or clip",),
    "paretoq": ("trains on 16,777,216 tokens an epoch", "the calibration text has", "tokens="),
    "matquant": ("trains on 8,388,608 tokens an epoch", "the calibration text has", "tokens="),
    "group_qat": ("trains on 8,388,608 tokens an epoch", "the calibration text has", "tokens="),
    "bitdistiller(data=text, g=16)": ("trains on 4,194,304 tokens an epoch", "the calibration text has", "tokens="),
    "bitdistiller(tokens=640, g=16)": ("a batch of 128 sequences from",),
    "rtn-w4-pc + sliced-w2": ("put one before it", "bitbybit-any_precision + sliced-w4"),
}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda value: value[:30].encode("ascii", "replace").decode())
def test_recipes(with_model, capfd, recipe):
    refused(capfd, ("compress", MODEL, "--recipe", recipe, *MINE), *RECIPES[recipe])


NO_MODELS = {
    "pocket-33m": ("unknown model 'pocket-33m'", "did you mean 'pocket-3m'", "hub-id@revision"),
    "a/b": ("unknown model 'a/b'", "hub-id@revision"),
    "a/b@main": ("'main' is not a pinned revision", "7 to 40 hex digits"),
    "a/b@0123456789": ("a/b@0123456789", "hub: true"),
    ".": ("no config.json",),
    LONG: ("5,000 characters", "at most 1,000"),
}


@pytest.mark.parametrize("name", NO_MODELS, ids=lambda value: value[:20])
def test_models_that_are_none(with_model, capfd, name):
    refused(capfd, ("compress", name, "--recipe", "rtn-w4-pc", *MINE), *NO_MODELS[name])


def cut(name: str) -> Callable[[Path], object]:
    """Keep the first half of a file of the model."""

    def damage(model: Path) -> None:
        content = (model / name).read_bytes()
        (model / name).write_bytes(content[: len(content) // 2])

    return damage


def changed(change: Callable[[torch.Tensor], torch.Tensor] | None) -> Callable[[Path], object]:
    """Change one tensor of the checkpoint, or leave it out."""

    def damage(model: Path) -> None:
        tensors, key = load_file(model / "model.safetensors"), "model.layers.1.mlp.down_proj.weight"
        tensor = tensors.pop(key)
        tensors |= {key: change(tensor)} if change else {}
        save_file(tensors, model / "model.safetensors", {"format": "pt"})

    return damage


def pickled(model: Path) -> None:
    """Replace the checkpoint by a pickled one."""
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()


def without_shard(model: Path) -> None:
    """Save in shards, and lose one."""
    (model / "model.safetensors").unlink()
    dag.save_model(model, shards=True)
    sorted(model.glob("*.safetensors"))[-1].unlink()


def holds(name: str, text: str) -> Callable[[Path], object]:
    """Write a file of the model anew."""
    return lambda model: (model / name).write_text(text)


def absent(name: str) -> Callable[[Path], object]:
    """Remove a file of the model."""
    return lambda model: (model / name).unlink()


INDEX = "model.safetensors.index.json"
DAMAGE: list[tuple[Callable[[Path], object], tuple[str, ...]]] = [
    (cut("model.safetensors"), ("model.safetensors", "an incomplete or damaged safetensors file", "copy it again")),
    (holds("model.safetensors", ""), ("model.safetensors", "an incomplete or damaged safetensors file")),
    (changed(None), ("layers.1.mlp.down_proj.weight", "not in its files")),
    (changed(lambda tensor: tensor.to(torch.int8)), ("layers.1.mlp.down_proj.weight", "I8", "float32")),
    (changed(lambda tensor: tensor * torch.nan), ("layers.1.mlp.down_proj.weight", "NaN or Inf")),
    (changed(lambda tensor: tensor[:-1].clone()), ("layers.1.mlp.down_proj.weight", "its config.json says")),
    (pickled, ("only pickled weights (pytorch_model.bin)", "safetensors")),
    (without_shard, ("the shard model-0", "is missing", "copy it again")),
    (absent("model.safetensors"), ("no *.safetensors",)),
    (absent("config.json"), ("no config.json",)),
    (cut("config.json"), (MODEL, "check its config.json")),
    (holds("config.json", 10 * DEEP), (MODEL, "check its config.json")),
    (holds("config.json", '{"model_type": "nope"}'), (MODEL, "check its config.json", "nope")),
    (holds(INDEX, 10 * DEEP), (INDEX, "not a safetensors index")),
    (holds(INDEX, '{"weight_map": {"a": 3, "b": "x"}}'), ("the shard 3", "is missing")),
    (lambda model: (absent("model.safetensors")(model), (model / "model.safetensors").mkdir()), ("no *.safetensors",)),
]


@pytest.mark.parametrize(("damage", "named"), DAMAGE, ids=lambda value: name_of(value))
def test_damaged_models(with_model, capfd, damage, named):
    damage(with_model / MODEL)
    refused(capfd, ("compress", MODEL, "--recipe", "rtn-w4-pc", *MINE), *named)


@pytest.mark.parametrize("damage", [cut, absent])
def test_damaged_tokenizers(with_model, capfd, damage):
    damage("tokenizer.json")(with_model / MODEL)
    refused(capfd, ("perplexity", MODEL, "--corpus", "wikitext2", *MINE), MODEL, "check its tokenizer.json")


def test_pocket_weights_with_a_flipped_bit(with_model, capfd, monkeypatch):
    monkeypatch.setattr(models, "POCKET", with_model)
    checkpoint = with_model / MODEL / "model.safetensors"
    (with_model / "SHA256SUMS").write_text(f"{files.sha256(checkpoint)}  {MODEL}/model.safetensors\n")
    content = bytearray(checkpoint.read_bytes())
    content[-100] ^= 4
    checkpoint.write_bytes(content)
    refused(capfd, ("compress", MODEL, *MINE), "model.safetensors", "SHA256SUMS", "check it out again")


# --- GGUF files -------------------------------------------------------------------------------------------------------

OUT = ("--gguf", "x.gguf")
GGUF = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 20) + b"general.architecture" + struct.pack("<IQ", 8, 5) + b"llama"


class Writer:
    """Takes what the gguf package's writer takes, and writes the beginning of a file."""

    def __init__(self, path: None, architecture: str) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None

    def write_header_to_file(self, path: Path) -> None:
        """The one that writes."""
        path.write_bytes(GGUF + bytes(100))


def edited(name: str, *path: object, to: object) -> Callable[[Path], object]:
    """Change one value of a JSON file of the model."""

    def damage(model: Path) -> None:
        changed = at = json.loads((model / name).read_text())
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = to
        (model / name).write_text(json.dumps(changed))

    return damage


def cutting(*path: object, to: object) -> Callable[[Path], object]:
    """Change one value of the tokenizer."""
    return edited("tokenizer.json", *path, to=to)


AROUND = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "a", "type_id": 0}}], "pair": [],
          "special_tokens": {"a": {"id": "a", "ids": [66], "tokens": ["a"]}}}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
NO_PATTERN = ("llama.cpp has no pattern for the tokenizer", "gpt-2, smollm, llama-bpe")
EXPORTS: list[tuple[tuple[object, ...], tuple[str, ...], Prepare]] = [
    (("--recipe", "rtn-w4-pc", *OUT), ("unknown recipe for a GGUF 'rtn-w4-pc'", "fp16, q4_k"), None),
    (("--recipe", "q4_K", *OUT), ("'q4_K'", "did you mean 'q4_k'"), None),
    (("--recipe", LONG, *OUT), ("unknown recipe for a GGUF 'xxx", "choose from"), None),
    (("--recipe", "q4_k", *OUT), ("q_proj.weight", "256", "128 columns", "256 would"), None),
    ((), ("--gguf", "--help"), None),
    (("--gguf", "x.bin"), ("--gguf x.bin", ".gguf"), None),
    (("--gguf", f"{LONG}.bin"), ("--gguf xxx", ".gguf"), None),
    (("--gguf", f"{LONG}.gguf"), ("name is too long",), None),
    (("--gguf", f"{MODEL}/config.json/x.gguf"), ("x.gguf", "in its place"), None),
    (OUT, ("mistral", "only llama"), edited("config.json", "model_type", to="mistral")),
    (OUT, ("gelu", "silu"), edited("config.json", "hidden_act", to="gelu")),
    (OUT, ("RoPE dynamic", "default or linear or llama3"), edited("config.json", "rope_parameters", to=DYNAMIC)),
    (OUT, ("down_proj.weight", "65504"), changed(lambda tensor: tensor * 1e7)),
    (OUT, (MODEL, "check its tokenizer.json"), cut("tokenizer.json")),
    (OUT, NO_PATTERN, cutting("pre_tokenizer", to={"type": "Whitespace"})),
    (OUT, NO_PATTERN, cutting("pre_tokenizer", to=None)),
    (OUT, NO_PATTERN, cutting("normalizer", to={"type": "NFC"})),
    (OUT, NO_PATTERN, cutting("model", "merges", to=[])),
    (OUT, NO_PATTERN, cutting("model", to={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"})),
    (OUT, ("puts the ids [66] around a text",), cutting("post_processor", to=AROUND)),
    (OUT, ("has an id 300, the model 257 ids",), cutting("model", "vocab", "zzz", to=300)),
    (OUT, ("--gguf x.gguf: exists, and this command did not write it", "choose another name"), b"words"),
    (OUT, ("--gguf x.gguf: exists, and this command did not write it",), GGUF + bytes(99)),
    ((*OUT, "--check"), ("x.gguf: cannot be read (No such file",), None),
    ((*OUT, "--check"), ("x.gguf: cannot be read (Is a directory)",), lambda model: (model.parent / "x.gguf").mkdir()),
    ((*OUT, "--check"), ("x.gguf: cut, 0 of 169 bytes",), b""),
    ((*OUT, "--check"), ("x.gguf: cut, 40 of 169 bytes",), GGUF[:40]),
    ((*OUT, "--check"), ("x.gguf: cut, 168 of 169 bytes", "export it again"), GGUF + bytes(99)),
    ((*OUT, "--check"), ("x.gguf: not a GGUF file",), b"\xff" + GGUF + bytes(99)),
    ((*OUT, "--check"), ("architecture is 'gemma', not 'llama'",), GGUF.replace(b"llama", b"gemma") + bytes(100)),
    ((*OUT, "--check"), ("architecture is ''", "not 'llama'"), GGUF[:56] + bytes(8)),
    ((*OUT, "--check"), ("its architecture is 'llama", "…', not"), GGUF[:56] + b"\xff" * 8 + b"llama" + b"\xff" * 5000),
    ((*OUT, "--check"), ("x.gguf: another model, recipe or version",), GGUF + bytes(101)),
]  # fmt: skip


@pytest.mark.parametrize(("words", "named", "prepare"), EXPORTS, ids=name_of)
def test_exports(with_model, capfd, monkeypatch, words, named, prepare):
    names = SimpleNamespace(get_name=lambda key, suffixes: key)
    package = SimpleNamespace(GGUFWriter=Writer, get_tensor_name_map=lambda *_: names, GGML_QUANT_VERSION=2)
    package.MODEL_ARCH = package.GGMLQuantizationType = SimpleNamespace(LLAMA=0, Q4_K=12)
    monkeypatch.setitem(sys.modules, "gguf", package)
    letters = json.loads((with_model / MODEL / "tokenizer.json").read_text())["model"]["vocab"]
    merged = {"ab" if i == 256 else letter: i for letter, i in letters.items()}
    for key, value in {"vocab": merged, "merges": [["a", "b"]]}.items():
        cutting("model", key, to=value)(with_model / MODEL)
    if isinstance(prepare, bytes):
        (with_model / "x.gguf").write_bytes(prepare)
    elif prepare:
        prepare(with_model / MODEL)
    refused(capfd, ("export", MODEL, *words), *named)


def test_exports_without_the_package(with_model, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    refused(capfd, ("export", MODEL, *OUT), "gguf package", "pip install gguf==0.19.0")
    refused(capfd, ("export", "nope", *OUT), "gguf package")


TEXTS: list[tuple[str, tuple[object, ...], tuple[str, ...]]] = [
    ("perplexity", ("--corpus", "wikitext3"), ("unknown corpus 'wikitext3'", "did you mean 'wikitext2'")),
    ("perplexity", ("--corpus", LONG), ("unknown corpus 'xxx",)),
    ("perplexity", ("--corpus", "wikitext2-valid"), ("wikitext2-valid", "REPRO_DATA is not set", "hub: true")),
    ("perplexity", ("--corpus", "c4-hub"), ("c4-hub", "hub: true")),
    (
        "perplexity",
        ("--corpus", "tiny-held-out", "--recipe", "gptq-w4-pc"),
        ("calibrated on tiny-held-out", "name another corpus"),
    ),
    (
        "perplexity",
        ("--corpus", "wikitext2", "--config", "perplexity={length: 512}"),
        ("windows of 512 tokens", "use windows of at most 256"),
    ),
    (
        "compress",
        ("--recipe", "gptq-w4-pc", "--config", "calibration={length: 512}"),
        ("windows of 512 tokens", "use windows of at most 256"),
    ),
    (
        "compress",
        ("--recipe", "gptq-w4-pc", "--config", "calibration={length: 100000000}"),
        ("too few for crops of 100000000", "name a longer corpus"),
    ),
    ("zeroshot", (), ("scale mine has no protocol for zeroshot", "'zeroshot'", "--scale")),
    ("zeroshot", ("--tasks", "pica"), ("unknown zero-shot task 'pica'", "did you mean 'piqa'")),
    ("zeroshot", ("--tasks", "piqa", "--config", "zeroshot={tasks: [piqa]}"), ("REPRO_DATA", "piqa")),
    ("compress", ("--out", "mine.yaml/x.safetensors"), ("mine.yaml/x.safetensors", "in its place")),
    ("compress", ("--out", f"{MODEL}/../{LONG}.safetensors"), ("name is too long",)),
]


@pytest.mark.parametrize(("verb", "words", "named"), TEXTS, ids=lambda value: name_of(value))
def test_texts_and_outputs(with_model, capfd, monkeypatch, verb, words, named):
    monkeypatch.setattr(sources, "EMBEDDED", {})
    refused(capfd, (verb, MODEL, *MINE, *words), *named)


def test_a_text_without_a_full_window(with_model, capfd):
    config = json.loads((with_model / MODEL / "config.json").read_text()) | {"max_position_embeddings": 10**9}
    (with_model / MODEL / "config.json").write_text(json.dumps(config))
    words = ("perplexity", MODEL, *MINE, "--corpus", "wikitext2", "--config", "perplexity={length: 100000000}")
    refused(capfd, words, "no full window of 100000000", "name a longer corpus")


def test_data_folders_without_the_data(with_model, capfd, monkeypatch):
    monkeypatch.setattr(sources, "EMBEDDED", {})
    monkeypatch.setenv("REPRO_DATA", str(with_model))
    text = ("perplexity", MODEL, *MINE, "--corpus", "wikitext2-valid")
    items = ("zeroshot", MODEL, *MINE, "--config", "zeroshot={tasks: [piqa]}")
    rows, task = "wikitext-2/wikitext-2-raw-v1.validation.rows.jsonl", "zeroshot/raw/piqa_valid.jsonl"
    refused(capfd, text, rows, "not in REPRO_DATA=")
    refused(capfd, items, task, "no such file", "REPRO_DATA")
    write(rows, '{"text": "another"}\n')(with_model)
    refused(capfd, text, "wikitext2-valid", "is not the text that this name stands for", "copy it again")
    write(rows, 10 * DEEP)(with_model)
    refused(capfd, text, "not readable as corpus 'wikitext2-valid'", "copy it again")
    write(task, '{"goal": 1}\n')(with_model)
    write(task.replace(".jsonl", "-labels.lst"), "0\n")(with_model)
    refused(capfd, items, "piqa_valid.jsonl", "not the file that task piqa stands for", "cut or of another version")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(with_model, capfd):
    words = ("compress", MODEL, "--recipe", "rtn-w4-pc", *MINE, "--config", "device=cuda")
    refused(capfd, words, "no CUDA device", "choose a scale whose device is cpu")


# --- specs, claims, figures -------------------------------------------------------------------------------------------

TABLE, FIGURE, HEADLINE, MEMORY = (
    f"{name}.yaml" for name in ("tables/spear/table1", "figures/spear/figure13", "tables/table1", "tables/spear/memory")
)
SHORT = "title: t\nrows: {FP16: fp16, RTN pc: rtn-w4-pc}\n"
CLAIM = {
    **{"claim": "spear C021", "says": "x", "printed": "y", "cells": {"f": "FP16 | Wiki", "b": "RTN pc | Wiki"}},
    **{"cases": ["Llama-3.2-1B"], "quantity": "b / f - 1", "holds": "> 0"},
}
PROBES = {
    TABLE: ("table", "spear/table1"),
    FIGURE: ("table", "spear/figure13"),
    HEADLINE: ("table", "table1"),
    MEMORY: ("run", "spear/memory", "--dry-run", "--scale", "pocket"),
}


@pytest.fixture
def checkout(here, monkeypatch):
    """The specs and scales of this checkout, copied to be spoiled."""
    for top in ("tables", "figures", "config"):
        for path in (HOME / top).rglob("*.yaml"):
            target = here / "checkout" / path.relative_to(HOME)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    for module in (tables, figures, scale, scale_files, names):
        monkeypatch.setattr(module, "HOME", here / "checkout")
    forget()
    yield here / "checkout"
    forget()


def forget() -> None:
    """Read specs anew."""
    tables.table.cache_clear()
    scale.hub_models.cache_clear()
    scale.pins.cache_clear()


def claim(**keys: object) -> str:
    """A short spec with a claim."""
    return f"{SHORT}claims: {json.dumps([CLAIM | keys])}\n"


SPECS: list[tuple[str, str | bytes, tuple[str, ...]]] = [
    (TABLE, "", (TABLE, "expected a mapping with keys of Spec")),
    (TABLE, "[1]", (TABLE, "expected a mapping with keys of Spec")),
    (TABLE, b"\xff\x00", (TABLE, "not valid YAML")),
    (TABLE, "rows: {}\n", (TABLE, "key 'title' is missing")),
    (TABLE, SHORT.replace("rows", "lines"), (TABLE, "unknown key 'lines'", "choose from")),
    (TABLE, SHORT.replace("RTN pc", "FP16"), (TABLE, "line 2: key 'FP16' is given twice")),
    (TABLE, SHORT.replace("RTN pc", "RTN pq"), (TABLE, "unknown printed row 'RTN pq'", "did you mean 'RTN pc'")),
    (TABLE, SHORT.replace("RTN pc", "'{1x}'"), (TABLE, "label '{1x}'", "each a word")),
    (TABLE, SHORT.replace("RTN pc", f"'{30 * '{a}'}'"), (TABLE, "label", "at most four names in braces")),
    (TABLE, SHORT.replace("rtn-w4-pc", "rnt-w4-pc"), ("recipe 'rnt-w4-pc'", "did you mean 'rtn'")),
    (TABLE, SHORT + "columns: [Wikki]\n", (TABLE, "unknown printed column 'Wikki'", "did you mean 'Wiki'")),
    (TABLE, SHORT + "recipe: '{tau}'\n", (TABLE, "'{tau}' names 'tau', which is no variable", "recipe")),
    (TABLE, SHORT + "recipe: '{recipe:>9999999999}'\n", (TABLE, "which is no variable there")),
    (TABLE, SHORT + "recipe: '{recipe.__class__}'\n", (TABLE, "which is no variable there")),
    (TABLE, SHORT + "extra_columns: {X: {kind: storrage}}\n", (TABLE, "unknown kind of cell 'storrage'", "'storage'")),
    (TABLE, SHORT + "extra_columns: {X: {kind: storage, cuont: 1}}\n", (TABLE, "unknown key 'cuont'", "'count'")),
    (TABLE, SHORT + "extra_columns: {X: {kind: perplexity, corpus: c5}}\n", ("corpus 'c5'", "choose from: alpaca")),
    (TABLE, SHORT + "extra_columns: {X: storage}\n", (TABLE, "extra_columns.X: expected a mapping")),
    (TABLE, SHORT + "seeds: []\n", (TABLE, "seeds: []", "at least one")),
    (TABLE, SHORT + "seeds: [1, 1]\n", (TABLE, "seeds: [1, 1]", "each once")),
    (TABLE, SHORT + "extra_rows: [nope-w3]\n", ("recipe 'nope-w3'", "unknown step")),
    (TABLE, SHORT + "claims: nothing\n", (TABLE, "claims: expected a list")),
    (TABLE, SHORT + "claims: [nothing]\n", (TABLE, "claims[0]: expected a mapping")),
    (TABLE, claim(claim="spear C999"), ("unknown claim of spear 'C999'", "C001")),
    (TABLE, claim(claim="spaer C001"), ("claim 'spaer C001'", "begin with its paper, as in 'spear C001'")),
    (TABLE, claim(table="spear/table99"), ("unknown table 'spear/table99'", "did you mean 'spear/table9'")),
    (TABLE, claim(cells={}), (TABLE, "claims[0]", "`cells` needs a cell")),
    (TABLE, claim(cells={"b": "RTN px | Wiki"}), ("spear/1 has no cell RTN px | Wiki of Llama-3.2-1B",)),
    (TABLE, claim(cells={"b": "RTN {g} | Wiki"}), (TABLE, "does not give 'g'")),
    (TABLE, claim(cases=["Llama-9"]), ("has no cell", "of Llama-9")),
    (TABLE, claim(cases=[]), (TABLE, "`cases` needs a case")),
    (TABLE, claim(cases=[{"modle": "x"}]), (TABLE, "does not give 'model'")),
    (
        TABLE,
        claim(cases=[{"model": ["a"], **{key: list(range(100)) for key in "bcdef"}}]),
        (TABLE, "10,000,000,000 cases", "at most 10,000"),
    ),
    (TABLE, claim(quantity="__import__('os').system('touch x')"), ("predicate", "only arithmetic")),
    (TABLE, claim(quantity="open('x')"), ("predicate \"open('x')\"", "only arithmetic")),
    (TABLE, claim(quantity="b / g"), ("predicate 'b / g'", "unknown name 'g'", "b, f")),
    (TABLE, claim(quantity="b / (f - f)"), ("predicate 'b / (f - f)'", "divides by zero")),
    (TABLE, claim(quantity="b / / f"), ("predicate 'b / / f'", "not an expression")),
    (TABLE, claim(quantity=10_000 * "(" + "b" + 10_000 * ")"), ("predicate '(((", "not an expression")),
    (TABLE, claim(quantity="b" + 10_000 * " + b"), ("predicate 'b + b", "not an expression")),
    (TABLE, claim(quantity="9**9**9"), ("predicate '9**9**9'", "only arithmetic")),
    (TABLE, claim(quantity="b * 1e308 * 1e308"), ("'b * 1e308 * 1e308'", "inf, not a finite number")),
    (TABLE, claim(quantity="geomean(0 - b)"), ("predicate 'geomean(0 - b)'", "cannot be computed")),
    (TABLE, claim(holds="> y"), ("predicate 'x > y'", "unknown name 'y'")),
    (TABLE, claim(holds=""), ("predicate ''", "not a comparison", ">= 0.5")),
    (TABLE, claim(cross_checks={"KL": "kl"}), ("cross_checks: unknown column of spear/1 'kl'",)),
    (TABLE, claim(percent="yes"), (TABLE, "percent: expected bool, got str 'yes'")),
    (HEADLINE, "", (HEADLINE, "expected a mapping with keys of HeadlineSpec")),
    (HEADLINE, b"\xff", (HEADLINE, "not valid YAML")),
    (HEADLINE, "title: t\nclams: []\n", (HEADLINE, "unknown key 'clams'", "did you mean 'claims'")),
    (FIGURE, dag.FIGURE + "plot: pie\n", (FIGURE, "unknown plot 'pie'", "scatter")),
    (FIGURE, dag.FIGURE + "points: axes\n", (FIGURE, "points: unknown value 'axes'", "'axis'")),
    (FIGURE, dag.FIGURE + "seeds: []\n", (FIGURE, "seeds: []")),
    (FIGURE, dag.FIGURE + "across: {kind: nope}\n", (FIGURE, "unknown kind of cell 'nope'")),
    (FIGURE, dag.FIGURE.replace("title", "titel"), (FIGURE, "unknown key 'titel'", "did you mean 'title'")),
    (FIGURE, dag.FIGURE.replace("{group: pc}", "{gruop: pc}"), (FIGURE, "names 'group', which is no variable")),
    (FIGURE, dag.FIGURE.replace("sweep: {bits: [4, 3]}\n", ""), (FIGURE, "needs one variable in `sweep`")),
    (FIGURE, dag.FIGURE.replace("sweep: {bits: [4, 3]}", "sweep: {bits: [4], b: [1]}"), (FIGURE, "one variable")),
    (FIGURE, dag.FIGURE.replace("[4, 3]", "[]"), (FIGURE, "at least one entry")),
    (FIGURE, dag.FIGURE.replace("[4, 3]", "[many]"), (FIGURE, "sweep: 'many' is not a number", "bars")),
    (FIGURE, dag.FIGURE.replace("[Llama-3.2-1B]", "[]"), (FIGURE, "at least one entry")),
]  # fmt: skip


@pytest.mark.parametrize(("file", "text", "named"), SPECS, ids=lambda value: str(value)[-30:])
def test_specs_that_mean_nothing(checkout, capfd, file, text, named):
    write(f"checkout/{file}", text)(checkout.parent)
    refused(capfd, PROBES[file], *named)


MEMORY_EDITS = [
    ("bits: [4, 3]", "bits: []", "sweep: bits has no values"),
    ("models: [Llama-3.2-1B, Llama-3.2-3B, Llama-2-7B]", "models: []", "needs rows, models and measure"),
    ("corpus: wikitext2}", "corpsu: wikitext2}", "perplexity: unknown key 'corpsu'"),
    ('{s: "{recipe}",', '{"a b": "{recipe}",', "cells: 'a b' is not a name"),
    ("scales: [pocket]", "scales: [pokcet]", "scales: unknown scale 'pokcet'"),
]


@pytest.mark.parametrize(("old", "new", "message"), MEMORY_EDITS, ids=lambda value: value[:20])
def test_a_question_of_our_own(checkout, capfd, old, new, message):
    path = checkout / MEMORY
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    refused(capfd, PROBES[MEMORY], "spear/memory", message)


def test_bases_of_scales(checkout, capfd):
    for name, base in {"a": "b", "b": "a", "c": "nope"}.items():
        (checkout / "config" / f"{name}.yaml").write_text(f"name: {name}\nbase: {base}\n")
    refused(capfd, ("coverage", "--scale", "a"), "config/b.yaml: base: unknown scale 'a'")
    refused(capfd, ("coverage", "--scale", "c"), "config/c.yaml: base: unknown scale 'nope'")
    (checkout / "config" / "d.yaml").mkdir()
    refused(capfd, ("coverage", "--scale", "d"), "config/d.yaml", "cannot be read (Is a directory)")


@pytest.mark.parametrize(
    ("text", "message"), [("[1]", "expected a mapping"), ("Llama-3.2-1B: {pim: x}\n", "unknown key 'pim'")]
)
def test_pins_of_hub_models(checkout, capfd, text, message):
    (checkout / "config" / "hub.yaml").write_text(text)
    refused(capfd, ("run", "spear/table1", "--dry-run"), "config/hub.yaml", message)


# --- what is accepted, shown and run ----------------------------------------------------------------------------------

ROW = dict.fromkeys(COLUMNS, "") | {
    **{"paper": "spear", "kind": "table", "number": "1", "row": "RTN pc", "col": "Wiki", "model": "Llama-3.2-1B"},
    **{"metric": "wikitext2_ppl", "value": "20.0", "status": "ok", "grade": "C", "source": "fresh", "scale": "pocket"},
}
KERNELS = ",".join(kernel_rows.COLUMNS) + "\n"


def rows(**keys: str) -> str:
    """A built table of one row."""
    return "\n".join([",".join(COLUMNS), ",".join(str((ROW | keys)[name]) for name in COLUMNS), ""])


CSV: list[tuple[str | bytes, tuple[str, ...]]] = [
    ("", ("not a file of measurements",)),
    (b"\x00\x01\xff", ("not a text file in UTF-8",)),
    ("row,value\nRTN pc,3\n", ("not a file of measurements", "columns")),
    (rows()[:-30], ("line 2", "cut short")),
    (rows(value="nan"), ("line 2", "value is nan", "not finite")),
    (rows(lo="-inf"), ("line 2", "lo is -inf")),
    (rows(value="much"), ("line 2", "'much'", "not a number")),
    (rows(n=5000 * "1"), ("line 2", "n is '111", "not a number")),
    (rows(status="fine"), ("unknown status 'fine'", "choose from")),
    (rows(paper="spaer"), ("unknown table 'spaer/table1'", "did you mean 'spear/table1'")),
    (rows(paper="../../etc"), ("unknown table '../../etc/table1'",)),
    (rows(kind="tabel"), ("unknown kind of result 'tabel'", "did you mean 'table'")),
    (rows(col="Wikki"), ("has no cell", "Wikki")),
    (rows(row=LONG), ("has no cell", "xxx")),
    (rows(row=200_000 * "x"), ("not a CSV file",)),
    (rows(scale="nope"), ("unknown scale 'nope'",)),
    (rows(source="stored"), ("no measured row",)),
    (rows(seeds="a b"), ("line 2", "seeds is 'a b'", "whole numbers")),
    (rows(seeds="0 -1"), ("line 2", "seeds is '0 -1'")),
    (rows(seeds=LONG), ("line 2", "seeds is 'xxx")),
    (rows(), ("is not built here", "run it here")),
    (KERNELS + "x\n", ("line 2", "cut short")),
    (KERNELS + 200_000 * "x" + "\n", ("not a CSV file",)),
]


@pytest.mark.parametrize(("text", "named"), CSV, ids=lambda value: str(value)[-30:])
def test_accept(here, capfd, text, named):
    write("mine.csv", text)(here)
    refused(capfd, ("accept", "mine.csv"), "mine.csv", *named)


def test_accept_no_file(here, capfd):
    refused(capfd, ("accept", "none.csv"), "none.csv", "cannot be read (No such file or directory)")
    refused(capfd, ("accept", "."), "cannot be read (Is a directory)")
    refused(capfd, ("accept", LONG), "cannot be read (File name too long)")


# --- what is no regular file, and files that a command did not write --------------------------------------------------

PIPED: list[tuple[object, ...]] = [
    ("regress", "p.json", "--against", "p.json"),
    ("accept", "p.json"),
    ("run", "p.json"),
    ("coverage", "--configfile", "p.json"),
    ("generate", "--model", "pocket-3m", "--file", "p.json"),
    ("compress", "pocket-3m", "--recipe", "bitbybit-w2a16-tokens=64", "--text", "p.json", "--out", "made"),
    ("run", "spear/table8", "--save", "p.json"),
]


@pytest.mark.parametrize("words", PIPED, ids=lambda words: " ".join(words[:3:2]))
@pytest.mark.parametrize("kind", ["a named pipe", "a device"])
def test_what_is_no_regular_file(here, capfd, words, kind):
    """Nothing is read from a pipe that nobody writes to, or from a device without an end."""
    if kind == "a device":
        Path("p.json").symlink_to("/dev/zero")
    else:
        os.mkfifo("p.json")
    message = "exists, and this command did not write it" if "--save" in words else f"{kind}, not a regular file"
    refused(capfd, words, "p.json", message)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_model_with_a_pipe_for_a_file(with_model, capfd, name):
    (with_model / MODEL / name).unlink()
    os.mkfifo(with_model / MODEL / name)
    refused(capfd, ("compress", MODEL, "--recipe", "rtn-w4-pc", *MINE), "model", "no ")


def test_a_tokenizer_that_is_a_pipe(with_model, capfd):
    (with_model / MODEL / "tokenizer.json").unlink()
    os.mkfifo(with_model / MODEL / "tokenizer.json")
    words = ("perplexity", MODEL, *MINE, "--corpus", "wikitext2")
    refused(capfd, words, "tokenizer.json: a named pipe, not a regular file")


@pytest.mark.parametrize(
    "words",
    [
        ("compress", MODEL, "--recipe", "rtn-w4-pc", *MINE, "--out", "/proc/x.safetensors"),
        ("run", "spear/table8", "--save", "/proc/x/y.json"),
        ("compress", MODEL, "--recipe", "bitbybit-w2a16-tokens=64", "--length", "64", *MINE)
        + ("--text", "words.txt", "--out", "/proc/x"),
    ],
    ids=["file", "jobs", "folder"],
)
def test_outputs_below_proc(with_model, capfd, words):
    (with_model / "words.txt").write_text("the old town by the sea had a market and two mills. " * 50)
    refused(capfd, words, "/proc/x", "cannot be ")


def test_a_compressed_model_over_something_else(with_model, capfd):
    """Not over the user's own weights, not over a link, not into the folder of another compressed model."""
    words = ("compress", MODEL, "--recipe", "rtn-w4-pc", *MINE, "--out")
    for name in ("model.safetensors", "new.safetensors"):
        refused(capfd, (*words, f"{MODEL}/{name}"), name, "model is the folder of a model; choose another folder")
    (with_model / "copy").mkdir()
    shutil.copy(with_model / MODEL / "model.safetensors", with_model / "copy")
    refused(capfd, (*words, "copy/model.safetensors"), "model.safetensors: exists, and this command did not write it")
    (with_model / "words.safetensors").write_text("words")
    refused(capfd, (*words, "words.safetensors"), "this command did not write it", "choose another name")
    (with_model / "link.safetensors").symlink_to("nowhere")
    refused(capfd, (*words, "link.safetensors"), "this command did not write it")
    assert main([*map(str, words), "new.safetensors"]) == 0 == main([*map(str, words), "new.safetensors"])  # its own
    (with_model / "mine").mkdir()
    (with_model / "new.safetensors").rename(with_model / "mine" / "model.safetensors")
    (with_model / "mine" / "compressed.json").write_text("{}")
    refused(capfd, (*words, "mine/model.safetensors"), "mine is the folder of another compressed model")


def test_jobs_over_something_else(here, capfd):
    write("notes.json", '{"mine": 1}')(here)
    refused(capfd, ("run", "spear/table8", "--save", "notes.json"), "--save notes.json: exists")
    assert (
        main(["run", "spear/table8", "--save", "jobs.json"])
        == 0
        == main(["run", "spear/table8", "--save", "jobs.json"])
    )


def test_times_over_something_else(here, capfd):
    write("times.csv", "kernel,us\n")(here)
    refused(capfd, ("bench", "--out", "times.csv"), "--out times.csv: exists, and this command did not write it")
    write("times.csv", KERNELS)(here)
    refused(capfd, ("bench", "--out", "times.csv"), "no CUDA device")


def test_a_training_over_something_else(here, capfd, monkeypatch):
    monkeypatch.setattr("repro.train.pretrain.cached_ids", lambda *_: pytest.fail("it goes on"))
    words = ("pretrain", "pocket-3m", "--device", "cpu", "--corpus", "corpus", "--out", "out")
    write("out/pocket-3m/model/model.safetensors", "mine")(here)
    refused(capfd, words, "out/pocket-3m exists and holds no training of this command")
    for name, text in {"log.json": '{"epoch": 3}', "checkpoint.safetensors": "mine"}.items():  # of another program
        write(f"out/pocket-3m/{name}", text)(here)
        refused(capfd, words, "out/pocket-3m exists and holds no training of this command")


SHOWN = "tables/spear/table1.md"
WHOLE = "**t**\n\n| a | b |\n| --- | ---: |\n| x | 1 |\n\nnote\n"
MARKDOWN: list[str | bytes] = [
    *("", b"\xff\x00\x01", "hello\nworld\n", WHOLE[:20], "<<<<<<< HEAD\n" + WHOLE),
    *(WHOLE.replace("| x | 1 |", row) for row in ("| x |", "| x | 1 | 2 |", "|", "| *here* | 1 |\n| x |")),
    *(WHOLE.replace("| --- | ---: |", row) for row in ("| --- |", "| a | b |")),
]


@pytest.mark.parametrize("text", MARKDOWN, ids=lambda value: str(value)[-30:])
def test_show_damaged(here, capfd, text):
    write(SHOWN, text)(here)
    refused(capfd, ("show", "spear/table1"), SHOWN, "damaged", "build it again")


def test_show_what_cannot_be_read(here, capfd):
    folder("tables/spear")(here)
    disk_errors.make_unreadable(here / SHOWN)
    assert main(["show", "spear/table1"]) == 2
    sentence(capfd.readouterr().err, f"{SHOWN}: {disk_errors.WHY}")


def test_show(here, capfd):
    refused(capfd, ("show", "spear/table99"), "unknown table 'spear/table99'", "did you mean 'spear/table9'")
    refused(capfd, ("show", "../../x"), "unknown table '../../x'")
    refused(capfd, ("show", f"x/{LONG}"), "unknown table 'x/xxx")
    assert main(["show", "spear/table15"]) == 0
    assert "from stored results; make tables/spear/table15.tex builds it" in capfd.readouterr().out
    write(SHOWN, WHOLE + "\nreplicated here: 1 of 2 cells agree.\n\ndiffers: a cell\n")(here)
    assert main(["show", "spear/table1"]) == 0
    assert capfd.readouterr().out.endswith("replicated here: 1 of 2 cells agree.\ndiffers: a cell\n"), "said last"


JOB = {"kind": "tokens", "label": "x", "inputs": "{}", "options": "{}", "needs": [], "steps": []}
JOBS: list[tuple[str | bytes, str]] = [
    *((text, "not JSON") for text in ("", "{", "[1, 2]", '"x"', "null", '{"kind": "x"}', b"\xff", 20 * DEEP)),
    *((JOB | {key: value}, "not JSON") for key, value in (("inputs", "{"), ("inputs", 3), ("options", 10 * DEEP))),
    *((JOB | {key: value}, "not JSON") for key, value in (("options", "[]"), ("options", '{"model": 3}'))),
    *((JOB | {key: value}, "not JSON") for key, value in (("steps", 3), ("needs", [3]), ("needs", [["a", {}]]))),
    (JOB | {"kind": "nope"}, "unknown kind of job 'nope'"),
    (JOB | {"steps": ["rnt"]}, "unknown step 'rnt'; did you mean 'rtn'"),
    (JOB | {"label": "../../../x"}, "label '../../../x'"),
    (JOB | {"label": LONG}, "label 'xxx"),
]


@pytest.mark.parametrize(("text", "message"), JOBS, ids=lambda value: str(value)[:60])
def test_files_of_jobs(here, capfd, text, message):
    write("mine.json", json.dumps(text) if isinstance(text, dict) else text)(here)
    refused(capfd, ("run", "mine.json"), "mine.json: not a file of jobs", message)


def test_jobs_of_another_text_or_model_are_refused_before_any_runs(here, capfd):
    """Numbers of another text may not appear under the name of the declared one; files are saved for a GPU."""
    assert main(["run", "spear/table8", "--save", "jobs.json"]) == 0
    jobs = json.loads(Path("jobs.json").read_text())
    assert {json.loads(job["options"])["device"] for job in jobs if job["kind"] == "compress"} == {"cuda"}
    text = next(job for job in jobs if job["kind"] == "tokens")
    text["inputs"] = json.dumps(json.loads(text["inputs"]) | {"text": "0" * 16})
    write("one.json", json.dumps([text]))(here)
    label = corpora.identity(text["label"])["label"]
    refused(capfd, ("run", "one.json"), f"tokens/{text['label']}.", f"{label} here is another text than where")
    text["inputs"] = json.dumps(json.loads(text["inputs"]) | {"tokenizer": "0" * 8})
    write("one.json", json.dumps([text]))(here)
    name = json.loads(text["options"])["model"]
    refused(capfd, ("run", "one.json"), f"{name} has another tokenizer here than where the jobs were written")
    model = next(job for job in jobs if job["kind"] == "compress")
    model["inputs"] = json.dumps(json.loads(model["inputs"]) | {"model": "0" * 8})
    write("one.json", json.dumps(model | {"needs": []}))(here)
    name = json.loads(model["options"])["model"]
    refused(capfd, ("run", "one.json"), f"{name} here is another model than where the jobs were written")
    for hollow in (JOB, JOB | {"kind": "compress", "inputs": '{"model": "x"}'}):
        write("one.json", json.dumps(hollow))(here)
        refused(capfd, ("run", "one.json"))


def test_files_of_jobs_that_are_none(here, capfd):
    refused(capfd, ("run", "none.json"), "none.json: cannot be read (No such file", "--save")
    folder("mine.json")(here)
    refused(capfd, ("run", "mine.json"), "mine.json: cannot be read (Is a directory)")


# --- observations and results that were damaged -----------------------------------------------------------------------


def flip(path: Path) -> None:
    """Turn one bit in the first fifth of a file, where its values are."""
    content = bytearray(path.read_bytes())
    content[len(content) // 5] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [flip, lambda path: path.write_bytes(path.read_bytes()[:500])], ids=["flip", "cut"])
def test_damaged_observations(house, capfd, damage):
    path = house.job().folder / "observations.parquet"
    damage(path)
    refused(capfd, ("table", "spear/table1", "--scale", "tiny", "--built"), path, "delete it and build it again")


def test_observations_of_another_job(house, capfd):
    path, table = house.job().folder / "observations.parquet", house.table()
    shutil.copy(house.job("FP16").folder / "observations.parquet", path)
    refused(capfd, ("accept", table), "these are results of the job", "build it again")


def test_damaged_results(house, capfd):
    assert main(["accept", str(house.table())]) == 0
    folder = next(house.results.iterdir())
    (csv,) = folder.glob("spear-table1.csv.xz")
    whole = csv.read_bytes()
    lines = lzma.decompress(whole)
    for damage, message in (
        (whole[:-40], "an incomplete or damaged file in xz"),
        (lines, "an incomplete or damaged file in xz"),
        (lzma.compress(lines[:-40]), "cut short"),
        (lzma.compress(lines + lines.splitlines(keepends=True)[1]), "given twice"),
        (lzma.compress(lines.replace(b",tiny,", b",\xff,")), "not a text file in UTF-8"),
    ):
        csv.write_bytes(damage)
        accepted.forget()
        refused(capfd, ("coverage", "--scale", "tiny"), csv.name, message)
    csv.write_bytes(whole)
    table = house.table()
    flip(next(folder.glob("observations/*.parquet")))
    write_text(folder / "inputs.json.xz", "[")
    accepted.forget()
    capfd.readouterr()
    refused(capfd, ("accept", table), str(folder), "check it out again")


# --- folders that cannot be written -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "message"), [(errno.ENOSPC, "disk is full"), (errno.EACCES, "cannot be written")])
def test_full_and_read_only_disks(here, capfd, monkeypatch, code, message):
    def fails(*args: object, **kwargs: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(tempfile, "mkstemp", fails)
    refused(capfd, ("run", "spear/table8", "--save", "jobs.json"), "jobs.json", message)


@pytest.mark.parametrize("name", ["build", "build/compress"])
def test_a_file_where_a_folder_should_be(with_model, capfd, name):
    write(name, "")(with_model)
    words = ("compress", MODEL, "--recipe", "rtn-w4-pc", *MINE)
    refused(capfd, words, name, "a file or folder is in its place")


# --- as commands ------------------------------------------------------------------------------------------------------


def test_a_command_whose_words_are_no_text(here):
    """As a process of its own, for only there words come as bytes; what else is refused is shown by calls, above."""
    words = [sys.executable, "-m", "repro", b"show", b"caf\xe9"]
    env = dag.environment(ROOT) | {"SCALE": "pocket"}
    done = subprocess.run(words, cwd=here, env=env, capture_output=True, timeout=120)
    assert done.returncode == 2 and not done.stdout
    sentence(done.stderr.decode(), "unknown table", "udce9")


def test_python_too_old(tmp_path):
    old = tmp_path / "python3.9"
    code = "import sys; sys.version_info = (3, 9, 1); exec(sys.argv[2])"
    old.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{code}" "$@"\n')
    old.chmod(0o755)
    words = ["make", "-f", HOME / "Makefile", f"VENV={tmp_path / 'elsewhere'}", f"PYTHON={old}", "env"]
    done = dag.run(words, ROOT, ROOT)
    assert done.code == 2 and not (tmp_path / "elsewhere").exists()
    lines = [line for line in done.err.splitlines() if not line.startswith("make")]
    assert len(lines) == 1 and "Python 3.11 or newer is needed" in lines[0] and "3.9" in lines[0]


def test_there_are_sixty():
    counted = (
        NAMES,
        CONFIG,
        SCALES,
        RECIPES,
        NO_MODELS,
        DAMAGE,
        EXPORTS,
        TEXTS,
        SPECS,
        MEMORY_EDITS,
        CSV,
        MARKDOWN,
        JOBS,
    )
    assert sum(map(len, counted)) >= 200
