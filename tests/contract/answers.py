"""Known answers of every step, metric and shared job on a tiny model: `python tests/contract/answers.py NAME...`

records those of the given names (`all`: every one) in answers.json, after a change that was meant, with a new VERSION.
Inputs come from a generator whose bits are the same on every machine; an answer is a handful of numbers.
"""

import contextlib
import io
import json
import lzma
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import PreTrainedModel

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

import small_models  # noqa: E402

from repro import models  # noqa: E402
from repro.baselines import load as load_step  # noqa: E402
from repro.baselines import rtn  # noqa: E402
from repro.core.files import sha256, write_text  # noqa: E402
from repro.data import bert_score, corpora, generated  # noqa: E402
from repro.engine.scheduling import LatencyTable, Served  # noqa: E402
from repro.engine.traffic import Copy  # noqa: E402
from repro.jobs import compress, questions, requests, tokens  # noqa: E402
from repro.jobs.target import Target  # noqa: E402
from repro.methods import subspec  # noqa: E402
from repro.metrics import KINDS, bench, kernel_time, offload_time, serving, similarity, timeline, tpot  # noqa: E402
from repro.models import bits  # noqa: E402
from repro.models.lowbit import LowBitModel  # noqa: E402
from repro.recipes import recipe  # noqa: E402
from repro.recipes.recipe import STEPS  # noqa: E402
from repro.specs import scale as scales  # noqa: E402
from repro.stats.quantity import Quantity, compose, constant  # noqa: E402
from repro.store import kernel_rows, observations  # noqa: E402
from repro.store.job import Job, distinct  # noqa: E402
from repro.store.observations import Series  # noqa: E402
from repro.workflow import runner, versions  # noqa: E402

FILE = Path(__file__).with_name("answers.json")
Numbers = dict[str, float]

# A recipe for each step, small enough to run at once; rates are far above the defaults, so that few steps move weights.
TRAINED = "tokens=144, batch=2, lr=0.003"
SAMPLED = "samples=8, tokens=16, cka_samples=4"
RECIPES = {
    "rtn": "rtn-w3-g32",
    "gptq": "gptq-w3-g32-act_order",
    "hqq": "hqq-w3-g32",
    "dns": "dns(w3, g32, share=0.02)",
    "awq": "awq-w3-g32",
    "omniquant": "omniquant(w3, g32, epochs=2)",
    "smoothquant": "smoothquant-w8-a8",
    "spinquant": "spinquant(w4, a4, tokens=144, sequences=6, batch=2)",
    "efficientqat": f"efficientqat(w3, g32, {TRAINED}, epochs=1)",
    "staged_ap": f"staged_ap(w3, g32, {TRAINED}, epochs=1)",
    "e2e_qp": "rtn-w3-g32 + e2e_qp(tokens=144, batch=2, lr=0.003)",
    "paretoq": f"paretoq(w3, {TRAINED})",
    "bitdistiller": f"bitdistiller(w3, g32, data=text, clip_tokens=48, length=24, held_out=0.25, {TRAINED})",
    "matquant": f"matquant(g32, {TRAINED}, epochs=1)",
    "group_qat": f"group_qat(w3, g32, {TRAINED}, epochs=1)",
    "bitbybit": f"bitbybit(w3, g32, {TRAINED}, epochs=1)",
    "sliced": f"bitbybit(any_precision, g32, {TRAINED}, epochs=1) + sliced-w2",
    "lqer": "rtn-w3-g32 + lqer-r4",
    "qera": "rtn-w3-g32 + qera-r4",
    "eora": "rtn-w3-g32 + eora-r4",
    "aser": "rtn-w3-g32 + aser-r4",
    "loftq": "rtn-w3-g32 + loftq(r4, iterations=2)",
    "uniform": "rtn-w3-g32 + uniform(r4, samples=8, tokens=16, cka_samples=4, epochs=1, lr=0.003)",
    "spear": f"rtn-w3-g32 + spear({SAMPLED}, epochs1=1, epochs2=1, lr1=0.003, lr2=0.03, budget=0.1)",
    "spqt": "spqt(tokens=144, search=48)",
    "planted": "planted + rtn-w3-g32",
    "q4_k": "q4_k",
}


def weights(model: PreTrainedModel, size: float, seed: int = 0) -> PreTrainedModel:
    """The model with parameters from a generator that gives the same bits everywhere: uniform, norms around 1."""
    draw = np.random.default_rng(seed)
    for name, parameter in model.named_parameters():
        uniform = torch.from_numpy(2 * draw.random(parameter.shape) - 1).to(parameter.dtype)
        parameter.data.copy_(1 + 0.2 * uniform if "norm" in name else size * uniform)
    return model


def tiny_model(name: str) -> PreTrainedModel:
    """The Llama that a step is asked on; super-blocks of Q4_K take 256 columns."""
    hidden = {"hidden_size": 256, "intermediate_size": 256} if name == "q4_k" else {}
    return weights(small_models.llama(vocab_size=96, **hidden), 0.25)


def token_ids() -> torch.Tensor:
    """Eight sequences of 24 tokens: six to calibrate and train on, two to score."""
    return torch.from_numpy(np.random.default_rng(1).integers(2, 96, (8, 24)))


def step(name: str) -> Numbers:
    """What a recipe with the step makes of a tiny Llama: bits, how far its outputs moved, and what the step says."""
    full, made = tiny_model(name), tiny_model(name)
    ids = token_ids()
    lm = LowBitModel(made)
    for one in recipe.on_device(recipe.parse(RECIPES[name]).steps, "cpu"):
        one.module.apply(lm, ids[:6], one.config)
    return compared(lm, full, ids[6:])


def compared(lm: LowBitModel, full: PreTrainedModel, ids: torch.Tensor) -> Numbers:
    """Stored bits, relative distance of the outputs, their mean size, and the means of what steps say of themselves."""
    with torch.no_grad():
        of_full, logits = full(ids).logits.double(), lm.model(ids).logits.double()
    answer = {
        "bits per weight": bits.report(lm, float_bits=16)["bpw"],
        "distance": ((logits - of_full).square().mean() / of_full.square().mean()).sqrt().item(),
        "size": logits.abs().mean().item(),
    }
    for fact, values in lm.facts.items():
        answer[fact] = float(np.mean(values)) if len(values) else 0.0
    return answer


def load() -> Numbers:
    """What the step `load` reads back of a model that was rounded."""
    full, made, again = (weights(small_models.llama(vocab_size=96), 0.25) for _ in range(3))
    lm = LowBitModel(made)
    rtn.apply(lm, None, rtn.Config(bits=3, group=32))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.safetensors")
        lm.save(path, {"recipe": "rtn-w3-g32"})
        other = LowBitModel(again)
        load_step.apply(other, None, load_step.Config(str(path)))
    return compared(other, full, torch.arange(2, 26)[None])


# A recipe and what is asked, for each metric: together they need few jobs.
RTN = "rtn-w3-g32"
PLACED = "rtn-w3-g32 + spear(samples=8, tokens=16, cka_samples=4, epochs1=1, epochs2=1, budget=0.1)"
LEARNED = "efficientqat(w3, g32, tokens=256, batch=2, lr=0.003, epochs=1)"
ACCEPTED = ("length", "median iteration", "draft passes", "repeated 4-grams")
SWITCHED = "flexquant(window=3, layers=2, prompt_tokens=4)"
ASKED: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "perplexity": (RTN, [{"corpus": "wikitext2", "show": show} for show in ("perplexity", "kl", "top1")]),
    "llamacpp": (RTN, [{"corpus": "wikitext2"}]),
    "zeroshot": (RTN, [{"tasks": ("piqa",)}]),
    "likelihood": (RTN, [{"tasks": ("piqa",), "show": show} for show in ("choice", "nll")]),
    "exam": (RTN, [{"task": "mathqa-4"}]),
    "storage": (RTN, [{"count": count} for count in ("bpw", "megabytes", "compensation")]),
    "placement": (PLACED, [{"show": "share"}, {"show": "rank"}]),
    "sensitivity": (RTN, [{"show": show} for show in ("damage", "loss", "rho", "tail")]),
    "agreement": (RTN, [{"show": "rho", "other": "rtn-w2-g32"}, {"show": "jaccard", "other": "rtn-w2-g32"}]),
    "similarity": (PLACED, [{"show": show} for show in ("cos_min", "cos_max", "sigma_avg", "wide")]),
    "sparsity": ("spqt(tokens=256, search=64)", [{"corpus": "wikitext2"}, {"corpus": "wikitext2", "of": "q_proj"}]),
    "by_error": (RTN, [{"base": "rtn-w2-g32", "quartile": quartile, "corpus": "wikitext2"} for quartile in (1, 4)]),
    "token_class": (RTN, [{"corpus": "wikitext2", "of": of} for of in ("punctuation", "starts", "inside")]),
    "training": (LEARNED, [{"show": "tokens"}, {"show": "loss"}]),
    "curve": (LEARNED, [{"show": "spikes", "window": 1}, {"show": "loss"}]),
    "block_error": (RTN, [{"show": "mean"}, {"show": "mean", "inputs": "full"}]),
    "weight_divergence": (RTN, [{"show": "mean"}, {"show": "spread"}]),
    "histogram": (RTN, [{"show": "values"}, {"show": "groups"}]),
    "surface": (RTN, [{"bits": 3, "show": "roughness"}, {"bits": 3, "show": "surface"}]),
    "setting": (LEARNED, [{"step": "efficientqat", "option": "lr", "factor": 1000.0}]),
    "decode": (RTN, [{"show": "stored MB"}, {"show": "read MB"}]),  # the others are times
    "acceptance": ("fp16", [{"prompts": "mt-bench", "depth": 4, "top_k": 2, "show": show} for show in ACCEPTED]),
    "switching": (
        "rtn-w2-g64",
        [{"show": "KL"}, *({"schedule": SWITCHED, "show": one} for one in ("bits", "switches"))],
    ),
}
SCALE = {
    "name": "contract",
    "about": "a tiny random Llama",
    "corpora": {"wikitext2": "wikitext2", "c4": "wikitext2"},
    "calibration": {"corpus": "wikitext2-valid", "sequences": 4, "length": 64},
    "perplexity": {"length": 64, "windows": 6, "kl_windows": 3},
    "llamacpp": {"context": 64, "chunks": 2},
    "zeroshot": {"limit": 8, "tasks": ["piqa"]},
    "likelihood": {"limit": 8, "tasks": ["piqa"]},
    "exam": {"items": 4},
    "sensitivity": {"sequences": 2, "tokens": 16},
    "surface": {"points": 3, "sequences": 2, "tokens": 16},
    "histogram": {"bins": 15},
    "decode": {"prompt": 4, "new": 2, "rounds": 2},
    "acceptance": {"prompts": 2, "tokens": 12},
    "switching": {"prompts": 2, "new_tokens": 16, "context": 200, "validation": 1, "together": 2},
}


@contextlib.contextmanager
def workplace() -> Iterator[scales.Scale]:
    """An empty working folder with a model, and the scale that measures it there."""
    text = corpora.text
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        folder_of_model = Path(folder) / "tiny-llama"
        small_models.write_tokenizer(folder_of_model)
        shape = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
        weights(small_models.llama(**shape), 0.25).save_pretrained(folder_of_model)
        patch.chdir(folder)
        patch.setattr(corpora, "text", lambda *words: text(*words)[:20_000])  # tokenizing all takes seconds
        patch.setattr(similarity, "DRAWS", 2)  # of twelve, which are sampled one token after another
        patch.setattr(similarity, "LENGTH", 24)
        yield scales._build(SCALE | {"models": {"Llama-3.2-1B": str(folder_of_model)}}, "the contract's scale")


def run(jobs: Iterable[Job]) -> None:
    """Run jobs that are not done."""
    for job in distinct(list(jobs)):
        if not runner.done(job):
            runner.run(job)


def metric(name: str, at: scales.Scale) -> Numbers:
    """What a metric measures of the tiny model, through its jobs."""
    text, cases = ASKED[name]
    target, answer = Target(at, at.models["Llama-3.2-1B"], text), {}
    for words in cases:
        params = KINDS[name](**words)
        jobs = params.jobs(target)
        run(jobs.values())
        result = {role: observations.load(job.folder / observations.FILE) for role, job in jobs.items()}
        series = params.series(result, target)
        measured = Quantity([series], params.value)
        answer[" ".join(map(str, words.values()))] = float(np.mean(measured.interval().value))
    return answer


def of_memory() -> Numbers:
    """Gigabytes of a public shape."""
    steps = recipe.parse("bitbybit-w2").steps
    return {"Llama-3.2-1B": KINDS["memory"]().exact(steps, scales.shape("Llama-3.2-1B"))}


def of_offload_time() -> Numbers:
    """What is shown of known times; a GPU measures them."""
    mean = {"iteration": 0.4, "draft": 0.1, "verify": 0.3, "streamed": 11e9, "block": 1e9, "bus": 50e9, "peak": 8e9}
    mean["passes"] = 5.0
    shown = (*offload_time.SHOWN, "share drafting", "ms a draft pass")
    all_params = [KINDS["offload_time"]("Qwen2.5-7B", "8GiB", show=show) for show in shown]
    all_params.append(KINDS["offload_time"]("Qwen2.5-7B", "8GiB", bus=20))
    return {f"{params.show} {params.bus:g}": float(params.value(mean)) for params in all_params}


def of_timeline() -> Numbers:
    """The spans of an iteration of known copies and passes; a GPU measures them."""
    lanes = {
        "copies": [Copy(0.0, 1.0, 5), Copy(9.5, 11.0, 5), Copy(13.0, 14.0, 5)],
        "draft passes": [Copy(1, 2, 0), Copy(10, 12.5, 0)],
        "verification": [Copy(3, 9, 0), Copy(12.5, 15.5, 0)],
    }
    result = {}
    for lane, spans in timeline.spans_of(lanes, subspec.Config(depth=1), 1).items():
        result |= {f"{lane} begin": sum(a for a, _ in spans), f"{lane} end": sum(b for _, b in spans)}
    return result


def of_shape_decode() -> Numbers:
    """What is shown of a known step; a GPU measures it."""
    all_params = [KINDS["shape_decode"]("Llama-2-7B", "s50", show=show) for show in ("tokens/s", "ms")]
    return {params.show: float(params.value({"ms": 4.0})) for params in all_params}


def of_serving() -> Numbers:
    """What is shown of two blocks of three and one known gaps; a GPU measures them."""
    served = Served([0.01, 0.03], [[0.005, 0.012, 0.008], [0.02]], [(1, 7, 0.004)])
    options = {"blocks": 2, "requests": 2, "seed": 0, "shape": "Llama-2-7B", "percent": 38}
    table = LatencyTable({1: 2.0, 8: 3.0})
    series = serving.summarized("spear-22 38", served, table, 0.5, options)
    means = {name.removeprefix("spear-22 38 "): float(one.values.mean()) for name, one in series.items()}
    late = KINDS["serving"]("Llama-2-7B", "spear-22", 38, "late", 22)
    chunk = serving.policy("spear-22", table, 0.5, [1, 8, 512]).chunk(4)
    return means | {"late": float(late.value({"late": means["late 22"], "all": means["gaps"]})), "chunk": chunk}


def of_parallel_decode() -> Numbers:
    """What is shown of a known step; GPUs measure it."""
    return {"ms": float(KINDS["parallel_decode"]("Llama-2-7B", 2, "spear").value({"ms": 4.0}))}


def of_kernel_time() -> Numbers:
    """What is shown of one row of kernel times."""
    row = kernel_rows.KernelRow(
        *("w4-g128", "wna16_gemv", "fp16", 4096, 4096, 16, "cold", "ok", 4.0, 3.9, 4.2),
        bytes=8_650_752,
        fraction=0.9,
        relerr=1e-3,
        rounds=25,
    )
    return {name: float(show(row)) for name, show in kernel_time.SHOWN.items()}


def of_tpot() -> Numbers:
    """Times of a text from made-up steps."""
    facts = {"shape": "shape/Llama-3-8B", "device": "", "commit": "", "timed": 64}
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tpot, "BUILT", Path(folder))
        for bits, short, long in ((16, 4.6, 5.4), (8, 2.6, 3.4), (4, 2.0, 2.8)):
            for context, ms in ((128, short), (4096, long)):
                write_text(
                    Path(folder) / f"step-{bits}-{context}.json", json.dumps(facts | {"context": context, "ms": ms})
                )
        mixed = facts | {"ms": 3.2, "expected ms": 3.0}
        for share in (0.5, 1.5):
            write_text(Path(folder) / f"mixed-random-{share}.json", json.dumps(mixed))
        around = facts | {"layers": 8, "ms": [4.0] * 44 + [4.6] + [4.0] * 55, "steps": [23, 45, 67]}
        write_text(Path(folder) / "switch-ahead-8.json", json.dumps(around))
        signal = facts | {"listening ms": 2.02, "plain ms": 2.0}
        write_text(Path(folder) / "signal.json", json.dumps(signal))
        shows = ("ms", "times", "16 bits", "8 bits", "cache", "mixing", "PPLE", "switching")
        params_of_shows = [KINDS["tpot"](show, "900", "flexquant(layers=8)") for show in shows]
        return {each.show: each.read().interval().value for each in params_of_shows}


def of_bench() -> Numbers:
    """A number of a file that a bench has written."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "BUILT", Path(folder))
        (Path(folder) / "offload").mkdir()
        write_text(Path(folder) / "offload" / "limit.json", json.dumps({"growth_bytes": 3.5}))
        return {"growth": KINDS["bench"]("offload", "limit", "growth_bytes").read().interval().value}


def of_derived() -> Numbers:
    """Arithmetic over operands."""
    params = KINDS["derived"](
        "100 * (b - s) / (b - f)", {"s": "{recipe}", "b": RTN, "f": "fp16"}, {"kind": "perplexity"}
    )
    values = dict(zip(params.operands(), (3.0, 5.0, 1.0)))
    return {"share": compose(params.quantity, {key: constant(value) for key, value in values.items()}).interval().value}


def shared(name: str, at: scales.Scale) -> Numbers:
    """What a job that several metrics need leaves: sums over its arrays."""
    target = Target(at, at.models["Llama-3.2-1B"], RTN)
    job = {
        "tokens": lambda: tokens.job(target, "wikitext2"),
        "requests": lambda: requests.job(target, "piqa", 8),
        "compress": lambda: compress.job(target),
    }[name]()
    run([job])
    return sums(job)


def sums(job: Job) -> Numbers:
    """Sums over the arrays of a job's data file, weighted so that an exchange is seen."""
    answer = {}
    with safe_open(job.folder / "data.safetensors", "np") as file:
        for key in sorted(file.keys())[:12]:
            array = file.get_tensor(key).astype(float).ravel()
            answer[key] = float(array @ (1 + np.arange(len(array)) % 7)) / max(1, len(array))
    return answer


@contextlib.contextmanager
def few_questions() -> Iterator[None]:
    """GSM8K as a few questions of our own, in a folder that REPRO_DATA names."""
    known = generated.GENERATED["gsm8k"]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        hashes = {}
        for name, numbers in zip(known.task.files, (range(3), range(100, 110)), strict=True):
            lines = []
            for i in numbers:
                record = {"question": f"How much is {i} and 1?", "answer": f"{i} and 1\n#### {i + 1}"}
                lines.append(json.dumps(record) + "\n")
            content, path = "".join(lines).encode(), Path(folder, name)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(lzma.compress(content) if name.endswith(".xz") else content)
            hashes[name] = sha256(path)
        patch.setenv("REPRO_DATA", folder)
        patch.setitem(generated.GENERATED, "gsm8k", replace(known, task=replace(known.task, files=hashes)))
        yield


def asked_questions(at: scales.Scale) -> Numbers:
    """The token ids of a few questions behind their examples."""
    with few_questions():
        job = questions.job(Target(at, at.models["Llama-3.2-1B"], RTN), "gsm8k", 2)
        run([job])
    return sums(job)


class Letters:
    """In place of an encoder: a letter is a direction of its own, and so is what frames a text."""

    def states(self, text: str) -> np.ndarray:
        return np.eye(128)[[0, *map(ord, text), 0]]


def of_bertscore(at: scales.Scale) -> Numbers:
    """The score of two made-up answers, letter by letter."""
    target, params = Target(at, at.models["Llama-3.2-1B"], RTN), KINDS["bertscore"]("gsm8k")
    series = {"rougeL": Series(np.zeros(2), "sequences", "made up")}
    for number, text in enumerate(("The answer is 18.", "#### 3")):
        ids = models.tokenizer(target.model)(text)["input_ids"]
        series[f"tokens {number}"] = Series(np.asarray(ids, dtype=float), "tokens")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bert_score, "_encoder", Letters)
        scored = params.series({"texts": observations.Observations(series, {})}, target)
    return {f"text {number}": float(score) for number, score in enumerate(scored["bertscore"].values)}


def names() -> list[str]:
    """Every step, metric and shared job."""
    return [*STEPS, *KINDS, *versions.SHARED]


def answer(name: str, at: scales.Scale) -> Numbers:
    """Today's answer of a step, metric or shared job.

    Args:
        name: of `names`.
        at: the scale of `workplace`.
    """
    alone = {
        "load": load,
        "memory": of_memory,
        "kernel_time": of_kernel_time,
        "derived": of_derived,
        "offload_time": of_offload_time,
        "timeline": of_timeline,
        "shape_decode": of_shape_decode,
        "serving": of_serving,
        "parallel_decode": of_parallel_decode,
        "tpot": of_tpot,
        "bench": of_bench,
    }
    with contextlib.redirect_stdout(io.StringIO()):
        if name in alone:
            return alone[name]()
        if name == "bertscore":
            return of_bertscore(at)
        if name == "questions":
            return asked_questions(at)
        if name in versions.SHARED:
            return shared(name, at)
        return metric(name, at) if name in KINDS else step(name)


def main() -> None:
    """Record the answers of the names on the command line."""
    chosen = names() if sys.argv[1:] == ["all"] else sys.argv[1:]
    known = json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}
    torch.set_num_threads(1)
    with workplace() as at:
        for name in chosen:
            known[name] = {"version": versions.of(name), "numbers": answer(name, at)}
            print(name, json.dumps(known[name]), flush=True)
            lines = [f"{json.dumps(key)}: {json.dumps(known[key])}" for key in sorted(known)]
            write_text(FILE, "{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
