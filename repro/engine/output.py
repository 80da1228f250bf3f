"""Output of a generation: text in whole characters up to a stop string, and one line of numbers."""

import math
import sys
import timeit
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from repro.core.errors import UserError

REPLACEMENT = "\ufffd"  # what an incomplete character decodes to
BEFORE = 8  # tokens of the prompt that decide whether the first word begins with a blank
READ = 1 << 26  # bytes that are read at most to rate a CPU; they show in its peak memory


class TextPiece(str):
    """A piece of generated text, or all of it.

    Attributes:
        tokens: ids after it; of a whole text up to the one that ended it.
        logprobs: natural log probabilities of these tokens under the model, without temperature; None unless asked for.
        ended: why the text ends here: `eos`, `stop`, `length`, or empty where it goes on.
    """

    def __new__(cls, text: str, tokens: list[int], logprobs: list[float] | None, ended: str) -> "TextPiece":
        """The text and what is known of it."""
        piece = super().__new__(cls, text)
        piece.tokens, piece.logprobs, piece.ended = tokens, logprobs, ended
        return piece


class TextStream:
    """The text of one sequence, token by token; what may be the start of a stop string is kept in `pending`."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stop: Sequence[str]) -> None:
        self.tokenizer, self.stop = tokenizer, stop
        self.ids = list(prompt[-BEFORE:])
        self.pending = ""
        self.shown = len(self.ids)  # ids whose text is known; those before only give it its context

    def push(self, token: int) -> tuple[str, bool]:
        """The text that a token completes, and whether a stop string ended it."""
        self.ids.append(token)
        before = self._decode(self.ids[: self.shown])
        decoded = self._decode(self.ids)
        if decoded.endswith(REPLACEMENT) or len(decoded) <= len(before):
            return "", False
        self.ids = self.ids[self.shown :]
        self.shown = len(self.ids)
        text = self.pending + decoded[len(before) :]
        if ends := [text.find(stop) for stop in self.stop if stop in text]:
            self.pending = ""
            return text[: min(ends)], True
        begun = 0  # characters at the end that may be the start of a stop text
        for stop in self.stop:
            for count in range(1, len(stop)):
                if text.endswith(stop[:count]):
                    begun = max(begun, count)
        keep = len(text) - begun
        self.pending = text[keep:]
        return text[:keep], False

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@dataclass(frozen=True)
class Stats:
    """One generation; NaN where it had no step after the prefill.

    Attributes:
        prompt_tokens, new_tokens: over all sequences.
        prefill_s: seconds from the start to the first token of every sequence.
        tokens_per_s: of all sequences together, after their first tokens.
        ms_p50, ms_p99: milliseconds from one step's tokens to the next.
        step_bytes: what a step must read: weights and valid cache slots, in the mean over steps.
        read_rate: bytes per second at which the fastest reader of this device reads about so many (`read_rate`).
        peak_bytes: of memory; on a GPU of this generation and what was loaded, on a CPU of the process so far.
        stored_bytes: the model as it is stored; 3-bit codes take 3 bits.
        read_bytes: weights that a step reads here; 3-bit codes take 4 bits, on a CPU all are dequantized, as Q4_K is.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    prefill_s: float = math.nan
    tokens_per_s: float = math.nan
    ms_p50: float = math.nan
    ms_p99: float = math.nan
    step_bytes: float = math.nan
    read_rate: float = math.nan
    peak_bytes: int = 0
    stored_bytes: int = 0
    read_bytes: int = 0

    @property
    def mbu(self) -> float:
        """Model bandwidth utilization: `step_bytes` over the time of a median step, as a share of `read_rate`.

        Raises:
            UserError: it is above 1: no step reads faster than the device, so that one of its inputs is wrong.
        """
        reached = self.step_bytes / self.ms_p50 * 1e3
        if reached > self.read_rate:
            step = f"{self.step_bytes / 1e6:,.1f} MB in a step of {self.ms_p50:.3f} ms are {reached / 1e9:,.1f} GB/s"
            why = f"above the {self.read_rate / 1e9:,.1f} GB/s at which this device reads"
            share = reached / self.read_rate
            raise UserError(f"MBU {share:.2f}: {step}, {why}; measure again, with nothing else running")
        return reached / self.read_rate

    def __str__(self) -> str:
        peak, stored, read = (f"{n / 1e6:,.1f} MB" for n in (self.peak_bytes, self.stored_bytes, self.read_bytes))
        tokens = f"{self.prompt_tokens} + {self.new_tokens} tokens"
        memory = f"peak {peak} | stored {stored} | read {read}"
        return f"{tokens} | prefill {self.prefill_s:.3f} s | {self._of_steps()} | {memory}"

    @property
    def speed(self) -> str:
        """Tokens per second in words, or that there was no step."""
        return "no step after the prefill" if math.isnan(self.tokens_per_s) else f"{self.tokens_per_s:.1f} tokens/s"

    def _of_steps(self) -> str:
        """What was measured of steps, in words."""
        if math.isnan(self.ms_p50):
            return self.speed
        times = f"{self.speed} | {self.ms_p50:.2f} ms a token (p50), {self.ms_p99:.2f} (p99)"
        if math.isnan(self.read_rate):
            return times
        step, rate = f"{self.step_bytes / 1e6:,.1f} MB", f"{self.read_rate / 1e9:,.1f} GB/s"
        return f"{times} | MBU {self.mbu:.2f} ({step} a step over its time over a read rate of {rate})"


def measured(
    device: torch.device, prefill_s: float, steps: list[float], later_tokens: int, step_bytes: float, **counted: int
) -> Stats:
    """Stats from the seconds of every step, the tokens that the steps gave, and the bytes that one read on average.

    Without these bytes (NaN) the device's read rate is not measured.
    """
    stats = Stats(prefill_s=prefill_s, peak_bytes=peak_bytes(device), **counted)
    if not steps:
        return stats
    p50, p99 = (float(np.percentile(steps, p)) for p in (50, 99))
    rate = math.nan if math.isnan(step_bytes) else read_rate(device, step_bytes)
    times = {"ms_p50": 1e3 * p50, "ms_p99": 1e3 * p99}
    return replace(stats, tokens_per_s=later_tokens / sum(steps), step_bytes=step_bytes, read_rate=rate, **times)


def peak_bytes(device: torch.device) -> int:
    """The most memory that was in use."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # not on every system

    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else 1024 * used


def read_rate(device: torch.device, nbytes: float) -> float:
    """Bytes per second of the fastest reader of a device, on about `nbytes` bytes; measured once a size and process.

    On a GPU that is the read floor of kernels/, cold, from 1 MiB to 1 GiB. On a CPU it is the better of a maximum and a
    product of a matrix with a vector, of up to 64 MiB that were just read, as the weights of a small model were.
    """
    if device.type == "cuda":
        from repro.kernels import read_floor  # needs Triton

        return _gpu_rate(device, read_floor.rated_size(nbytes))
    return _cpu_rate(1 << round(math.log2(min(max(nbytes, 1 << 20), READ))))


@cache
def _gpu_rate(device: torch.device, nbytes: int) -> float:
    from repro.kernels import read_floor

    return read_floor.rate(nbytes, device)


@cache
def _cpu_rate(nbytes: int) -> float:
    matrix = torch.ones(nbytes // 4096, 1024)
    vector = torch.ones(1024)
    seconds = timeit.repeat(matrix.max, repeat=9, number=1)
    seconds += timeit.repeat(lambda: torch.mv(matrix, vector), repeat=9, number=1)
    return matrix.nbytes / min(seconds)
