"""A model compressed on a text of one's own: `python -m repro compress MODEL --recipe R --text FILE --out FOLDER`.

The folder takes the place of a model in every command that measures or generates. It holds what the recipe stores
(`baselines/load.py`), and facts in JSON: the model that it was made from, which is still needed, recipe, text, tokens
seen, loss curve. Checkpoints of trained blocks lie in it until the end, so that `--resume` goes on after the last one,
on a CPU with the same bits.
"""

import contextlib
import json
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from repro import models
from repro.baselines import load
from repro.core.errors import UserError, shortened
from repro.core.files import making, regular, sha256, write_text
from repro.jobs.target import Target
from repro.models import bits, perplexity
from repro.models.lowbit import LowBitModel, block_inputs, blocks, is_compressed_file
from repro.recipes.recipe import Step, computed_in, on_device, parse
from repro.recipes.recipe_text import write_value
from repro.store import provenance
from repro.store.job import built_under
from repro.train import training_cost
from repro.train.streams import computing

FACTS, WEIGHTS = "compressed.json", "model.safetensors"  # in the folder
BEGUN, WORK = "unfinished.json", "unfinished"  # likewise, until the end
LONGEST = 2048  # tokens of a training sequence, where a model's context has as many and --length says nothing
PROBES = 3  # passes of one sequence through the first block, by which the time of all is guessed


# --- the text ---------------------------------------------------------------------------------------------------------


def token_ids(path: Path, model: str, hub: bool) -> np.ndarray:
    """Token ids int64 `[T]` of a text file, from one call of the model's tokenizer.

    Raises:
        UserError: there is no such file, it is not UTF-8 or empty, or the model has no tokenizer.
    """
    try:
        text = regular(path, f"--text {path}").read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"--text {shortened(path, 200)}: {os.strerror(error.errno)}; name a text file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"--text {path}: byte {error.start:,} is not UTF-8; save the text as UTF-8") from None
    except ValueError:  # a path with a zero byte
        raise UserError(f"--text {shortened(path)!r}: not a path of a file") from None
    return np.asarray(models.tokenizer(model, hub)(text, verbose=False)["input_ids"], dtype=np.int64)


def needed(step: Step, sequences: int, length: int) -> int:
    """Sequences of `length` tokens that a step asks for: its own `tokens`, else `sequences`; 0 if it takes no text."""
    return -(-step.config.tokens // length) if hasattr(step.config, "tokens") else sequences * step.calibrated


def training_sequences(ids: np.ndarray, steps: tuple[Step, ...], sequences: int, length: int, where: str) -> Tensor:
    """The first tokens of a text, int64 `[S, length]`, one sequence after the other.

    Raises:
        UserError: there are fewer than a step asks for.
    """
    for step in steps:
        count, tokens = needed(step, sequences, length), getattr(step.config, "tokens", 0)
        if len(ids) < max(count * length, tokens):
            whole = len(ids) // length * length
            hint = f"or set its tokens={whole}" if tokens and whole else "or shorter sequences by --length"
            asked = f"{tokens:,} tokens" if tokens else f"{count} sequences of {length} tokens"
            raise UserError(f"{where}: {len(ids):,} tokens, {step.name} asks for {asked}; give more text, {hint}")
    count = max(needed(step, sequences, length) for step in steps)
    return torch.from_numpy(ids[: count * length]).view(count, length)


# --- the folder -------------------------------------------------------------------------------------------------------


def opened(name: str, recipe: str) -> tuple[str, str]:
    """Model and recipe for a folder that `compress` wrote in place of a model; any other name and its recipe as given.

    Raises:
        UserError: the folder is not finished or damaged, or its model is gone or another.
    """
    folder = Path(name)
    try:
        there, begun = (folder / FACTS).is_file(), (folder / BEGUN).is_file()
    except (OSError, ValueError):  # too long, or a zero byte
        return name, recipe
    if not there:
        if begun:
            raise UserError(f"{name}: not finished; give its compress command again with --resume")
        return name, recipe
    facts = _read(folder / FACTS)
    try:
        now = models.fingerprint(facts["model"])
    except UserError as error:
        raise UserError(f"{name}: its model is needed too, and cannot be read ({error})") from None
    if now != facts["fingerprint"]:
        raise UserError(f"{name}: made from another model than {facts['model']} is now; restore that model")
    words = [f"file={write_value(str(folder.resolve() / WEIGHTS))}", f"digest={write_value(facts['digest'])}"]
    if recipe == "fp16":
        return facts["model"], f"load({', '.join(words)})"
    if not any(step.rescales for step in parse(facts["recipe"]).steps):
        words.append("full")
    return facts["model"], f"load({', '.join(words)}) + {recipe}"


def _read(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        if all(isinstance(facts[key], str) for key in ("model", "fingerprint", "recipe")):
            return {"digest": ""} | facts
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise UserError(f"{path}: damaged; remove the folder and compress again")


def check_folder(out: Path, declared: dict[str, Any], resume: bool) -> bool:
    """Whether the work on a folder is done already; raise where it may not begin, or go on.

    Raises:
        UserError: a folder that is there without `--resume`, or with it one of other files or another command.
    """
    if not os.path.lexists(out):
        return False
    begun = next((out / name for name in (FACTS, BEGUN) if (out / name).is_file()), None)
    if begun is None:
        raise UserError(f"--out {out}: it exists, and compress did not write it; choose another folder")
    if not resume:
        done = "is there already; remove it"
        how = done if begun.name == FACTS else "holds an interrupted run; add --resume to go on with it"
        raise UserError(f"--out {out} {how}, or choose another folder")
    weights = out / WEIGHTS
    if begun.name == BEGUN and os.path.lexists(weights) and not is_compressed_file(weights):
        raise UserError(f"--out {out}: this command did not write the {WEIGHTS} in it; move it away")
    earlier = _read(begun)
    for key, value in declared.items():
        if earlier.get(key) != value:
            was = shortened(json.dumps(earlier.get(key)), 120)
            raise UserError(f"--out {out}: begun with another {key} ({was}); give the same, or choose another folder")
    return begun.name == FACTS


# --- beforehand -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def block_seconds(model: nn.Module, steps: tuple[Step, ...], ids: Tensor) -> float:
    """Seconds that the first block takes for a token: the least of a few passes of one sequence.

    It is computed in the dtype that the last step which names one trains in.
    """
    named = [step.config.compute for step in steps if hasattr(step.config, "compute")]
    model = computing(model, named[-1]) if named else model
    hidden, kwargs = block_inputs(model, ids[:1])
    block, times = next(iter(blocks(model).values())), []
    for _ in range(1 + PROBES):
        started = time.perf_counter()
        block(hidden[0], **kwargs[0])
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return min(times[1:]) / ids.shape[1]


def report(cost: training_cost.Estimate, seconds: float, free: int | None) -> str:
    """What the work takes, in a few lines; `free` bytes of the GPU, if there is one."""
    gpu = f"{cost.gpu / 1e9:.2f} GB" if cost.gpu else "none: it runs on the CPU (--config device=cuda: on a GPU)"
    if free is not None and cost.gpu > free:
        gpu += f", more than the {free / 1e9:.2f} GB that are free: place=host keeps hidden states in host memory"
    took = f"{seconds / 60:,.0f} minutes" if seconds >= 120 else f"{seconds:,.0f} seconds"
    lines = {
        "tokens": f"{cost.tokens:,} in training",
        "GPU memory": gpu,
        "host memory": f"{cost.host / 1e9:.2f} GB",
        "hidden states": f"{cost.streams / 1e9:.2f} GB of it",
        "time": f"about {took}, by the time of one block",
    }
    return "\n".join(f"{key:14} {text}" for key, text in lines.items())


# --- the work ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OwnText:
    """The text file, and the tokens of a training sequence; 0 is the model's context, at most `LONGEST`."""

    path: Path
    length: int = 0


def compress(target: Target, text: OwnText, out: Path, resume: bool = False) -> None:
    """Apply the target's recipe to its model with the sequences of a text, and write the folder `out`.

    Raises:
        UserError: the text, the folder, the recipe or the model does not fit; what was trained so far is kept.
    """
    scale, steps = target.scale, on_device(target.recipe.steps, target.scale.device)
    if not any(step.calibrated for step in steps):
        raise UserError(f"recipe {target.recipe.name!r} takes no text; leave --text out")
    if named := [step.second_text for step in steps if step.second_text]:
        raise UserError(f"recipe {target.recipe.name!r} reads {named[0]}, too; --text is its only text, leave that out")
    folder = models.folder(target.model)
    name = target.model if folder is None else folder.name if folder.parent == models.POCKET else str(folder)
    context = getattr(training_cost.configuration(name, scale.hub), "max_position_embeddings", None) or LONGEST
    length = text.length or min(LONGEST, context)
    if length > context:
        raise UserError(f"--length {length}: longer than the model's context of {context}")
    ids = training_sequences(
        token_ids(text.path, name, scale.hub), steps, scale.calibration.sequences, length, f"--text {text.path}"
    )
    declared = {
        "model": name, "fingerprint": models.fingerprint(name), "recipe": target.recipe.name, "seed": target.seed,
        "text": sha256(text.path), "length": length, "device": scale.device, "dtype": scale.dtype,
        "threads": scale.threads,
    }  # fmt: skip
    if check_folder(out, declared, resume):
        return
    torch.set_num_threads(scale.threads)
    lm = LowBitModel(models.load(name, scale.device, scale.dtype, scale.hub))
    perplexity.check_context(lm.model, length)
    size = getattr(torch, scale.dtype).itemsize
    cost = training_cost.estimate(steps, training_cost.shape(name, scale.hub), *ids.shape, size, scale.device)
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() if scale.device == "cuda" else None
    print(report(cost, cost.token_blocks * block_seconds(lm.model, steps, ids), free), flush=True)
    with making(out / BEGUN):
        (out / WORK).mkdir(parents=True, exist_ok=True)
    write_text(out / BEGUN, json.dumps(declared, indent=1) + "\n")
    try:
        with built_under(out / WORK):
            facts = _apply(lm, steps, ids, scale.calibration.sequences, out / WORK)
    except BaseException as error:
        if not any(path.is_file() for path in (out / WORK).rglob("*")):
            _remove_begun(out)  # nothing to go on from
        elif isinstance(error, KeyboardInterrupt):
            print(f"{out}: --resume goes on from the last trained block", file=sys.stderr)
        if isinstance(error, torch.OutOfMemoryError):
            said = str(error).partition("\n")[0]
            raise UserError(f"{said}; place=host in the recipe keeps hidden states in host memory") from None
        raise
    lm.save(out / WEIGHTS, {key: str(declared[key]) for key in ("model", "fingerprint", "recipe")})
    counted = bits.report(lm, float_bits=16)
    facts |= {"bits per block weight": counted["bpw"], "bytes": counted["bytes"]}
    facts |= {"digest": sha256(out / WEIGHTS)[: load.DIGITS], "commit": provenance.commit()}
    facts["environment"] = json.loads(provenance.environment())
    if computed := computed_in(steps, scale.device):
        facts["environment"]["compute"] = computed
    write_text(out / FACTS, json.dumps(declared | facts, indent=1) + "\n")
    (out / BEGUN).unlink()
    shutil.rmtree(out / WORK)
    saw = sum(step["tokens"] for step in facts["steps"])
    print(f"{counted['bytes']:,} bytes, {counted['bpw']:.3f} bits a block weight, {saw:,.0f} tokens of training")


def _remove_begun(out: Path) -> None:
    """Remove what an interrupted run made in its folder, and the folder where nothing else lies in it."""
    (out / BEGUN).unlink(missing_ok=True)
    shutil.rmtree(out / WORK, ignore_errors=True)
    with contextlib.suppress(OSError):  # not empty: what else lies there stays
        out.rmdir()


def _apply(lm: LowBitModel, steps: tuple[Step, ...], ids: Tensor, sequences: int, work: Path) -> dict[str, Any]:
    """Apply the steps to `lm`, or those that an interrupted run left; what each says of its training, and seconds."""
    path, said, seconds = work / "steps.safetensors", [], 0.0
    if path.is_file():
        kept = json.loads(lm.load(path, keep_full=True)["kept"])
        said, seconds = kept["steps"], kept["seconds"]
    for number, step in enumerate(steps[len(said) :], start=len(said) + 1):
        started = time.perf_counter()
        count = needed(step, sequences, ids.shape[1])
        step.module.apply(lm, ids[:count] if step.calibrated else None, step.config)
        own = {name: lm.facts.pop(f"training/{name}", []) for name in ("tokens", "loss", "end-to-end loss")}
        loss = own["loss"] or own["end-to-end loss"]
        said.append({"step": step.name, "tokens": sum(own["tokens"]), "loss": loss})
        seconds += time.perf_counter() - started
        if number < len(steps) and not any(done.rescales for done in steps[:number]):
            lm.save(path, {"kept": json.dumps({"steps": said, "seconds": seconds})})
    return {"steps": said, "seconds": seconds, **lm.facts}
