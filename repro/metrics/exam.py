"""Accuracy on some items of one task, by given answers or by generated text (Bit-by-Bit, Table 5).

MathQA and MMLU are scored by log likelihoods, as those of `zeroshot` are; GSM8K and IFEval by what greedy decoding
gives (`repro/engine`; by Transformers where something is attached to layers, such as quantized inputs, which the engine
does not run). All recipes answer the same items, the first of each task, of MMLU evenly from its subjects.

Full precision is scored first. Where it is at chance nothing can be lost, and other recipes are `at_chance` without
being run; chance is the task's, or what the answers get when each is judged by the next item's question.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from repro import models
from repro.core.errors import NotMeasurable, UserError, unknown
from repro.data import generated, tasks
from repro.engine import weights
from repro.engine.core import MOST, Core
from repro.jobs import compress, questions, requests
from repro.jobs.target import Target
from repro.metrics.accuracy import Accuracy, scored
from repro.models.lowbit import LowBitModel
from repro.store import observations
from repro.store.job import Job, make
from repro.store.observations import Observations, Series

CHOSEN = ("mathqa-4", "mmlu")  # tasks with given answers
CONTEXT = 2048  # the most that a prompt and its answer take
LOOKED_AT = 16  # tokens between two looks for the end of all answers


@dataclass(frozen=True)
class Protocol:
    """`items` of each task; `tokens` in a forward pass of those with given answers, `together` answers are decoded."""

    items: int = 200
    tokens: int = 65536
    together: int = 32

    def __post_init__(self) -> None:
        for name, least, most in (("items", 2, 10**6), ("tokens", 1, 2**31), ("together", 1, MOST)):
            if not least <= getattr(self, name) <= most:
                raise UserError(f"{name} is {getattr(self, name)}; it must be {least} to {most:,}")


@dataclass(frozen=True)
class Exam(Accuracy):
    """Which task; a fraction."""

    VERSION = 1
    FULL_FIRST = True  # other recipes are run only where full precision is above chance
    PROTOCOL = Protocol

    task: str
    unit: str = "fraction"

    def __post_init__(self) -> None:
        if self.task not in (known := (*CHOSEN, *generated.GENERATED)):
            raise unknown("task of an exam", self.task, known)

    @staticmethod
    def brief(protocol: Protocol, least: Any) -> Protocol:
        """The protocol of a build's own measurement: the first items."""
        return replace(protocol, items=min(protocol.items, least.items))

    def lacking(self) -> str:
        """Why the task cannot be scored here; empty if it can."""
        return "" if self.task in CHOSEN else generated.lacking(self.task)

    def jobs(self, target: Target) -> dict[str, Job] | None:
        """One job scores one task; None where the scale has no protocol."""
        protocol = target.scale.protocols["exam"]
        if protocol is None:
            return None
        rule = vars(protocol) | {"task": self.task}
        if self.task in CHOSEN:
            identifier = tasks.identifier(self.task)
            needs = {"requests": requests.job(target, self.task, protocol.items)}
        else:
            identifier = generated.GENERATED[self.task].identifier
            needs = {"questions": questions.job(target, self.task, protocol.items)}
        inputs = target.inputs() | rule | {"task": identifier}
        inputs["calibration"] = compress.job(target).parsed_inputs().get("calibration")
        if target.recipe.steps:
            needs["weights"] = compress.job(target)
        return {"items": make("exam", target.label, inputs, target.options() | rule, needs, target.steps)}

    @staticmethod
    def run(job: Job, folders: Mapping[str, Path], folder: Path, origin: dict[str, str]) -> None:
        """Score the items: 1 where one is answered correctly; of generated answers also what chance gives.

        Raises:
            UserError: damaged inputs, an answer beyond the context, NaN in the logits, or a model that cannot be
                decoded.
        """
        options = job.parsed_options()
        if "requests" in folders:
            lm = compress.load(options, folders.get("weights"))
            series = scored(lm, folders["requests"], options["task"], options["items"], options["tokens"])
        else:
            task = generated.load(folders["questions"] / questions.OUTPUTS[0])
            lm = compress.load(options | {"device": "cpu"}, folders.get("weights"))
            texts = list(answers(lm, task, options))
            graded = dict(zip(("correct", "chance"), generated.graded(options["task"], texts, task.items)))
            label = f"lm-eval {task.meta['harness']} n{options['items']}: {options['task']}"
            series = {f"{options['task']}/{name}": Series(values, "items", label) for name, values in graded.items()}
        observations.save(folder / observations.FILE, series, origin)

    def series(self, observed: Mapping[str, Observations], target: Target) -> dict[str, Series]:
        """The items, and what chance gives where it was measured."""
        return dict(observed["items"].series)

    def status(self, full: Mapping[str, Series]) -> str:
        """`at_chance` where full precision itself is less than 3 standard errors above chance, else `ok`."""
        if (dealt := full.get(f"{self.task}/chance")) is None:
            return super().status(full)
        right = full[f"{self.task}/correct"].values
        error = np.sqrt(max(share * (1 - share) for share in (right.mean(), dealt.values.mean())) / len(right))
        return "ok" if right.mean() - dealt.values.mean() > 3 * error else "at_chance"

    @property
    def reference(self) -> bool:
        """One recipe's accuracy compares with nothing, though it may have two series."""
        return False


def answers(lm: LowBitModel, task: generated.Questions, options: Mapping[str, Any]) -> Iterator[str]:
    """The greedy answer to each question, up to a stop string; prompts are cut from the left to fit, as in lm-eval.

    Args:
        lm: the model on the CPU.
        task: the questions.
        options: `model`, `hub`, `device`, `dtype`, `task`, and how many are decoded `together`.

    Raises:
        UserError: a model that cannot be decoded, or NaN in its logits; `NotMeasurable` for a context without room.
    """
    new = generated.GENERATED[options["task"]].new_tokens
    context = min(CONTEXT, context_of(lm))
    if new >= context:
        raise NotMeasurable("too_long", f"answers of {new} tokens do not fit a context of {context}")
    prompts = [ids[-(context - new) :].tolist() for ids in task.prompts]
    device = torch.device(options["device"])
    dtype = getattr(torch, options["dtype"])
    stop = task.stop
    if lm.attachments:
        model = lm.model.to(device, dtype)
        tokenizer = models.tokenizer(options["model"], options["hub"])
        decode = partial(greedy, model, tokenizer, new, stop)
    else:
        size = weights.check(options["model"], lm.model.config, context)
        core = Core(options["model"], weights.decoder(lm, size, device, dtype), options["hub"])
        decode = partial(core.generate, max_new_tokens=new, stop=stop)
    for start in range(0, len(prompts), options["together"]):
        for text in decode(prompts[start : start + options["together"]]):
            yield before(str(text), stop)


@torch.inference_mode()
def greedy(
    model: nn.Module, tokenizer: Any, new: int, stop: Sequence[str], prompts: Sequence[Sequence[int]]
) -> list[str]:
    """The greedy answers of a model in Transformers' form to prompts, padded on the left; none past `new` tokens.

    Raises:
        UserError: NaN or Inf in its logits.
    """
    device = model.device
    ends = _ends(model)
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    sizes = torch.tensor([len(prompt) for prompt in prompts], device=device)
    mask = (torch.arange(width, device=device) >= width - sizes[:, None]).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = None
    generated_ids = torch.empty(len(prompts), 0, dtype=torch.long)
    model.eval()
    for step in range(new):
        words = {"attention_mask": mask, "position_ids": positions, "past_key_values": cache, "use_cache": True}
        out = model(input_ids=ids, logits_to_keep=1, **words)
        logits = out.logits[:, -1]
        cache = out.past_key_values
        if not torch.isfinite(logits).all():
            raise UserError("the model's logits hold NaN or Inf; the model's weights or its scales are broken")
        ids = logits.argmax(1, keepdim=True)
        generated_ids = torch.cat([generated_ids, ids.cpu()], 1)
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        positions = positions[:, -1:] + 1
        if step % LOOKED_AT == LOOKED_AT - 1 and all(
            _ended(row, tokenizer, ends, stop) for row in generated_ids.tolist()
        ):
            break
    return [_text(row, tokenizer, ends) for row in generated_ids.tolist()]


def _ends(model: nn.Module) -> set[int]:
    """The ids that end a text, by the model's configuration."""
    ends = model.config.eos_token_id
    return {ends} if isinstance(ends, int) else set(ends or ())


def _text(row: Sequence[int], tokenizer: Any, ends: set[int]) -> str:
    """The text of ids, up to the first that ends a text."""
    cut = next((end for end, token in enumerate(row) if token in ends), len(row))
    return tokenizer.decode(row[:cut], skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _ended(row: Sequence[int], tokenizer: Any, ends: set[int], stop: Sequence[str]) -> bool:
    text = _text(row, tokenizer, ends)
    return bool(ends & set(row)) or any(stop_text in text for stop_text in stop)


def context_of(lm: LowBitModel) -> int:
    """The context of a model; `CONTEXT` where its configuration does not say it."""
    return getattr(lm.model.config, "max_position_embeddings", None) or CONTEXT


def before(text: str, stop: Sequence[str]) -> str:
    """A text up to the first stop string in it."""
    return text[: min((text.find(stop_text) for stop_text in stop if stop_text in text), default=len(text))]
