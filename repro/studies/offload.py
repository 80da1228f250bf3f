"""What offloading and speculation cost and give on a GPU: `python -m repro.studies.offload --out DIR`.

A measurement is one JSON file in DIR, written as soon as it is there; what is there already is not measured again.
Shapes have random weights: their times and bytes are real, their texts and acceptance lengths mean nothing.

    lossless-<dtype>    texts of 200 prompts (`--prompts`) with the paper's draft, of which blocks stream, against plain
                        decoding
    <shape>-sync        a step of the offloaded shape, each weight copied when it is needed
    <shape>-prefetch    the same, prefetching; the bus rate next to it
    <shape>-speculate   an iteration with the paper's tree: its draft passes, its verification, both together
    <shape>-step        a step of the draft's own format at one token, for the bar of a draft pass
    <shape>-whole       generations that accept as many tokens in each iteration as the stored acceptance record says,
                        against their calculated tokens a second: accepted tokens over the time of an iteration
    memory              memory by the driver's count over 1,000 tokens of a shape with its draft, whose iterations
                        accept 30 tokens, as the paper reports (1,000 iterations of one token would take six minutes)
    memory-plain        the same without a draft, of a shape of 1B within `LITTLE` (a step of 8B takes 0.17 s)
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from repro.core.errors import UserError
from repro.data import prompts
from repro.engine import budget, limits
from repro.engine.core import Core
from repro.engine.decoding import Sampling
from repro.engine.drafted import Drafted
from repro.engine.shapes import offloaded, set_prefetch, timed, traffic_of
from repro.engine.speculating import Speculating
from repro.engine.step import run_of
from repro.engine.step import step as one_step
from repro.engine.substitute import Loaded, decoders
from repro.engine.traffic import Use, bus_rate, used
from repro.generation.engine import DTYPES, Engine, compressed, configuration
from repro.generation.limited import Limited
from repro.jobs.target import Target
from repro.methods import subspec
from repro.results import measure
from repro.specs import scale as scales
from repro.store import provenance
from repro.studies.measurement_folder import MeasurementFolder
from repro.workflow.workflow import Workflow

MODEL, TOKENS = "pocket-10m", 64  # of the lossless texts
SETS = {"mt-bench": 40, "humaneval": 40, "gsm8k": 50, "aime24": 30, "math500": 40}  # prompts of each: 200
TIE = 1e-5  # logits this close are a tie, which is printed
FAR = 2.0  # a tree's pass is at most so many times as far from float32 as passes of one token
SHAPES = {  # with the context
    "llama8b": ("shape/Llama-3.1-8B", 1024),
    "qwen7b": ("shape/Qwen2.5-7B", 1024),
    "llama1b": ("shape/Llama-3.2-1B", 1024),
}
BIG = ("llama8b", "qwen7b")
MEMORY = "8GiB"
LITTLE = "2.5GiB"  # for 1B: a third of its blocks stay
DRAFT = subspec.Config()  # the paper's
WARM, TIMED = 3, 20  # iterations
RECORD = ("subspec", "1", "SubSpec [T=0, 8GB]", "MT-Bench tau", "Qwen2.5-7B-Instruct")  # of accepted lengths
WHOLE = 10  # prompts of the record that a whole run decodes
LONG, ACCEPTED, EVERY = 1000, 30, 8  # tokens of `memory`, of an iteration of it, and between two looks at the memory


def main(words: Sequence[str] | None = None) -> None:
    """Measure what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for the measurements")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="only measurements whose name contains one of these words"
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--memory", default=MEMORY, help="budget of the shapes")
    help_text = "prompts of the lossless texts, evenly of all sets; a CPU takes 10 in a minute or two"
    parser.add_argument("--prompts", type=int, default=sum(SETS.values()), help=help_text)
    args = parser.parse_args(words)
    if args.prompts < len(SETS):
        raise SystemExit(f"error: --prompts {args.prompts}: give one of each of {len(SETS)} sets at least")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("error: this machine has no CUDA device; run it on a GPU")
    failed = OffloadBench(args.out, torch.device(args.device), args.memory, args.only, args.prompts).run()
    if failed:
        raise SystemExit(f"error: not measured: {', '.join(failed)}")


class OffloadBench:
    """The measurements on one device."""

    def __init__(
        self, folder: Path, device: torch.device, memory: str, only: Sequence[str], prompts: int | None = None
    ) -> None:
        self.device = device
        self.memory = memory
        self.sets = first_of_all(SETS, prompts or sum(SETS.values()))
        facts = {"device": provenance.device_name(device.type), "commit": provenance.commit()}
        self.files = MeasurementFolder(folder, facts, only)
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.rate = bus_rate(device)  # before anything is limited
        self.failed: list[str] = []
        self.engine: tuple[tuple[str, bool], Limited] | None = None  # the last shape, with a draft or without

    def run(self) -> list[str]:
        """All measurements in order; the names of those that failed."""
        for dtype in ("float32", "bfloat16"):
            self.once(f"lossless-{dtype}", lambda d=dtype: lossless(self.device, DTYPES[d], self.sets))
        for name in BIG:
            self.once(f"{name}-sync", lambda n=name: self.plain(n, prefetch=False))
            self.once(f"{name}-prefetch", lambda n=name: self.plain(n, prefetch=True))
            self.once(f"{name}-speculate", lambda n=name: self.speculate(n))
            self.once(f"{name}-whole", lambda n=name: self.whole(n))
            if name == "llama8b":
                self.once("memory", lambda n=name: self.used(n, draft=True))
            self.once(f"{name}-step", lambda n=name: self.step(n))  # lifts the limit
        self.once("memory-plain", lambda: self.used("llama1b", draft=False))
        self.free()
        return self.failed

    def once(self, name: str, measure: Callable[[], dict[str, Any]]) -> None:
        """Make a measurement unless its file is there; one that fails is named, and the next one is made."""
        if not self.files.is_due(name):
            return
        try:
            self.files.write(name, measure)
        except (UserError, RuntimeError) as error:  # too little memory has either kind
            self.failed.append(name)
            print(f"{name} failed: {' '.join(str(error).split())[:300]}", flush=True)
            self.free()

    def free(self) -> None:
        """Give back the memory of the last shape, and take the limit away."""
        self.engine = None
        limits.release()
        limits.bound(1.0, self.device)

    # --- shapes -------------------------------------------------------------------------------------------------------

    def of_shape(self, name: str, draft: bool) -> Limited:
        """A shape under the budget, with the paper's draft or without; kept until another one is asked for."""
        if self.engine is None or self.engine[0] != (name, draft):
            self.free()
            began = time.perf_counter()
            shape, context = SHAPES[name]
            config = DRAFT if draft else None
            memory = self.memory if name in BIG else LITTLE
            engine = of_shape(shape, memory, config, context, self.device, self.dtype)
            self.engine = (name, draft), engine
            speculation = "with its draft" if draft else "without a draft"
            seconds = time.perf_counter() - began
            print(f"{shape} {speculation}: {engine.plan.resident} resident, {seconds:.0f} s", flush=True)
        return self.engine[1]

    def where(self, engine: Limited) -> dict[str, Any]:
        """Where each part of the model is, and the memory in use."""
        facts = {
            "model": engine.name,
            "context": engine.context,
            "dtype": str(self.dtype).removeprefix("torch."),
            "budget_bytes": engine.plan.budget,
            "planned_bytes": engine.plan.used,
            "parts": engine.plan.parts,
            "resident": list(engine.plan.resident),
            "blocks": engine.plan.blocks,
            "streamed_bytes": engine.plan.streamed_bytes,
        }
        if self.device.type == "cuda":
            facts["device_bytes"] = limits.own_bytes(self.device)
            facts["allocated_peak_bytes"] = torch.cuda.max_memory_allocated(self.device)
            facts["reserved_bytes"] = torch.cuda.memory_reserved(self.device)
        return facts

    def plain(self, name: str, prefetch: bool) -> dict[str, Any]:
        """Seconds of steps without speculation."""
        engine = self.of_shape(name, draft=False)
        set_prefetch(engine, prefetch)
        batch = timed(engine, WARM + TIMED)
        seconds = batch.seconds[WARM:]
        step_s = statistics.median(seconds)
        facts = {"prefetch": prefetch, "step_s": step_s, "tokens_per_s": 1 / step_s, "seconds": seconds}
        facts["prefill_s"] = batch.prefill_s
        copied_per_step = Use(math.nan, engine.plan.streamed_bytes)  # in the mean a step copies all that streams
        return facts | self.bus([copied_per_step], statistics.mean(seconds)) | self.where(engine)

    def bus(self, uses: Sequence[Use], seconds: float) -> dict[str, Any]:
        """The measured rate of the bus, and shares of spans that took so many seconds together.

        `bus_share` is the bytes copied inside the spans over their time and the rate, `bus_busy` the share of the time
        in which a copy ran.
        """
        if self.device.type != "cuda":
            return {}
        return bus_shares(uses, seconds, self.rate)

    def speculate(self, name: str) -> dict[str, Any]:
        """Seconds of iterations, with the host waiting between the phases and without."""
        engine = self.of_shape(name, draft=True)
        engine.phases = False
        iteration_seconds = timed(engine, WARM + TIMED).seconds[WARM:]
        engine.phases = True
        traffic = traffic_of(engine)
        traffic.start()
        batch = timed(engine, WARM + TIMED)
        copies = traffic.stop()
        spans = batch.verified[WARM:]
        uses = [used(copies, begin, end) for begin, end in spans]
        drafting, verifying = batch.draft_s[WARM:], batch.verify_s[WARM:]
        draft_s, verify_s = statistics.median(drafting), statistics.median(verifying)
        facts = {
            "nodes": engine.draft.nodes,
            "depth": engine.draft.depth,
            "iteration_s": statistics.median(iteration_seconds),
            "draft_s": draft_s,
            "draft_pass_s": draft_s / engine.draft.depth,
            "verify_s": verify_s,
            "seconds": iteration_seconds,
            "draft_seconds": drafting,
            "verify_seconds": verifying,
        }
        return facts | self.bus(uses, sum(verifying)) | self.where(engine)

    def step(self, name: str) -> dict[str, Any]:
        """Seconds of a step at one token of the draft alone, which is the engine's step in the draft's format."""
        engine = self.of_shape(name, draft=True)
        limits.bound(1.0, self.device)  # for a second cache
        alone = Core(engine.name, engine._drafting)
        alone.RATED = False
        prompt = min(engine.context - TIMED - WARM - 8, 900)
        stats = alone.time(prompt, WARM + TIMED)
        facts = {"step_s": stats.ms_p50 / 1e3, "read_bytes": stats.read_bytes, "prompt": prompt}
        facts |= self.where(engine)
        self.free()
        return facts

    def whole(self, name: str) -> dict[str, Any]:
        """Generations with the record's accepted lengths against what lengths and times give by themselves.

        Returns:
            tokens_per_s: new tokens over the seconds of prefills and iterations (the paper's counting).
            calculated_tokens_per_s: tokens an iteration, the prefill being one, over the mean seconds of iterations
                that were timed before, as Table 1 calculates it.
            ratio: the first over the second; decode_ratio: the same without prefills on either side.
        """
        engine = self.of_shape(name, draft=True)
        engine.phases = False
        iteration_s = statistics.mean(timed(engine, WARM + TIMED).seconds[WARM:])
        lengths = recorded_lengths()[:WHOLE]
        prompt = min(engine.context - 1 - max(map(sum, lengths)), 900)
        generator = torch.Generator().manual_seed(0)
        prefills = []
        iterations = []
        decoded = 0
        iteration_count = 0
        for number, accepted in enumerate(lengths):
            ids = torch.randint(engine.model.config.vocab_size, (1, prompt), generator=generator).tolist()
            batch = ReplayedDraft(engine._decoding(ids, 1 + sum(accepted), Sampling(), number), accepted)
            for _ in engine._run(batch):
                pass
            prefills.append(batch.prefill_s)
            iterations += batch.seconds
            iteration_count += len(batch.lengths)
            decoded += sum(batch.lengths[1:])
        tokens = decoded + len(lengths)
        seconds = sum(prefills) + sum(iterations)
        calculated = tokens / iteration_count / iteration_s
        ratios = {
            "ratio": tokens / seconds / calculated,
            "decode_ratio": iteration_s * len(iterations) / sum(iterations),
        }
        facts = {"tokens_per_s": tokens / seconds, "calculated_tokens_per_s": calculated} | ratios
        facts |= {"iteration_s": iteration_s, "prompts": len(lengths), "tokens": tokens, "iterations": iteration_count}
        facts |= {"prompt_tokens": prompt, "lengths": lengths, "record": list(RECORD)}
        return facts | {"prefill_seconds": prefills, "seconds": iterations} | self.where(engine)

    def used(self, name: str, draft: bool) -> dict[str, Any]:
        """Memory (`limits.own_bytes`) while `LONG` tokens are decoded, after a warm generation.

        Returns:
            within: whether it never passed the budget, 1 or 0; growth_bytes: the most after the first token less that
            at it; used_bytes: at every `EVERY`th token.
        """
        engine = self.of_shape(name, draft)
        engine.phases = False
        timed(engine, WARM)
        new_tokens = min(LONG, engine.context - 2)
        prompt = engine.context - 1 - new_tokens
        batch = engine._decoding([[7] * prompt], new_tokens, Sampling(), 0)
        if draft:
            iterations = math.ceil((new_tokens - 1) / min(ACCEPTED, engine.draft.depth))
            batch = ReplayedDraft(batch, spread(new_tokens - 1, iterations))
        used: list[int] = []
        for number, _ in enumerate(engine._run(batch)):
            if number % EVERY == 0 and self.device.type == "cuda":
                used.append(limits.own_bytes(self.device))
        facts = {"tokens": new_tokens, "prompt_tokens": prompt, "iterations": len(batch.seconds), "used_bytes": used}
        if used:
            facts |= {"within": int(max(used) <= engine.plan.budget), "growth_bytes": max(used) - used[0]}
        return facts | self.where(engine)


class ReplayedDraft(Drafted):
    """A generation whose iterations accept the given numbers of tokens: the best node of a level and its ancestors.

    The target's own choices are still computed and walked, so that the host does as much work as in a real iteration.
    """

    def __init__(self, batch: Drafted, lengths: Sequence[int]) -> None:
        super().__init__(batch, batch.drafter, batch.phases)
        self.lengths_to_accept = iter(lengths)

    def _accepted(self, targets_choice: list[int]) -> list[int]:
        super()._accepted(targets_choice)
        tree = self.drafter.tree
        parents = tree.parents.tolist()
        level = next(self.lengths_to_accept) - 1
        path = [0] if level == 0 else [1 + tree.top_k * (level - 1)]
        while path[0]:
            path.insert(0, parents[path[0]])
        return path


def recorded_lengths() -> list[list[int]]:
    """Tokens of every iteration after the prefill, prompt by prompt, from the stored record of accepted lengths.

    The record has each prompt's tokens and iterations; an iteration has their mean, as whole numbers.

    Raises:
        UserError: nothing is stored.
    """
    flow = Workflow.of_results(scales.load(name="pocket"))
    paper, number, *row_col_model = RECORD
    cell = next(cell for cell in flow.cells(paper, number) if list(cell.cell_key[:3]) == row_col_model)
    quantity = measure.one_measured(flow, cell).quantity
    if quantity is None:
        raise UserError(
            f"no accepted length of {' / '.join(row_col_model)} is stored; accept one, or leave out `whole`"
        )
    series = quantity.seeds[0]
    lengths = []
    for tokens, iterations in zip(series["tokens"].values, series["iterations"].values):
        lengths.append(spread(int(tokens) - 1, int(iterations) - 1))
    return lengths


def spread(total: int, count: int) -> list[int]:
    """`count` whole numbers, as even as can be, that add up to `total`."""
    return [(n + 1) * total // count - n * total // count for n in range(count)]


def bus_shares(uses: Sequence[Use], seconds: float, rate: float) -> dict[str, float]:
    """Shares of a bus of `rate` bytes per second over spans that took `seconds` together."""
    nbytes = sum(use.nbytes for use in uses)
    busy = sum(use.seconds for use in uses)
    return {"bus_bytes_per_s": rate, "bus_share": nbytes / seconds / rate, "bus_busy": busy / seconds}


def of_shape(
    shape: str,
    memory: str,
    draft: subspec.Config | None,
    context: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Limited:
    """A shape under a budget, which is enforced on a GPU.

    Raises:
        NotMeasurable: the budget is below the least that works, or the host has too little memory.
    """
    config = configuration(Target(scales.load(name="pocket"), shape, "fp16"))
    target, drafting, plan = offloaded(shape, config, budget.parse_bytes(memory), draft, context, device, dtype)
    return Limited(shape, target, drafting, draft, plan)


# --- lossless ---------------------------------------------------------------------------------------------------------


def first_of_all(sets: dict[str, int], count: int) -> dict[str, int]:
    """So many prompts of each set, by its share of all, that they are about `count` together; one at least."""
    total = sum(sets.values())
    return {name: max(1, min(most, round(most * count / total))) for name, most in sets.items()}


def lossless(device: torch.device, dtype: torch.dtype, sets: dict[str, int]) -> dict[str, Any]:
    """Texts with a draft against those of plain decoding, token for token.

    A row of a disagreement says by how much the plain pass prefers its own token (`gap`), and by how much the logits of
    the two passes differ at that position (`moved`): those of the tree's pass that verified, and of the pass of one
    token. The difference of the passes explains a gap that is no larger, if it is rounding: the tree's pass may differ
    from float32 at most `FAR` times as much as passes of one token do somewhere in this text. In float32 a gap up to
    `TIE` is a tie.
    """
    context, draft = 1024, DRAFT
    target = Target(scales.load(name="pocket"), MODEL, "fp16")
    lm = compressed(target, dtype, build=True)
    config = lm.model.config
    resident = budget.spread(config.num_hidden_layers // 3, config.num_hidden_layers)
    memory = budget.EngineMemory(config, context, dtype, draft, packed=dtype != torch.float32)
    parts = memory.parts(len(resident))
    plan = budget.MemoryPlan(2**34, parts, resident, config.num_hidden_layers, memory.block_bytes)
    ours = Speculating(MODEL, *decoders(lm.model, Loaded(lm, device, dtype), plan, context, draft), draft)
    plain = Engine.load(MODEL, context=context, device=device.type, dtype=str(dtype).removeprefix("torch."))
    exact = (
        plain if dtype == torch.float32 else Engine.load(MODEL, context=context, device=device.type, dtype="float32")
    )
    count = 0
    iterations = 0
    new_tokens = 0
    rows = []
    for name, count_of_set in sets.items():
        for prompt in prompts.load(name, count_of_set):
            ids = plain._ids(prompt.text)[-(context - TOKENS) :]
            plain_text = next(plain.generate([ids], TOKENS)).tokens
            drafted_text = next(ours.generate([ids], TOKENS)).tokens
            count += 1
            iterations += len(ours.batch.lengths) if isinstance(ours.batch, Drafted) else 0
            new_tokens += len(drafted_text)
            if drafted_text != plain_text:
                row = {"set": name, "prompt": prompt.id}
                rows.append(row | disagreement(plain, ours, exact, ids, plain_text, drafted_text))
                print(f"{name} {prompt.id}: {rows[-1]}", flush=True)
        print(f"{name}: {count} prompts so far, {len(rows)} disagreements", flush=True)
    unexplained = sum(not explained(row, dtype) for row in rows)
    counts = {"prompts": count, "tokens": TOKENS, "new_tokens": new_tokens, "iterations": iterations}
    counts |= {"disagreements": len(rows), "unexplained": unexplained, "resident": list(resident)}
    return counts | {"model": MODEL, "dtype": str(dtype).removeprefix("torch."), "rows": rows}


def explained(row: dict[str, Any], dtype: torch.dtype) -> bool:
    """Whether rounding explains a disagreement."""
    if dtype == torch.float32:
        return row["gap"] <= TIE
    return row["gap"] <= row["moved"] and row["tree_error"] <= FAR * row["rounding"]


@torch.inference_mode()
def disagreement(
    plain: Core, ours: Speculating, exact: Core, ids: list[int], own: list[int], got: list[int]
) -> dict[str, Any]:
    """The first token that differs, and the logits of its two candidates in the passes that chose them.

    Returns:
        token: its number; own, got: the two candidates.
        gap: how much larger the plain pass finds its own one.
        moved: by how much the two passes differ in both logits together.
        tree_error: the largest difference of the tree's two logits from float32.
        rounding: the same of passes of one token, the largest one over the text up to here.
    """
    first = next((i for i, pair in enumerate(zip(own, got)) if pair[0] != pair[1]), min(len(own), len(got)))
    words = {"token": first, "own": own[first : first + 1], "got": got[first : first + 1]}
    if not 0 < first < min(len(own), len(got)):  # a text that ends early, or a prefill: no pass over a tree chose it
        return words | dict.fromkeys(("gap", "moved", "tree_error", "rounding"), math.inf)
    both = [own[first], got[first]]
    single = one_token_logits(plain, ids, own[: first + 1])
    right = exact.logits([*ids, *own[:first]])[-first - 1 :]
    errors = (single - right).abs()
    said = torch.tensor(own[: first + 1], device=errors.device)
    tree = tree_logits(ours, ids, first)
    plain_pair, tree_pair, right_pair = (logits[both].float() for logits in (single[-1], tree, right[-1]))
    return words | {
        "gap": (plain_pair[0] - plain_pair[1]).item(),
        "moved": (tree_pair - plain_pair).abs().sum().item(),
        "tree_error": (tree_pair - right_pair).abs().max().item(),
        "rounding": errors.gather(1, said[:, None]).max().item(),
    }


def one_token_logits(plain: Core, ids: list[int], text: list[int]) -> Tensor:
    """float32 `[T, V]`: what chose each of T tokens of a text in plain decoding, the first by the prompt's prefill."""
    logits = [plain.logits(ids)[-1]]
    for number, token in enumerate(text[:-1]):
        tokens = run_of(torch.tensor([token], device=plain.model.device), 0, len(ids) + number)
        logits.append(plain.model.head(one_step(plain.model, plain.cache, tokens))[0].float())
    return torch.stack(logits)


def tree_logits(ours: Speculating, ids: list[int], number: int) -> Tensor:
    """`[V]`: a verification's logits where it chose token `number` of the text, 1 or more, in greedy decoding."""
    batch = ours._decoding([ids], number + 1, Sampling(), 0)
    for _ in ours._run(batch):
        pass
    before = sum(batch.lengths[:-1])  # tokens of the text that earlier iterations gave
    return batch.verify.logits(batch.path[number - before])


if __name__ == "__main__":
    main()
