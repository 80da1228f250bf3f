"""Text generated while layers go to fewer bits (FlexQuant, Tables 1 and 2): what it costs, and when it happened.

A schedule decodes prompts greedily, each with its own switching state. For every prompt, the job stores how far the
text agrees with that of full precision (ROUGE-L, common tokens at the start), the KL divergence from full precision
token by token along full precision's own text, the mean bits of both runs, and the log of switches.

Controls have, prompt by prompt, the mean bits of the schedule that they are compared with. `uniform` spreads the same
moves evenly over the text, `random_times` takes as many random times, and `other_order` makes the moves in another
order at the paper's times, stretched to give the same bits. The order `oracle` sorts moves by what each alone changes
in the predictions along full precision's texts, for the prompts that are decoded together. A threshold may be a
quantile of full precision's window means on validation prompts, which are not among the measured ones.

`learned` and `static` are PMPD's: all layers switch at one of four points of the text. For `learned`, a trained
scheduler chooses the point of each prompt. For `static`, a search chooses one for the whole set: the point whose texts
of validation prompts score best, and of equal scores the earliest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from repro import models
from repro.core.errors import UserError, at_least
from repro.data import prompts as sets
from repro.data import text_scores
from repro.engine import copies, head_files, pmpd, weights
from repro.engine.core import MOST
from repro.engine.precision import SwitchingCore
from repro.engine.prefill import together
from repro.engine.step import Cache, Decoder
from repro.jobs import compress
from repro.jobs.target import Target
from repro.methods.flexquant import schedule as plan
from repro.methods.flexquant.config import Config
from repro.methods.flexquant.schedule import Rule, Switch
from repro.metrics.metric import Metric
from repro.models.lowbit import LowBitModel
from repro.papers.cell import Cell
from repro.recipes import precision_schedules, recipe
from repro.store import observations
from repro.store.job import Job, make
from repro.store.observations import Observations, Series

STOPS = {"cnn-dm": "\n\n", "dialogsum": "\n", "iwslt": "\n"}  # what ends an answer of a base model
COUNTED = 50  # the number of prompts that jobs do not declare: that of results from before it was declared
WINDOW = 20  # tokens of the moving mean in a figure (section 4.4)
REPEATED = 8  # tokens of a repetition
RESAMPLED = "sequences"  # axis of a series by prompt, whose interval is a paired bootstrap over prompts
CURVES = ("PPLE", "PPLE spread", "gap", "gap spread", "repeated by token")
COMPARED = ("agreement", "prefix", "KL")  # are themselves comparisons with full precision
TASK = ("rougeL", "bleu", "similarity")  # with the references of the prompt set
PMPD = ("learned", "static")  # controls that replace the schedule's own rule, and need no run of it
SEARCHED = {"iwslt": "bleu"}  # set to the score that a static point is searched by; otherwise ROUGE-L, as in PMPD


@dataclass(frozen=True)
class Protocol:
    """How many prompts are decoded, and how long.

    Attributes:
        prompts: of a set; all that it has if these are fewer.
        new_tokens: at most, for each prompt.
        context: tokens of prompt and text.
        short: new tokens, at most, of a summary or translation (PMPD: 255).
        validation: further prompts of the set, on which thresholds are chosen.
        searched: further prompts, on which PMPD's static point is searched.
        together: prompts that are decoded in one batch.
    """

    prompts: int = 50
    new_tokens: int = 1900
    context: int = 2048
    validation: int = 10
    together: int = MOST
    short: int = 256
    searched: int = 50

    def __post_init__(self) -> None:
        at_least(self, prompts=2, new_tokens=2, context=4, validation=1, together=1, searched=1)
        if self.together > MOST:
            raise UserError(f"together is {self.together}; at most {MOST} are decoded together")
        if self.new_tokens >= self.context:
            raise UserError(f"new_tokens is {self.new_tokens}; a context of {self.context} has room for fewer")
        if self.short < 2:
            raise UserError(f"short is {self.short}; it must be 2 or more")

    def tokens_of(self, prompts: str) -> int:
        """The most new tokens of a set's texts."""
        return min(self.new_tokens, self.short) if prompts in STOPS else self.new_tokens


@dataclass(frozen=True)
class Switching(Metric):
    """A number of texts under a schedule.

    Attributes:
        show: `agreement` is ROUGE-L with the text of full precision, `prefix` the share in percent of its tokens that
            the text begins with, `KL` nats a token along it; `bits` are the mean bits of a weight over the decode
            steps, `bits with prefill` with the prefill as one step more, `bits along` those of the run that KL is of;
            `switches` counts layers; `threshold` is the one that decided; `rougeL` and `bleu` are of the references;
            `similarity` to them is what BERTScore computes, from full precision's own last hidden states;
            `repeated` is the share in percent of tokens that end eight which the text had before. For a figure, by
            token: the mean over prompts of the window's mean `PPLE`, or of the `gap` between the two most likely tokens
            along full precision's text, and their standard deviations (`spread`); `repeated by token` is the share of
            prompts in percent whose token there is one that `repeated` counts.
        prompts: a prompt set.
        schedule: such as `flexquant(threshold=2.0)`; empty is the recipe from the first token to the last.
        quantile: of full precision's window means on validation prompts, to be the threshold; 0 disables it.
        control: a schedule of the same mean bits that ignores the signal; or PMPD's `learned` or `static`.
    """

    VERSION = 1
    PROTOCOL = Protocol

    show: Literal[
        "agreement",
        "prefix",
        "KL",
        "bits",
        "bits with prefill",
        "bits along",
        "switches",
        "threshold",
        "rougeL",
        "bleu",
        "similarity",
        "repeated",
        "PPLE",
        "PPLE spread",
        "gap",
        "gap spread",
        "repeated by token",
    ]
    prompts: str = "longwriter-en"
    schedule: str = ""
    quantile: float = 0.0
    control: Literal["", "uniform", "random_times", "other_order", "learned", "static"] = ""
    unit: str = ""

    def __post_init__(self) -> None:
        config = precision_schedules.read(self.schedule) if self.schedule else None
        if (self.control or self.quantile) and config is None:
            raise UserError("switching: a control or a quantile belongs to a schedule, such as flexquant")
        if not 0 <= self.quantile < 1:
            raise UserError(
                f"switching: quantile is {self.quantile}; it must be a share above 0 and below 1, or 0 for none"
            )
        if self.quantile and config and config.threshold is not None:
            raise UserError("switching: a quantile sets the threshold; leave threshold out of the schedule")
        if self.control in PMPD and (config.window or config.interval or len(config.path) > 2):
            example = "such as flexquant(path=[4, 3], window=0)"
            raise UserError(f"switching: {self.control} takes two widths and no window, {example}")
        if config and config.copies == "host":
            raise UserError("switching: prompts are decoded together, each in its own state; leave copies=host out")
        if self.prompts not in sets.SETS:
            raise UserError(f"switching: {sets.unknown('prompt set', self.prompts, sets.SETS)}")

    def lacking(self) -> str:
        """Why it cannot be measured here; empty if it can."""
        return text_scores.lacking("rougeL") or text_scores.lacking(self.show) or sets.lacking(self.prompts)

    def jobs(self, target: Target) -> dict[str, Job] | None:
        """One job generates under a schedule; it needs the copies, and full precision's text on the same prompts."""
        if target.scale.protocols["switching"] is None:
            return None
        if self.control == "learned" and target.recipe.steps:
            if not _scheduler(target.model, self.schedule).is_file():
                return None
        return {"texts": _job(self, target)}

    @staticmethod
    def run(job: Job, folders: Mapping[str, Path], folder: Path, origin: dict[str, str]) -> None:
        """Generate every prompt's text, and score it.

        Raises:
            UserError: damaged inputs, a prompt set that is not here, logits that are not finite; `NotMeasurable` for a
                context that the model does not have.
        """
        options = job.parsed_options()
        if "scheduler" in job.parsed_inputs():
            path = _scheduler(options["model"], options["schedule"])
            head_files.check(path, "PMPD scheduler", job.parsed_inputs()["scheduler"])
        tokenizer = models.tokenizer(options["model"], options["hub"])
        prompts = _prompts(options)
        ids = [_cut(tokenizer(prompt.text)["input_ids"], options) for prompt in prompts]
        engine, full, extra_bits = _engine(options, folders)
        recorded = {}
        for role in folders.keys() & {"full", "signal"}:
            recorded[role] = observations.load(folders[role] / observations.FILE).series
        split = "validation" if options["validating"] else "test"
        group = f"{options['set']} {split} n{len(ids)} to {options['new_tokens']}"
        options["point"] = None
        by_point = {}
        if options.get("control") == "static":
            options["point"], by_point = _searched(engine, options, tokenizer)
        rows = []
        for numbers in _batches(len(ids), options["together"]):
            rows += _together(engine, full, options, numbers, ids, recorded)
        series = _logged(rows) | by_point
        for row, prompt in zip(rows, prompts):
            text, reference = (answer(tokenizer, row[name], options["set"]) for name in ("tokens", "reference"))
            row["agreement"] = text_scores.rouge_l(text, [reference])
            row["prefix"] = 100 * text_scores.common_prefix(row["tokens"], row["reference"]) / len(row["reference"])
            row["repeated"] = 100 * float(np.mean(repeated(row["tokens"])))
            for name in ("bits", "bits along", "bits with prefill"):
                row[name] += extra_bits
            if prompt.references:
                row |= _task_scores(text, prompt.references)
                row["similarity"] = _similarity(full, tokenizer, text, prompt.references)
        numbers = [name for name, value in rows[0].items() if isinstance(value, float)]
        for name in numbers:
            series[name] = Series(np.asarray([row[name] for row in rows]), RESAMPLED, group)
        observations.save(folder / observations.FILE, series, origin)

    def series(self, observed: Mapping[str, Observations], target: Target) -> dict[str, Series]:
        """The prompts' numbers; none of the references where the set has none."""
        recorded = observed["texts"].series
        if self.show in CURVES:
            name, _, part = self.show.partition(" ")
            return {self.show: Series(_curve(recorded, name, spread=part == "spread"), "tokens")}
        names = [self.show] if self.show in recorded else []
        if self.show == "bleu":
            names = [name for name in recorded if name.startswith("bleu ")]
        return {name: Series(recorded[name].values, RESAMPLED, recorded[name].group) for name in names}

    def value(self, mean: Mapping[str, Any]) -> Any:
        """The mean over prompts; BLEU of all of them together."""
        return _task_score(mean, self.show)

    @property
    def reference(self) -> bool:
        """Agreement and divergence compare with full precision by themselves."""
        return self.show in COMPARED

    @property
    def itself(self) -> float | None:
        """Full precision agrees with itself."""
        return {"agreement": 100.0, "prefix": 100.0, "KL": 0.0}.get(self.show)

    @staticmethod
    def fewest_bits(cell: Cell, peers: Sequence[Cell]) -> Cell | None:
        """The cell of another row, without a schedule, of the fewest bits, which full precision must beat on tasks."""
        return fewest_bits(cell, peers) if cell.params.show in TASK else None

    @property
    def against(self) -> str:
        """Scores of texts are read as a difference to full precision."""
        return "q - f" if self.show in TASK else ""

    @property
    def limits(self) -> tuple[float, float]:
        """A score is 0 to 100, all else 0 or more."""
        shares = ("agreement", "prefix", "repeated", "repeated by token", *TASK)
        return (0.0, 100.0) if self.show in shares else (0.0, np.inf)


def fewest_bits(cell: Cell, peers: Sequence[Cell]) -> Cell | None:
    """The cell without a schedule that has the fewest bits; None if there is none."""
    static = [peer for peer in peers if peer.measure == cell.measure and peer.recipe and not peer.params.schedule]
    quantized = [peer for peer in static if recipe.parse(peer.recipe).steps]
    return min(quantized, key=lambda peer: recipe.parse(peer.recipe).steps[0].config.bits, default=None)


def tested(prompts: str, protocol: Protocol) -> list[sets.Prompt]:
    """The prompts of a set that are measured, in the order of a job's results."""
    return _prompts(asdict(protocol) | {"set": prompts, "validating": False})


def answer(tokenizer: Any, tokens: Sequence[int], prompts: str) -> str:
    """The text of tokens, up to the stop string of a prompt set."""
    text = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text.partition(STOPS[prompts])[0] if prompts in STOPS else text


def _scheduler(model: str, schedule: str) -> Path:
    """The file of the trained scheduler of a model between the two widths of a schedule."""
    return pmpd.path_of(model, *precision_schedules.read(schedule).path)


def _job(params: Switching, target: Target, validating: bool = False) -> Job:
    protocol = target.scale.protocols["switching"]
    calibration = {}
    plain = not target.recipe.steps
    schedule = "" if plain else params.schedule
    config = precision_schedules.read(schedule) if schedule else None
    needs = {} if plain else {"full": _job(params, target.under("fp16"))}
    if config:
        widths = config.path
    else:
        widths = [16 if plain else target.recipe.steps[0].config.bits]
    for bits in filter(lambda bits: bits < 16, widths):
        compressed = compress.job(target.under(precision_schedules.recipe_at(target.text, bits)))
        needs[f"w{bits}"] = compressed
        calibration = compressed.parsed_inputs().get("calibration")
    rule: dict[str, Any] = asdict(protocol) | {"validating": validating}
    if config:
        rule |= {"quantile": params.quantile, "control": params.control}
        if params.quantile:
            needs["validation"] = _job(params, target.under("fp16"), validating=True)
        if params.control and params.control not in PMPD:
            needs["signal"] = _job(replace(params, control="", schedule=_in_the_papers_order(params.schedule)), target)
            rule["seed"] = target.seed
        if params.control == "static":
            rule["validation"] = protocol.searched
    rule["new_tokens"] = protocol.tokens_of(params.prompts)
    for name in ("together", "short", "searched"):  # the first decides no number, but for the order of sums
        del rule[name]
    inputs = target.inputs() | rule | {"prompts": sets.identifier(params.prompts)}
    if protocol.prompts != COUNTED:
        inputs["count"] = protocol.prompts
    inputs |= {"calibration": calibration, "schedule": _declared(config) if config else None}
    if config and params.control == "learned":
        inputs["scheduler"] = head_files.identity(_scheduler(target.model, schedule))
    options = target.options() | rule | {"set": params.prompts, "schedule": schedule, "together": protocol.together}
    return make("switching", target.label, inputs, options, needs, target.steps)


def _declared(config: Config) -> dict[str, Any]:
    """The configuration of a schedule as a job declares it, without `copies`, which does not change the texts."""
    declared = asdict(config)
    del declared["copies"]
    return declared


def _in_the_papers_order(schedule: str) -> str:
    """The schedule that a control is compared with: the same with layers in the paper's order."""
    return precision_schedules.write(replace(precision_schedules.read(schedule), order="kl", seed=0))


# --- running ----------------------------------------------------------------------------------------------------------


def _prompts(options: Mapping[str, Any]) -> list[sets.Prompt]:
    """The prompts that are measured; or, for validation, those that follow them in the same shuffle."""
    every = sets.load(options["set"], len(sets.rows(options["set"])))
    last = min(options["prompts"], len(every) - options["validation"])
    return every[last : last + options["validation"]] if options["validating"] else every[:last]


def _task_scores(text: str, references: Sequence[str]) -> dict[str, float]:
    """ROUGE-L of a text, and the counts that BLEU sums over all texts."""
    counts = text_scores.bleu_counts(text, references)
    return {"rougeL": text_scores.rouge_l(text, references)} | {f"bleu {name}": count for name, count in counts.items()}


def _similarity(full: Decoder, tokenizer: Any, text: str, references: Sequence[str]) -> float:
    """The best F1 of greedy matching with a reference, by the last hidden states of the model in full precision."""
    states = []
    for candidate in (text, *references):
        ids = tokenizer(candidate)["input_ids"][: len(full.cos)]
        hidden = together(full, Cache(full, 1), [ids])[0] if ids else full.embedding[:0]
        states.append(hidden.float().cpu().numpy())
    return max(text_scores.matched_f1(states[0], reference) for reference in states[1:])


def repeated(tokens: Sequence[int]) -> list[bool]:
    """Whether each token of a text ends a run of `REPEATED` tokens that occurred before."""
    grams_so_far = set()
    ends_in_repeat = [False] * len(tokens)
    for end in range(REPEATED, len(tokens) + 1):
        run_of_tokens = tuple(tokens[end - REPEATED : end])
        ends_in_repeat[end - 1] = run_of_tokens in grams_so_far
        grams_so_far.add(run_of_tokens)
    return ends_in_repeat


def _cut(ids: Sequence[int], options: Mapping[str, Any]) -> list[int]:
    """A prompt, cut from the left so that the new tokens fit into the context."""
    return list(ids[-(options["context"] - options["new_tokens"]) :])


def _engine(options: Mapping[str, Any], folders: Mapping[str, Path]) -> tuple[SwitchingCore, Decoder, float]:
    """The engine of a schedule or one width, full precision's decoder, and bits per weight besides the codes (DNS)."""
    on_cpu = dict(options) | {"device": "cpu"}
    device = torch.device(options["device"])
    dtype = getattr(torch, options["dtype"])
    model_of: dict[int, LowBitModel] = {16: compress.load(on_cpu, None)}
    model_of |= {int(role[1:]): compress.load(on_cpu, folders[role]) for role in folders if role[0] == "w"}
    context = weights.check(options["model"], model_of[16].model.config, options["context"])
    full = weights.decoder(model_of[16], context, device, dtype)
    if options["schedule"]:
        config = precision_schedules.read(options["schedule"])
        if options["quantile"]:
            config = replace(config, threshold=_threshold(folders["validation"], config, options["quantile"]))
        by_bits = {bits: model_of[bits] for bits in config.path}
        facts = (config, context, device, dtype, None, options["hub"], model_of[16])
        engine = SwitchingCore.of(options["model"], by_bits, *facts)
        return engine, full, 0.0
    bits = min(model_of)
    decoder = full if bits == 16 else weights.decoder(model_of[bits], context, device, dtype)
    static = SwitchingCore(options["model"], copies.joined({bits: decoder}, False), Config(), [], options["hub"])
    extra_bits = sum(model_of[bits].extra_bits.values()) / sum(static.weights.values())
    return static, full, extra_bits


def _threshold(folder: Path, config: Config, quantile: float) -> float:
    """A quantile of the means of every window of full precision's signal on the validation prompts.

    Raises:
        UserError: no prompt's text is as long as a window.
    """
    recorded = observations.load(folder / observations.FILE).series
    means = []
    for name, series in recorded.items():
        signal = series.values[1:]  # token 0 is the prefill's
        if name.startswith("PPLE ") and len(signal) >= config.window:
            means.append(np.convolve(signal, np.ones(config.window) / config.window, "valid"))
    if not means:
        raise UserError(f"a window of {config.window} tokens is longer than every validation text; take a shorter one")
    return max(1.0, float(np.quantile(np.concatenate(means), quantile)))


def _together(
    engine: SwitchingCore,
    full: Decoder,
    options: Mapping[str, Any],
    numbers: Sequence[int],
    ids: Sequence[Sequence[int]],
    recorded: Mapping[str, Mapping[str, Series]],
) -> list[dict[str, Any]]:
    """Decode prompts in one batch; for each a mapping of what is stored of it."""
    prompts = [ids[i] for i in numbers]
    signal = recorded.get("signal")
    references = []
    if "full" in recorded:
        references = [list(map(int, recorded["full"][f"tokens {i}"].values)) for i in numbers]
    if engine.config.order == "oracle":
        engine.foresee(prompts, references, full)
    engine.rule = _rules(engine, options, numbers, signal, "") if signal else None
    if options.get("control") == "learned":
        engine.rule = _learned(engine, options, prompts)
    if options.get("point") is not None:
        engine.rule = pmpd.rule_of(options["point"])
    texts = [
        text.tokens for text in engine.generate(prompts, options["new_tokens"], stop=STOPS.get(options["set"], ()))
    ]
    free = engine.switching
    references = references or texts
    if signal:
        engine.rule = _rules(engine, options, numbers, signal, "along ")
    along = engine.forced(prompts, references, full)
    rows = []
    for i, number in enumerate(numbers):
        row: dict[str, Any] = {"number": number, "tokens": texts[i], "reference": references[i], "kl": along.kl[i]}
        row |= {"gap": along.gap[i], "PPLE": free.signal[i], "log": free.logs[i], "along log": along.switching.logs[i]}
        row |= {"KL": float(np.mean(along.kl[i])), "bits": free.bits[i], "bits along": along.switching.bits[i]}
        row |= {"bits with prefill": free.bits_with_prefill[i], "switches": float(len(free.logs[i]))}
        threshold = free.thresholds[i] if options["schedule"] else 1.0  # which no PPLE is below
        rows.append(row | {"threshold": float(threshold)})
    return rows


def _learned(engine: SwitchingCore, options: Mapping[str, Any], prompts: Sequence[Sequence[int]]) -> list[Rule]:
    """PMPD's rule for each prompt."""
    size = engine.model.cos.shape[1]
    path = _scheduler(options["model"], options["schedule"])
    scheduler = pmpd.load(path, size, models.fingerprint(options["model"]))
    return [pmpd.rule_of(point) for point in pmpd.chosen(scheduler, engine.model, prompts)]


def _searched(engine: SwitchingCore, options: Mapping[str, Any], tokenizer: Any) -> tuple[int, dict[str, Series]]:
    """PMPD's static point of a set, and the score of each point's texts on validation prompts.

    Raises:
        UserError: the set has no references to score with.
    """
    prompts = _prompts(options | {"validating": True})
    if not all(prompt.references for prompt in prompts):
        raise UserError(
            f"switching: static is searched by a score, and {options['set']} has no references; leave it out"
        )
    score = SEARCHED.get(options["set"], "rougeL")
    scores = [_score_of_point(engine, options, tokenizer, prompts, point, score) for point in pmpd.POINTS]
    best = int(np.argmax(scores))  # of equal scores the first
    return pmpd.POINTS[best], {f"{score} by point": Series(np.asarray(scores), "points")}


def _score_of_point(
    engine: SwitchingCore,
    options: Mapping[str, Any],
    tokenizer: Any,
    prompts: Sequence[sets.Prompt],
    point: int,
    score: str,
) -> float:
    """ROUGE-L or BLEU of the texts whose layers all switch after `point` tokens."""
    ids = [_cut(tokenizer(prompt.text)["input_ids"], options) for prompt in prompts]
    engine.rule = pmpd.rule_of(point)
    texts = []
    for numbers in _batches(len(ids), options["together"]):
        texts += engine.generate([ids[i] for i in numbers], options["new_tokens"], stop=STOPS.get(options["set"], ()))
    scored = [
        _task_scores(answer(tokenizer, text.tokens, options["set"]), prompt.references)
        for text, prompt in zip(texts, prompts)
    ]
    means = {}
    for name in scored[0]:
        means[name] = float(np.mean([of_prompt[name] for of_prompt in scored]))
    return _task_score(means, score)


def _task_score(mean: Mapping[str, Any], score: str) -> Any:
    """A score from the means over prompts; BLEU of all texts together."""
    if score == "bleu":
        counts = {name.removeprefix("bleu "): count for name, count in mean.items() if name.startswith("bleu ")}
        return text_scores.bleu(counts)
    return mean[score]


def _batches(count: int, together: int) -> list[range]:
    """The numbers of the prompts that are decoded together."""
    return [range(start, min(start + together, count)) for start in range(0, count, together)]


def _rules(
    engine: SwitchingCore, options: Mapping[str, Any], numbers: Sequence[int], signal: Mapping[str, Series], which: str
) -> list[Rule]:
    """A control's rule for each prompt: switches at steps that give the mean bits of the schedule's own run."""
    rules = []
    for number in numbers:
        times = signal[f"{which}log {number}"].values if f"{which}log {number}" in signal else ()
        target = signal["bits along" if which else "bits"].values[number]
        length = len(signal[f"kl {number}" if which else f"tokens {number}"].values)
        seed = [options["seed"], number, int(bool(which))]
        steps = control_steps(options["control"], times, target, engine, max(length - 1, 1), seed)
        rules.append(plan.planned_rule(steps, engine.config.layers))
    return rules


def control_steps(
    control: str, times: Sequence[float], target: float, engine: SwitchingCore, steps: int, seed: int | Sequence[int]
) -> list[int]:
    """The steps at which a control switches, so that its mean bits are `target` as nearly as whole steps allow.

    Args:
        control: `uniform`, `random_times` or `other_order`.
        times: the step of each move of the schedule that it is compared with.
        target: the mean bits of that schedule.
        engine: whose moves are made in order, `config.layers` at a time.
        steps: decode steps of the text.
        seed: of random times.
    """
    if not len(times):
        return []
    layers = engine.config.layers
    switch_steps = [int(step) for step in times][::layers]
    most = -(-len(engine.ahead) // layers)

    def cost(steps_of_switches: Sequence[int]) -> float:
        switches = []
        for number, step in enumerate(steps_of_switches):
            moves = engine.ahead[number * layers : (number + 1) * layers]
            switches += [Switch(step, move.layer, move.bits) for move in moves]
        return plan.mean_bits(switches, engine.weights, engine.high, steps)

    if control == "uniform":
        return plan.matched(lambda every: plan.even_steps(most, every, steps), cost, target, 0.01, 2.0 * steps)
    if control == "random_times":
        return plan.matched(
            lambda power: plan.random_steps(len(switch_steps), power, steps, seed), cost, target, 1e-3, 1e3
        )
    return plan.matched(lambda factor: plan.stretched_steps(switch_steps, factor), cost, target, 0.1, 10.0)


def _logged(rows: Sequence[Mapping[str, Any]]) -> dict[str, Series]:
    """Tokens, signal, divergence and log of every prompt as series."""
    series = {}
    for row in rows:
        number = row["number"]
        for name in ("tokens", "PPLE", "kl", "gap"):
            series[f"{name} {number}"] = Series(np.asarray(row[name], dtype=float), "tokens")
        for name in ("log", "along log"):
            steps = [float(switch.step) for switch in row[name]]
            series[f"{name} {number}"] = Series(np.asarray(steps), "switches")
    return series


# --- what is shown ----------------------------------------------------------------------------------------------------


def _curve(recorded: Mapping[str, Series], name: str, spread: bool) -> np.ndarray:
    """For each token, the mean of window means over the prompts whose text is that long, or its standard deviation."""
    means = []
    of = "tokens" if name == "repeated" else name
    for key, series in recorded.items():
        if key.startswith(f"{of} ") and len(series.values) > WINDOW:
            values = 100 * np.asarray(repeated(series.values.tolist())) if name == "repeated" else series.values
            means.append(np.convolve(values[1:], np.ones(WINDOW) / WINDOW, "valid"))
    if not means:
        raise UserError(f"switching: no text has more than {WINDOW} tokens, a window")
    table = np.full((len(means), max(map(len, means))), np.nan)
    for row, series in zip(table, means):
        row[: len(series)] = series
    enough = np.isfinite(table).sum(0) > 1  # a spread takes two
    table = table[:, enough]
    return np.nanstd(table, axis=0, ddof=1) if spread else np.nanmean(table, axis=0)
