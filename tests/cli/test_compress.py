"""`compress`: a folder that other verbs take for a model, trained on one's own text, resumed with the same bits."""

import json
import re
import shutil
import weakref
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import disk_errors
import engines
import numpy as np
import pytest
import torch

from repro import models
from repro.__main__ import main
from repro.baselines import awq, e2e_qp
from repro.cli import compress as cli_compress
from repro.core.errors import UserError
from repro.data import corpora
from repro.generation import Engine
from repro.generation.switching_engine import SwitchingEngine
from repro.jobs.target import Target
from repro.methods.spear.calibration import CACHE_BYTES
from repro.models import perplexity
from repro.models.lowbit import LowBitModel
from repro.recipes import recipe
from repro.specs import scale
from repro.store.job import built_under
from repro.train import blocks as training
from repro.train import streams, training_cost

WORDS = "the old town by the sea had a market, two mills and a school; every spring its river rose again. "
SMALL = "bitbybit-w2a16-tokens=256-epochs=1-lr=0.001"
CONFIG = ["--config", "perplexity={length: 64, windows: 2, kl_windows: 0}"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny model of each layout as a user has it."""
    folder = tmp_path_factory.mktemp("models")
    return {layout: Path(engines.save(layout, folder / layout)) for layout in engines.LAYOUTS}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working folder with a text of some 700 tokens; of the text that is scored only the beginning is tokenized."""
    whole = corpora.text
    monkeypatch.setattr(corpora, "text", lambda name, hub=False: whole(name, hub)[:20_000])
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SCALE", raising=False)
    models.fingerprint.cache_clear()
    Path("mine.txt").write_text(30 * WORDS, encoding="utf-8")
    return tmp_path


def compress(model, out="made", text=SMALL, *more) -> int:
    words = ["compress", str(model), "--recipe", text, "--text", "mine.txt", "--length", "64", "--out", str(out)]
    return main([*words, *more])


def sentence(capfd, *named) -> None:
    line = capfd.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("error: ") and len(line) < 400 and all(word in line for word in named), line


@pytest.mark.parametrize(
    "recipe_text, changes, why",
    [("rtn-w4-g64", {}, ""), ("rtn-w3-g64", {}, ""), ("rtn-w4-g64", {"head_dim": 48}, "heads of size 48"),
     ("rtn-w5-g64", {}, "codes of 5 bits have no packed format")],
)  # fmt: skip
def test_what_the_engine_cannot_run_is_said_before_it_is_compressed(here, recipe_text, changes, why):
    model = engines.save("llama", here / "model", **changes)
    target = Target(scale.load(name="pocket"), model, recipe.parse(recipe_text).name, 0)
    message = cli_compress._not_run_by_the_engine(target)
    assert why in message and bool(message) == bool(why)


# --- the result -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["llama", "qwen2", pytest.param("mistral", marks=pytest.mark.slow)])
def test_train_then_measure_then_generate(folders, here, capfd, layout):
    """What is measured is what the method made of the first tokens of the text, and what it takes was said before."""
    assert compress(folders[layout]) == 0
    printed = capfd.readouterr().out
    _, tokens, gpu, host, hidden, time, _, end, path = printed.splitlines()
    assert tokens == "tokens         768 in training" and path == "made", "256 tokens in each of three stages"
    assert gpu.startswith("GPU memory     none") and re.search(r"host memory +0.\d\d GB", host)
    assert hidden.startswith("hidden states")
    assert re.fullmatch(r"time +about \d+ seconds, by the time of one block", time)
    assert end.endswith("768 tokens of training")
    assert sorted(path.name for path in Path("made").iterdir()) == ["compressed.json", "model.safetensors"]
    facts = json.loads(Path("made/compressed.json").read_text())
    assert facts["steps"][0]["tokens"] == 768 and len(facts["steps"][0]["loss"]) > 4
    assert facts["environment"]["compute"] == {"bitbybit": "float32"}

    lm = LowBitModel(models.load(str(folders[layout])))
    ids = models.tokenizer(str(folders[layout]))(Path("mine.txt").read_text())["input_ids"]
    for step in recipe.on_device(recipe.parse(SMALL).steps, "cpu"):
        step.module.apply(lm, torch.tensor(ids[:256]).view(4, 64), step.config)
    scored = corpora.token_ids("wikitext2", models.tokenizer("pocket-3m"))
    want = np.exp(perplexity.score(lm.model, perplexity.windows(scored, 64, 2))["nll"].mean())
    assert main(["perplexity", "made", "--corpus", "wikitext2", *CONFIG]) == 0
    about, value = capfd.readouterr().out.splitlines()[-2:]
    assert float(value.split()[0]) == pytest.approx(want, rel=1e-6)
    full = models.load(str(folders[layout]))
    whole = np.exp(perplexity.score(full, perplexity.windows(scored, 64, 2))["nll"].mean())
    assert about.startswith("2 windows of gptq-64-v1 w2 on wikitext2; ×"), "the text is named"
    assert float(about.split("×")[1].split()[0]) == pytest.approx(want / whole, abs=6e-4)
    assert main(["generate", "a town", "--model", "made", "--max-new-tokens", "4"]) == 0
    stored = f"stored {facts['bytes'] / 1e6:.1f} MB"
    assert "+ 4 tokens" in (printed := capfd.readouterr().out) and stored in printed


def test_one_master_is_read_at_2_bits_and_trained_on(folders, here, capfd):
    """A recipe goes on from the folder: fewer bits of a master, and low-bit activations after weights."""
    master = SMALL.replace("w2a16", "w2a16-any_precision")
    assert compress(folders["llama"], "master", master) == 0
    assert main(["perplexity", "master", "--corpus", "wikitext2", *CONFIG]) == 0
    wide = float(capfd.readouterr().out.splitlines()[-1].split()[0])
    assert main(["perplexity", "master", "--recipe", "sliced-w2", "--corpus", "wikitext2", *CONFIG]) == 0
    narrow = float(capfd.readouterr().out.splitlines()[-1].split()[0])
    assert wide != narrow
    assert main(["perplexity", "master", "--recipe", "sliced-w3", "--corpus", "wikitext2", *CONFIG]) == 2
    sentence(capfd, "3 bits are not nested in a master of 8")
    assert compress(folders["llama"], "first", SMALL) == 0
    assert compress("first", "second", "bitbybit(w2a2, schedule=[w2a8, w2a2], tokens=256, epochs=1)") == 0
    facts = json.loads(Path("second/compressed.json").read_text())
    assert facts["model"] == str(folders["llama"]) and facts["recipe"].startswith("load(file=")
    shutil.rmtree("first")  # the second folder has all that it needs
    assert main(["perplexity", "second", "--corpus", "wikitext2", *CONFIG]) == 0


# --- what was interrupted ---------------------------------------------------------------------------------------------


def interrupted(monkeypatch, where, name, after) -> list:
    """Let the function `name` of a module be interrupted once it was called so often; the calls are counted."""
    calls, real = [], getattr(where, name)

    def counted(*arguments, **how):
        calls.append(arguments)
        if len(calls) > after:
            raise KeyboardInterrupt
        return real(*arguments, **how)

    monkeypatch.setattr(where, name, counted)
    return calls


def facts_of(folder) -> dict:
    """The facts of a compressed folder, without those of where it was made."""
    return json.loads(Path(folder, "compressed.json").read_text())


def test_an_interrupted_run_goes_on_with_the_same_bits(folders, here, capfd, monkeypatch):
    with built_under(Path("whole-build")):
        assert compress(folders["qwen2"], "whole") == 0
    with monkeypatch.context() as patch:
        interrupted(patch, training, "fit", 3)
        assert compress(folders["qwen2"], "part") == 130
    assert "the same command goes on after the last trained block" in capfd.readouterr().err
    assert not Path("part").exists(), "there is no folder before it is whole"
    with monkeypatch.context() as patch:
        calls = interrupted(patch, training, "fit", 99)
        assert compress(folders["qwen2"], "part", SMALL, "--resume") == 0
    assert len(calls) == 3, "three of the six trainings of a block were kept"
    assert Path("part/model.safetensors").read_bytes() == Path("whole/model.safetensors").read_bytes()
    assert facts_of("part") == facts_of("whole")
    assert sorted(path.name for path in Path("part").iterdir()) == ["compressed.json", "model.safetensors"]
    with monkeypatch.context() as patch:
        calls = interrupted(patch, training, "fit", 0)
        for more in ([], ["--resume"]):
            assert compress(folders["qwen2"], "part", SMALL, *more) == 0 and calls == [], "nothing is left to do"
    assert compress(folders["qwen2"], "part", SMALL, "--seed", "3") == 2
    sentence(capfd, "--out part: another result is there; remove it, or choose another folder")


def test_a_step_that_is_done_is_not_done_again(folders, here, monkeypatch):
    two = "efficientqat(tokens=256, epochs=1, g=32) + e2e_qp(tokens=256, batch=2)"
    with built_under(Path("whole-build")):
        assert compress(folders["mistral"], "whole", two) == 0
    with monkeypatch.context() as patch:
        interrupted(patch, e2e_qp, "train", 0)
        assert compress(folders["mistral"], "part", two) == 130
    with monkeypatch.context() as patch:
        calls = interrupted(patch, training, "fit", 0)
        assert compress(folders["mistral"], "part", two, "--resume") == 0 and calls == []
    assert Path("part/model.safetensors").read_bytes() == Path("whole/model.safetensors").read_bytes()
    assert facts_of("part") == facts_of("whole")
    assert [step["tokens"] for step in facts_of("part")["steps"]] == [256, 256]


def test_a_folder_is_written_without_a_text_too(folders, here, capfd):
    """And in Python it is a model as well."""
    words = ["compress", str(folders["llama"]), "--recipe", "rtn-w4-g64", "--out", "made"]
    assert main(words) == 0
    assert facts_of("made")["steps"] == [{"steps": ["rtn"], "tokens": 0, "loss": []}]
    assert "".join(Engine.load("made").generate("a town", 4))
    with pytest.raises(UserError, match="name one quantizer of weights"):
        SwitchingEngine.load("made")
    assert main([*words[:-2], "--out", "made.safetensors"]) == 0
    assert Path("made.safetensors").read_bytes() == Path("made/model.safetensors").read_bytes()


def test_a_text_of_ones_own_is_a_corpus_of_every_verb(folders, here, capfd):
    model = str(folders["llama"])
    assert main(["perplexity", model, "--corpus", "mine.txt", *CONFIG]) == 0
    about, before = capfd.readouterr().out.splitlines()[-2:]
    assert about == "2 windows of gptq-64-v1 w2 on mine.txt"
    Path("mine.txt").write_text(30 * WORDS[::-1], encoding="utf-8")
    assert main(["perplexity", model, "--corpus", "mine.txt", *CONFIG]) == 0
    assert capfd.readouterr().out.splitlines()[-1] != before, "a text that changed is another"
    on = CONFIG[1:] + ["calibration={corpus: mine.txt, sequences: 2, length: 64}"]
    words = ["perplexity", model, "--recipe", "gptq-w4-g64", "--corpus", "wikitext2", "--config", *on]
    assert main(words) == 0
    words[words.index("wikitext2")] = "mine.txt"
    assert main(words) == 2
    sentence(capfd, "gptq-w4-g64 is calibrated on mine.txt, and perplexity is measured on mine.txt")


def test_each_step_gets_the_tokens_that_it_asks_for(folders, here, monkeypatch):
    """Of one text a trained step its budget, and a calibrated one the sequences of the scale."""
    shapes = []
    for module in (awq, e2e_qp):
        real = module.apply
        noted = lambda lm, ids, config, real=real: shapes.append(tuple(ids.shape)) or real(lm, ids, config)  # noqa: E731
        monkeypatch.setattr(module, "apply", noted)
    more = ["--config", "calibration={sequences: 2}"]
    assert compress(folders["llama"], "made", "awq-w4-g64 + e2e_qp(tokens=256, batch=2)", *more) == 0
    assert shapes == [(2, 64), (4, 64)]


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--text", "none.txt"], ["none.txt: No such file", "name a text file"]),
        (["--text", "."], [": Is a directory"]),
        (["--text", "latin.txt"], ["latin.txt: byte 3 is not UTF-8"]),
        (["--text", "empty.txt"], ["empty.txt: 1 tokens, bitbybit asks for 256 tokens"]),
        (["--recipe", "bitbybit-w2a16-tokens=4096"], ["tokens, bitbybit asks for 4,096", "tokens=", "more text"]),
        (["--recipe", "gptq-w4-g32", "--config", "calibration={sequences: 64}"], ["64 sequences of 64", "--length"]),
        (
            ["--recipe", "bitbybit-w3a16-any_precision"],
            ["3 bits are not nested in a master of 8; choose from"],
        ),
        (["--recipe", SMALL + "-g48"], ["q_proj: 128 input channels do not divide into groups of 48"]),
        (["--recipe", "bitbybit(w2a16, schedule=[w2a16, w4a16, w2a16])"], ["schedule rises from w2a16 to w4a16"]),
        (["--recipe", SMALL + "-split_first=0.0"], ["split_first is 0.0"]),
        (["--recipe", "rtn-w4-pc"], ["takes no text; leave --text out"]),
        (["--recipe", "fp16"], ["takes no text; leave --text out"]),
        (["--length", "4096"], ["--length 4096: longer than the model's context of 2048"]),
        (["--out", "other"], ["--out other: it exists, and compress did not write it"]),
        (["--out", "mine.txt"], ["--out mine.txt: it exists, and compress"]),
        (["--out", "mine.txt/x"], ["a file or folder is in its place"]),
        (["--config", "device=cuda"], ["this machine has no CUDA device"]),
        (["--recipe", SMALL + "-lr=1e30"], ["lr of bitbybit is given twice"]),
    ],
    ids=lambda value: "",
)
def test_what_is_refused_leaves_nothing(folders, here, capfd, words, named):
    Path("latin.txt").write_bytes(b"abc\xff")
    Path("empty.txt").write_text("")
    Path("other").mkdir()
    before = sorted(here.rglob("*"))
    options = {"--recipe": SMALL, "--text": "mine.txt", "--length": "64", "--out": "made"}
    options |= dict(zip(words[::2], words[1::2], strict=True))
    assert main(["compress", str(folders["llama"]), *chain.from_iterable(options.items())]) == 2
    sentence(capfd, *named)
    left = [path for path in sorted(here.rglob("*")) if "build" not in path.relative_to(here).parts]
    assert left == before, "beside build/"


def test_a_length_needs_a_text(here, capfd):
    assert main(["compress", "pocket-3m", "--recipe", "rtn-w4-pc", "--length", "64"]) == 2
    sentence(capfd, "--length goes with --text FILE")


def test_a_training_that_diverges_is_a_sentence(folders, here, capfd):
    assert compress(folders["llama"], "made", SMALL.replace("0.001", "1e30").replace("epochs=1", "epochs=8")) == 2
    sentence(capfd, "the loss is not finite at step", "lower its learning rate")


def test_a_folder_that_no_longer_fits_is_refused(folders, here, capfd):
    base = here / "base"
    shutil.copytree(folders["llama"], base)
    assert compress(base) == 0
    facts = json.loads(Path("made/compressed.json").read_text())
    command = ["perplexity", "made", "--corpus", "wikitext2", *CONFIG]

    def refused(*named):
        models.fingerprint.cache_clear()
        assert main(command) == 2
        sentence(capfd, *named)

    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-4}))
    refused("made: made from another model than", "restore that model")
    base.rename(here / "away")
    refused("made: its model is needed too, and cannot be read")
    (here / "away").rename(base)
    (base / "config.json").write_text(json.dumps(config))
    content = Path("made/model.safetensors").read_bytes()
    models.fingerprint.cache_clear()
    facts["fingerprint"] = models.fingerprint(str(base))
    Path("made/compressed.json").write_text(json.dumps(facts))
    Path("made/model.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    refused("another file than the one of digest", facts["digest"])
    Path("made/compressed.json").write_text("{")
    refused("made/compressed.json: damaged; remove the folder and compress again")
    disk_errors.make_unreadable(Path("made/compressed.json"))
    refused(f"made/compressed.json: {disk_errors.WHY}")


def test_weights_of_another_model_are_refused(folders, here, capfd):
    assert compress(folders["llama"]) == 0
    other = engines.save("llama", here / "other", rope_theta=1e5)
    words = ["perplexity", other, "--recipe", "load(file=made/model.safetensors)", "--corpus", "wikitext2", *CONFIG]
    assert main(words) == 2
    sentence(capfd, "made/model.safetensors was made from another model than today's")
    words[1] = str(folders["qwen2"])
    assert main(words) == 2
    sentence(capfd, "codes for a layer of")
    words[3] = "load(file=nothing)"
    assert main(words) == 2
    sentence(capfd, "load(file=nothing): not a file; name one that compress wrote")


# --- beforehand -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "bitbybit-w2a16-streams=bfloat16",
        "bitbybit-w2a16-streams=float32",
        "bitbybit(w2a2, schedule=[w4a16, w2a4, w2a2])",
        "bitbybit-w2a16-any_precision",
        "bitbybit-w2a16-rho=0.5",
        "bitbybit(w2a16, schedule=[w4a16, w2a16], second=0.0)",
        "efficientqat-w2-g32",
        "staged_ap-w2-g32",
        "rtn-w4-g32 + bitbybit-w2a16",
    ],
)
def test_streams_are_as_many_as_was_said(folders, monkeypatch, tmp_path, text):
    """The bytes of all streams that are alive at once, counted while a model is trained."""
    alive, most = weakref.WeakSet(), 0
    real = streams.Stream.__init__

    def noted(self, hidden, *rest):
        nonlocal most
        real(self, hidden, *rest)
        alive.add(self)
        most = max(most, sum(each.hidden.nbytes for each in alive))

    monkeypatch.setattr(streams.Stream, "__init__", noted)
    monkeypatch.setattr(training, "KEPT", 0)  # what is kept besides of a short text is not said
    name = str(folders["llama"])
    steps = recipe.with_options(
        text, {step: {"tokens": 256, "epochs": 1} for step in ("bitbybit", "efficientqat", "staged_ap")}
    )
    steps = recipe.parse(steps).steps
    lm, ids = LowBitModel(models.load(name)), torch.arange(256).view(4, 64)
    monkeypatch.chdir(tmp_path)
    for step in steps:
        step.module.apply(lm, ids, step.config)
    result = training_cost.estimate(steps, training_cost.shape(name), 4, 64, 4, "cuda")
    assert result.streams == most
    assert result.tokens == sum(lm.facts["training/tokens"])


def test_bytes_follow_where_hidden_states_live():
    """4096 sequences of 2048 tokens and 256 values are 4.3 GB a stream, five of them in stages after the first."""
    of, stream = training_cost.shape("pocket-3m"), 4096 * 2048 * 256 * 2
    assert of.parameters == sum(p.numel() for p in models.load("pocket-3m").parameters())

    def bytes_of(text, device="cuda"):
        result = training_cost.estimate(recipe.parse(text).steps, of, 4096, 2048, 2, device)
        return result.gpu, result.host

    gpu, host = bytes_of("bitbybit-w2a16")
    assert 5 * stream < gpu < 5 * stream + 2**31 and host == 2 * of.parameters
    moved, on_host = bytes_of("bitbybit(w2a16, place=host)")
    assert gpu - moved == 5 * stream == on_host - host
    assert bytes_of("bitbybit-w2a16", "cpu") == (0, gpu - training_cost.CONTEXT)
    assert bytes_of("bitbybit-w2a2")[0] > gpu, "what autograd keeps of inputs that are quantized"
    steps = recipe.parse("bitbybit-w2a16").steps
    wide = training_cost.estimate(steps, of, 4096, 2048, 4, "cuda").gpu
    assert wide - gpu == 4 * of.parameters, "two bytes more, and a copy in the dtype that training computes in"
    sampled, read = bytes_of("bitdistiller"), bytes_of("bitdistiller-data=text")
    assert sampled[0] > read[0] and sampled[0] >= 2 * CACHE_BYTES, "what a teacher samples has a cache and its copy"
    larger = training_cost.estimate(
        recipe.parse("paretoq").steps, training_cost.shape("pocket-10m"), 8192, 2048, 2, "cuda"
    ).gpu
    assert bytes_of("paretoq")[0] < larger < 2**33


def test_a_master_is_trained_at_all_its_widths_at_once():
    """Three widths keep three sets of activations and of logits, and pass three times; a width of no weight none."""
    of = training_cost.shape("pocket-10m")

    def made(text):
        return training_cost.estimate(recipe.parse(text).steps, of, 4096, 2048, 2, "cuda")

    lambdas = ("2: 1.0, 8: 0.0", "2: 1.0, 4: 1.0", "2: 1.0, 4: 1.0, 8: 1.0")
    one, two, three = (made(f"matquant(lambdas={{{widths}}})") for widths in lambdas)
    assert made("matquant") == three and three.tokens == one.tokens
    assert three.token_blocks == pytest.approx(3 * one.token_blocks)
    assert three.gpu - two.gpu == two.gpu - one.gpu > training_cost.LOSS + 4 * training_cost.KEPT * of.weights


def test_tokens_are_counted_as_the_trainer_counts_them():
    of = training_cost.shape("pocket-3m")

    def tokens(text, sequences=4096):
        return training_cost.estimate(recipe.parse(text).steps, of, sequences, 2048, 2, "cuda").tokens

    assert tokens("bitbybit-w2a16") == 3 * 2 * 4096 * 2048 == 50_331_648
    assert tokens("bitbybit-w2a2") == 100_663_296
    assert tokens("efficientqat-w2 + e2e_qp", 8192) == 2 * 4096 * 2048 + 4096 * 4096
    assert tokens("gptq-w4-g128") == 0


def test_a_trained_step_says_itself_what_its_training_takes():
    """A method of one's own is one file: nothing else lists the trained ones."""
    assert sum(hasattr(module, "work") for module in recipe.STEPS.values()) == 9
    own = SimpleNamespace(work=lambda config, sequences, quantized, count: training_cost.Work(sequences, passes=count))
    own.CALIBRATED = True
    step = recipe.Step("own", own, SimpleNamespace(tokens=256, epochs=3, batch=2))
    assert training_cost.work(step, 8, 64, False, 5) == training_cost.Work(sequences=4, tokens=3 * 256, passes=5)
