"""The engine's mixed iterations: tokens that are decoded and chunks of prompts in one pass, on a GPU one graph.

`scheduling.serve` says which tokens. They go through `step` together, decodes first: every product computes all of
them, and attention takes tokens of any rows in one launch. An iteration is padded to one of `SIZES`, of which each is
captured once; padding writes nothing. Logits are computed of those tokens alone that a new token follows.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from repro.core.errors import NotMeasurable
from repro.engine.scheduling import Batch, LatencyTable
from repro.engine.step import Cache, Decoder, Tokens, on, step
from repro.engine.weights import LAYERS, layer_sizes
from repro.kernels import argmax

SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448, 480, 512)


class MixedSteps:
    """Iterations of one decoder over a cache that others may share.

    Args:
        model: whose weights are on its device.
        cache: of B rows.
        sizes: numbers of tokens that are captured, in order; the last is the most that an iteration has.
    """

    def __init__(self, model: Decoder, cache: Cache, sizes: Sequence[int] = SIZES) -> None:
        self.model = model
        self.cache = cache
        self.sizes = list(sizes)
        self.graphed = model.device.type == "cuda"
        most = self.sizes[-1]
        rows = len(cache.lengths)
        # One copy brings everything that an iteration reads: ids, rows, slots, and the places whose logits are wanted.
        self.host = torch.zeros(3 * most + rows, dtype=torch.int32, pin_memory=self.graphed)
        self.given = torch.zeros_like(self.host, device=model.device)
        self.following = torch.zeros(rows, dtype=torch.int64, device=model.device)
        self.answer = torch.zeros(rows, dtype=torch.int64, pin_memory=self.graphed)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.pool = None  # memory of what graphs compute with, one after another

    def capture(self) -> None:
        """Capture an iteration of every size that is not captured yet, the largest first, as all share its memory."""
        for size in reversed(self.sizes):
            if size not in self.graphs:
                self.graphs[size] = self._captured(size)

    def __call__(self, ids: Sequence[int], rows: Sequence[int], slots: Sequence[int], last: Sequence[int]) -> list[int]:
        """Compute tokens, whose keys and values go into the cache.

        Args:
            ids, rows, slots: of each token its id, its row of the cache, and its position in that row.
            last: the places among these whose next token is wanted, at most one a row.

        Returns:
            The greedy next token after each of `last`.

        Raises:
            NotMeasurable: more tokens than the largest size.
        """
        count = len(ids)
        most = self.sizes[-1]
        if count > most:
            raise NotMeasurable("too_long", f"{count} tokens of an iteration; at most {most} are computed together")
        size = self.padded(count) if self.graphed else count
        for number, values in enumerate((ids, rows, slots)):
            self.host[number * most : number * most + count] = torch.tensor(values, dtype=torch.int32)
        self._padding(count, size)
        self.host[3 * most : 3 * most + len(last)] = torch.tensor(last, dtype=torch.int32)
        self.given.copy_(self.host, non_blocking=True)
        if self.graphed:
            if size not in self.graphs:
                self.graphs[size] = self._captured(size)
            self.graphs[size].replay()
        else:
            self._compute(size)
        self.answer.copy_(self.following, non_blocking=True)
        if self.graphed:
            torch.cuda.current_stream().synchronize()
        return self.answer[: len(last)].tolist()

    def padded(self, count: int) -> int:
        """The size of an iteration of so many tokens."""
        return next(size for size in self.sizes if size >= count)

    def _padding(self, count: int, size: int) -> None:
        """Tokens after the first `count` write nothing."""
        most = self.sizes[-1]
        self.host[count:size] = 0
        self.host[most + count : most + size] = -1
        self.host[2 * most + count : 2 * most + size] = 0

    def _captured(self, size: int) -> torch.cuda.CUDAGraph:
        """An iteration as a graph, run once before, as libraries set themselves up."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._compute(size)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            self._compute(size)
        self.pool = graph.pool()
        return graph

    @torch.inference_mode()
    def _compute(self, size: int) -> None:
        """An iteration of the first `size` tokens of what is given."""
        most = self.sizes[-1]
        ids, rows, slots = (self.given[number * most : number * most + size] for number in range(3))
        last_positions = self.given[3 * most :].long().clamp(max=size - 1)
        hidden = step(self.model, self.cache, Tokens(ids.long(), rows, slots, slots, slots + 1))
        self.following.copy_(on(self.model.device, argmax)(self.model.head(hidden[last_positions])))


class Iterations:
    """Computes the iterations of `scheduling.serve`: batches of requests by `MixedSteps`, decoded greedily.

    Args:
        steps: whose cache has a row for every request that runs.
        prompts: token ids by the number of a request.

    Attributes:
        tokens: new tokens by the number of a request.
    """

    def __init__(self, steps: MixedSteps, prompts: Mapping[int, Sequence[int]]) -> None:
        self.steps, self.prompts = steps, prompts
        self.tokens: dict[int, list[int]] = {number: [] for number in prompts}

    def __call__(self, batch: Batch) -> None:
        """Compute a batch; its tokens are there when this returns."""
        ids: list[int] = []
        rows: list[int] = []
        slots: list[int] = []
        last: list[int] = []
        follows = []
        for running in batch.decodes:
            tokens = self.tokens[running.request.number]
            last.append(len(ids))
            follows.append(tokens)
            ids.append(tokens[-1])
            rows.append(running.row)
            slots.append(running.request.prompt_tokens + len(tokens) - 1)
        for chunk in batch.chunks:
            number = chunk.running.request.number
            end = chunk.start + chunk.count
            ids += self.prompts[number][chunk.start : end]
            rows += [chunk.running.row] * chunk.count
            slots += range(chunk.start, end)
            if chunk.ends_prompt:
                last.append(len(ids) - 1)
                follows.append(self.tokens[number])
        for tokens, token in zip(follows, self.steps(ids, rows, slots, last)):
            tokens.append(token)


# --- calibration ------------------------------------------------------------------------------------------------------

Products = Mapping[tuple[str, int], Mapping[int, float]]  # ms by product and its number of compensators, by tokens


def latency_table(
    model: Decoder, backbone: Mapping[int, float], products: Products, sizes: Sequence[int] = ()
) -> LatencyTable:
    """T of a decoder by what was measured of the backbone and of products (SPEAR, section 4.3).

    The paper adds up kernel by kernel: the tables of products with compensators where a placement has some, those of
    the backbone elsewhere, attention apart. The same sum is written here as the backbone's whole iteration, which has
    norms, head and the host's work as well, and what the placement adds to it.

    Args:
        model: with the placement.
        backbone: milliseconds of an iteration without compensators, by number of tokens.
        products: of one product; of every number of compensators that the decoder has, and of none.
        sizes: numbers of tokens that iterations are padded to.
    """
    counts: dict[tuple[str, int], int] = {}
    for block in model.blocks:
        for name in LAYERS:
            number = compensators(getattr(block, name))
            counts[name, number] = counts.get((name, number), 0) + 1
    points = {}
    for tokens, milliseconds in backbone.items():
        for (name, number), products_alike in counts.items():
            added = products[name, number][tokens] - products[name, 0][tokens]
            milliseconds += products_alike * max(added, 0.0)
        points[tokens] = milliseconds
    return LatencyTable(points, sizes)


def compensators(product: torch.nn.Module) -> int:
    """How many layers of a product have a compensator."""
    return getattr(product, "compensators", 0)


def measured_products(
    models: Sequence[Decoder], sizes: Sequence[int], repeats: int, most: int = 8
) -> dict[tuple[str, int], dict[int, float]]:
    """Milliseconds of a product by its name, its number of compensators and the number of tokens.

    Args:
        models: which have products of every number that is asked for; alike but for compensators.
        sizes: numbers of tokens.
        repeats: timings, whose median is taken.
        most: products of several blocks that are timed one after another, so that no cache holds their weights.
    """
    alike: dict[tuple[str, int], list[torch.nn.Module]] = {}
    for model in models:
        for block in model.blocks:
            for name in LAYERS:
                product = getattr(block, name)
                alike.setdefault((name, compensators(product)), []).append(product)
    columns = {name: size for name, (_, size) in layer_sizes(models[0].config).items()}
    microseconds: dict[tuple[str, int], dict[int, float]] = {}
    for (name, number), products in sorted(alike.items()):
        microseconds[name, number] = {}
        for size in sizes:
            like = models[0].embedding
            x = torch.randn(size, columns[name], dtype=like.dtype, device=like.device)
            microseconds[name, number][size] = _milliseconds(products[:most], x, repeats) / len(products[:most])
    return microseconds


@torch.inference_mode()
def _milliseconds(products: Sequence[torch.nn.Module], x: Tensor, repeats: int) -> float:
    """The median time of products of one input one after another, on a GPU as one graph."""

    def compute() -> None:
        for product in products:
            product(x)

    compute()
    if not x.is_cuda:
        return _median(compute, repeats)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compute()

    def replayed() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return _median(replayed, repeats)


def measured_iterations(
    steps: MixedSteps, sizes: Sequence[int], decodes: int, context: int, repeats: int
) -> dict[int, float]:
    """Milliseconds of iterations by number of tokens, as a host waits for them, its own work included.

    Args:
        decodes: at most so many of the tokens are decoded, each after `context` others; the rest are one prompt's.
    """
    milliseconds = {}
    for size in sizes:
        first = min(size, decodes)
        rows = [*range(first), *[first] * (size - first)]
        slots = [*[context] * first, *range(size - first)]
        milliseconds[size] = _median(partial(steps, [1] * size, rows, slots, range(first)), repeats)
    return milliseconds


def _median(call: Callable[[], object], repeats: int) -> float:
    """The median milliseconds of calls, after two that are not timed."""
    times = []
    for _ in range(repeats + 2):
        began = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times[2:])
