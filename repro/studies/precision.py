"""What switching precision costs at a model's shapes: `python -m repro.studies.precision --out DIR`.

Random weights on a GPU, one sequence. A measurement is one JSON file in DIR, written as soon as it is there; what is
there already is not measured again. The parts, each with the settings that it was measured with:

    step-<bits>-<context>   milliseconds of a step with all layers at a width, after so many tokens
    mixed-<state>           of a mixture, and what the static steps of its layers add up to
    serial-<state>          the same where products of different widths run one after another
    signal                  of PPLE, window and decision: the engine that listens against the one that does not
    switch-<how>-<layers>   how long the tokens around a switch take, with graphs captured ahead or when asked for, or
                            captured ahead with the copies on the host; and what of it is the host's own time
    whole                   a run to 2,000 tokens that replays a log of switches, against the sum of measured steps
                            along it: static ones, what mixtures take beyond these, what switches lose (bench/along.py)
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from repro.bench import along
from repro.core.errors import UserError
from repro.engine import copies
from repro.engine.core import Core
from repro.engine.decoding import Sampling
from repro.engine.limits import release
from repro.engine.precision import SwitchingCore, SwitchingSteps, assembled
from repro.engine.step import Decoder
from repro.engine.weights import runs
from repro.generation.engine import configuration, random_decoder
from repro.jobs.target import Target
from repro.methods.flexquant import order
from repro.methods.flexquant.config import Config
from repro.methods.flexquant.schedule import bits_by_step, planned_rule
from repro.specs import scale as scales
from repro.store import observations, provenance
from repro.studies.measurement_folder import MeasurementFolder

SHAPE = "shape/Llama-3-8B"
RECIPES = {16: "fp16", 8: "rtn-w8-pc-sym", 4: "rtn-w4-g128"}  # grids whose kernels are tuned
CONTEXTS = (128, 1024, 4096, 8000)  # tokens before those that are timed
MIXTURES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75)  # moves made, over the number of layers: 1 is all at 8 bits
TIMED = 64  # steps of a measurement
SHORT, LONG = 128, 1872  # prompt and new tokens of the whole run
SWITCHED_LAYERS = (1, 4, 8, 16)  # layers of a switch
MOST = SWITCHED_LAYERS[-1]
WHOLE = 4  # layers of a switch of the whole run
EVERY, SWITCHED = 22, 330  # steps between two switches, and of a run in which they are timed


def main() -> None:
    """Measure what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="a folder for the measurements")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="only measurements whose name contains one of these words"
    )
    parser.add_argument("--log", type=Path, help="observations of a switching job, whose switches `whole` replays")
    parser.add_argument("--shape", default=SHAPE)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("error: this machine has no CUDA device; run it on a GPU")
    try:
        PrecisionBench(args.shape, torch.device(args.device), args.out, args.only, args.log).run()
    except UserError as error:
        raise SystemExit(f"error: {error}") from None


class PrecisionBench:
    """The measurements of one shape on one device."""

    def __init__(
        self, shape: str, device: torch.device, folder: Path, only: Sequence[str] = (), log: Path | None = None
    ) -> None:
        self.device = device
        self.log = log
        facts = {"shape": shape, "device": provenance.device_name(device.type), "commit": provenance.commit()}
        self.files = MeasurementFolder(folder, facts, only)
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        began = time.perf_counter()
        config = None
        self.make: dict[int, Callable[[], Decoder]] = {}
        for bits, recipe in RECIPES.items():
            target = Target(scales.load(name="pocket"), shape, recipe, 0)
            config = config or configuration(target)
            self.context = min(config.max_position_embeddings, CONTEXTS[-1] + TIMED + 2)
            self.make[bits] = partial(random_decoder, target.recipe, config, self.context, device, self.dtype)
        self.on_host: Decoder | None = None
        self.plain = {bits: decoder() for bits, decoder in self.make.items()}
        self.model = copies.joined(self.plain, int8_prefill=False)
        self.layers = list(copies.weights_of(self.model))
        self.name = shape
        self.static = self.engine()
        print(f"{shape} at {', '.join(map(str, RECIPES))} bits in {time.perf_counter() - began:.0f} s", flush=True)

    def run(self) -> None:
        """All parts in order."""
        for context in CONTEXTS:
            if context + TIMED < self.context:
                for bits in RECIPES:
                    self.once(
                        f"step-{bits}-{context}", lambda b=bits, c=context: self.step(dict.fromkeys(self.layers, b), c)
                    )
        for name, bits in self.mixtures().items():
            self.once(f"mixed-{name}", lambda b=bits: self.mixed(b, self.static))
            self.once(f"serial-{name}", lambda b=bits: self.serial(b))
        self.once("signal", self.signal)
        for layers in SWITCHED_LAYERS:
            self.once(f"switch-ahead-{layers}", lambda n=layers: self.switches(True, n))
        for layers in (1, 4, MOST):
            self.once(f"switch-asked-{layers}", lambda n=layers: self.switches(False, n))
        self.once("whole", self.whole)
        for layers in (1, 4, MOST):
            self.once(f"switch-host-{layers}", lambda n=layers: self.from_host(n))

    def once(self, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """A measurement from its file, or made now; empty where neither is, since it is not asked for."""
        if self.files.is_due(name):
            self.files.write(name, measure)
        return self.files.read(name) if self.files.file(name).is_file() else {}

    def engine(self, **how: Any) -> SwitchingCore:
        """An engine with a schedule, over the weights that are there; layers go in a random order."""
        config = Config(order="random", **how)
        return SwitchingCore(self.name, self.model, config, order.moves({}, self.layers, config))

    def step(self, bits: Mapping[str, int], context: int, engine: SwitchingCore | None = None) -> dict[str, Any]:
        """Milliseconds of a step in a state after `context` tokens; the better of two rounds."""
        engine = engine or self.static
        engine.hold(bits)
        rounds = [engine.time(context, TIMED) for _ in range(2)]
        best = min(rounds, key=lambda stats: stats.ms_p50)
        return {
            "context": context,
            "timed": TIMED,
            "ms": best.ms_p50,
            "ms at p99": best.ms_p99,
            "read_bytes": best.read_bytes,
        }

    def mixtures(self) -> dict[str, dict[str, int]]:
        """States on the way from 16 to 8 to 4 bits, layers in random order, and in whole products."""
        moves = order.moves({}, self.layers, Config(order="random"))
        by_product = order.moves({}, self.layers, Config(order="model"))
        facts = {}
        for share in MIXTURES:
            for name, made in (("random", moves), ("model", by_product)):
                bits = dict.fromkeys(self.layers, 16)
                bits |= {move.layer: move.bits for move in made[: int(share * len(self.layers))]}
                facts[f"{name}-{share}"] = bits
        return facts

    def mixed(self, bits: Mapping[str, int], engine: SwitchingCore) -> dict[str, Any]:
        """A mixture's step, and what its layers' shares of the static steps add up to."""
        context = CONTEXTS[0]
        measured = self.step(bits, context, engine)
        expected = self.added_up(bits, context)
        launches = sum(len(runs(each.bits)) for each in engine.steps.copies)
        return measured | {"expected ms": expected, "ratio": measured["ms"] / expected, "products": launches}

    def serial(self, bits: Mapping[str, int]) -> dict[str, Any]:
        """A mixture's step whose products are no branches of its graph."""
        engine = self.engine()
        try:
            self.branches(False)
            return self.mixed(bits, engine)
        finally:
            self.branches(True)

    def branches(self, on: bool) -> None:
        """Whether products of different widths run at the same time in graphs that are captured from now on."""
        for block in self.model.blocks:
            for each in copies.copies_of(block):
                each.set_branches(on)

    def added_up(self, bits: Mapping[str, int], context: int) -> float:
        """Milliseconds of a state: each layer's share, by its weights, of the static step of its width."""
        sizes = copies.weights_of(self.model)
        total = sum(sizes.values())
        static = {b: self.once(f"step-{b}-{context}", lambda: {})["ms"] for b in RECIPES}
        return sum(sizes[layer] / total * static[width] for layer, width in bits.items())

    def signal(self) -> dict[str, Any]:
        """The signal's cost in a 4-bit step: the engine that reads it against the one without, and the kernel alone."""
        engine, plain = self.engine(), Core(self.name, self.plain[4])
        engine.hold(4)
        times: dict[str, list[float]] = {"listening": [], "plain": []}
        for _ in range(5):  # interleaved
            times["listening"].append(engine.time(CONTEXTS[0], 4 * TIMED).ms_p50)
            times["plain"].append(plain.time(CONTEXTS[0], 4 * TIMED).ms_p50)
        with_it, without = (statistics.median(times[name]) for name in ("listening", "plain"))
        return {"listening ms": with_it, "plain ms": without, "share": with_it / without - 1, "rounds": times}

    def switches(self, ahead: bool, layers: int) -> dict[str, Any]:
        """Milliseconds of the tokens around switches, against the median of the others."""
        engine = self.engine(interval=EVERY, layers=layers)
        engine.steps.ahead = ahead
        return self.around(engine, layers)

    def from_host(self, layers: int) -> dict[str, Any]:
        """Switching with the copies on the host: also the device memory, and copies that came too late."""
        config = Config(order="random", interval=EVERY, layers=layers, copies="host")
        if self.on_host is None:
            self.static, self.model, self.plain = None, None, {}  # the device holds one width from here on
            release()
            self.on_host = assembled(self.make, replace(config, layers=MOST))
        release()  # engines that were clocked hold themselves
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        model = self.on_host
        engine = SwitchingCore(self.name, model, config, order.moves({}, self.layers, config))
        facts = self.around(engine, layers)
        staging = engine.steps.staging
        weights = 0
        for each in engine.steps.copies:
            weights += sum(tensor.nbytes for tensor in each.at[max(RECIPES)].buffers())
        facts |= {"prefetched": staging.prefetched, "late": staging.late, "buffer bytes": staging.room}
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device)
            cache = engine.cache
            other_bytes = peak - cache.keys.nbytes - cache.values.nbytes
            facts |= {"allocated bytes at most": peak, "allocated bytes beside the cache": other_bytes}
        tables = {id(tensor): tensor.nbytes for tensor in (model.embedding, *model.head.buffers())}
        return facts | {
            "bytes of the first width's layers": weights,
            "bytes of the first width": weights + sum(tables.values()),
        }

    def around(self, engine: SwitchingCore, layers: int) -> dict[str, Any]:
        """Milliseconds of the tokens around an engine's switches, and the host's share in them."""
        switched: list[float] = []
        prepared: list[float] = []
        clocked(engine.steps, "switch", switched)
        clocked(engine.steps, "prepare", prepared)
        seconds, log = self.timed(engine, CONTEXTS[0], SWITCHED)
        switched_at = sorted({switch.step for switch in log})
        steps_near_switches: set[int] = set()
        for step in switched_at:
            steps_near_switches.update(range(step - 2, step + 2))
        quiet_ms = statistics.median(ms for step, ms in enumerate(seconds, start=1) if step not in steps_near_switches)
        # The graph of the first switch is captured in between, so that it does not count.
        late = [max(seconds[step - 2 : step + 1]) - quiet_ms for step in switched_at[1:]]
        worst = {"late ms, median": statistics.median(late), "late ms, worst": max(late)}
        others = [ms - quiet_ms for step, ms in enumerate(seconds, start=1) if step not in steps_near_switches]
        worst |= {"other late ms, worst": max(others), "host ms, worst": 1e3 * max(*switched, *prepared)}
        worst |= {"switch host ms, worst": 1e3 * max(switched), "prepare host ms, worst": 1e3 * max(prepared)}
        if (recorder := engine.steps.recorder) is not None:
            worst["capture ms, median"] = 1e3 * statistics.median(recorder.captured)
            worst["waited ms, worst"] = 1e3 * max(recorder.waited, default=0.0)
        facts = {"layers": layers, "switches": len(switched_at), "quiet ms": quiet_ms}
        return facts | worst | {"ms": rounded(seconds), "steps": switched_at}

    def timed(self, engine: SwitchingCore, prompt: int, new: int) -> tuple[list[float], list[Any]]:
        """Milliseconds of every step after a random prompt, and the log of switches; a first run warms up."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(engine.model.config.vocab_size, (1, prompt), generator=generator).tolist()
        for _ in range(2):
            batch = engine._decoding(ids, new, Sampling(), 0)
            for _ in engine._run(batch):
                pass
        return [1e3 * seconds for seconds in batch.seconds], list(engine.switching.logs[0])

    def whole(self) -> dict[str, Any]:
        """A run of four layers a switch that replays a recorded log, against the sum of measured steps along it.

        Without a log of another run, that of a first run here is replayed. A step of 16 bits is measured before and
        after: where it is not the same, something else ran on the device. What lies between the sum and the run is said
        apart: `settled ratio` is that of the medians between switches, which other load moves least, and `lost ms` are
        what the switches of this run cost.
        """
        measured = along.read(self.files.path)
        path = list(RECIPES)
        contexts = SHORT + np.arange(1, LONG)
        if measured.lacks(path, contexts[-1], WHOLE):
            raise UserError("whole: its parts are not measured yet; say --only step mixed-random switch-ahead whole")
        engine = self.engine(interval=EVERY, layers=WHOLE)
        high = dict.fromkeys(self.layers, max(RECIPES))
        before = self.step(high, CONTEXTS[0])["ms"]
        if self.log is None:
            _, recorded = self.timed(engine, SHORT, LONG)
            steps_to_replay = [switch.step for switch in recorded]
        else:
            steps_to_replay = switch_steps(self.log, WHOLE)
        engine.rule = planned_rule(steps_to_replay[::WHOLE], WHOLE)
        seconds, log = self.timed(engine, SHORT, LONG)
        after = self.step(high, CONTEXTS[0])["ms"]
        sizes = copies.weights_of(self.model)
        share = along.shares(log, path, sizes, len(seconds))
        token_ms = measured.tokens(path, share, contexts)
        steps = sorted({switch.step for switch in log})
        expected = float(token_ms.sum()) + len(steps) * measured.lost_by(WHOLE)
        settled = [along.settled_ms(seconds, *pair) for pair in pairwise(steps)]
        by_sum = [along.settled_ms(token_ms.tolist(), *pair) for pair in pairwise(steps)]
        return {
            "measured ms": sum(seconds),
            "calculated ms": expected,
            "ratio": sum(seconds) / expected,
            "static sum ms": float((share * measured.static(path, contexts)).sum()),
            "settled ratio": sum(settled) / sum(by_sum),
            "lost ms, mean": statistics.mean(along.lost(seconds, steps)),
            "lost ms, expected": measured.lost_by(WHOLE),
            "16 bits before, ms": before,
            "16 bits after, ms": after,
            "mean bits": statistics.mean(bits_by_step(log, sizes, max(RECIPES), len(seconds)).tolist()),
            "tokens": len(seconds),
            "ms": rounded(seconds),
            "log": [[switch.step, switch.layer, switch.bits] for switch in log],
            "replayed": str(self.log or "a first run's"),
        }


def rounded(milliseconds: Sequence[float]) -> list[float]:
    """Every step's time to a tenth of a microsecond, for a file: a clock says no more."""
    return [round(time, 4) for time in milliseconds]


def switch_steps(path: Path, layers: int) -> list[int]:
    """The steps of a recorded run's switches, `layers` times each: of that prompt of a job whose text switched most.

    Args:
        path: observations of a job of `repro/metrics/switching.py`.
        layers: that each switch takes here.

    Raises:
        UserError: no text of the job switched.
    """
    series = observations.load(path).series
    logs = [log.values for name, log in series.items() if name.startswith("log ")]
    if not logs:
        raise UserError(f"{path}: no text of this run switched; name the observations of one that did")
    steps_by_log = [sorted(set(map(int, log))) for log in logs]
    longest = max(steps_by_log, key=len)
    steps = []
    for step in longest:
        steps += [step] * layers
    return steps


def clocked(steps: SwitchingSteps, name: str, seconds: list[float]) -> None:
    """Take the host's time of every call of a method of these steps."""
    method = getattr(steps, name)

    def timed(*given: Any) -> Any:  # noqa: ANN401
        began = time.perf_counter()
        result = method(*given)
        seconds.append(time.perf_counter() - began)
        return result

    setattr(steps, name, timed)


if __name__ == "__main__":
    main()
