"""Sample one token per row of logits: temperature, top-k, top-p, and noise from (seed, position, token).

    x[i] = logits[i] / temperature      w[i] = exp(x[i] - max x)      E[i] = -log(1 - uniform(seed, position, i))
    top-k keeps i if fewer than k tokens have larger logits; top-p then keeps i if the kept tokens with larger logits
    have less than p of the weight of all kept ones, in Transformers' order; equal logits stay together
    token = argmax of w[i] / E[i] over the kept tokens, the lowest id of equal ones

which is Gumbel-max (log w + Gumbel noise -log E): a kept token is drawn with its share of their weight. A temperature
of 0 or less is greedy: the first of the largest logits. k of 0 or less and p of 1 or more are off; the largest logit
always stays. A row with a NaN, or whose largest x is infinite, gives -1, which is no token.
logits: fp16, bf16 or float32 [T, V], V at most 2^19; seeds, positions: int64 [T]; temperature, top_p: float32 [T];
top_k: int32 [T]; tokens: int64 [T]. Nothing is read on the host. Bytes moved, of element size s: s T V from memory.

Every device gives the same token, alone or in a batch: `noise.py` computes w and E alike everywhere, and sums are of
integers (w in units of 2^-43), which have no order. The kernel finds the smallest kept logit by radix selection on its
bits, exactly: 4 bits a round, in which every program counts (or weighs) the logits of its slice at or above 16 pivots
and adds that to what others found. It reads the logits again from L2 where k or p is on. All is one launch, in which
the programs of a row wait for one another, where the device runs them all at once; else every part is a launch.
"""

from collections.abc import Callable

import torch

from repro.kernels import noise
from repro.kernels.launch_config import lacks, processors
from repro.kernels.operators import FLOATS, Argument, operator
from repro.kernels.prepared import Prepared, blank
from repro.kernels.triton_language import tl, triton

CASES = [  # rows, vocabulary, temperature, top k, top p, dtype, seed
    {"T": 3, "V": 1001, "temperature": 0.8, "top_k": 50, "top_p": 0.9, "dtype": "float32", "seed": 0},
    {"T": 1, "V": 4096, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "dtype": "bfloat16", "seed": 1},
    {"T": 1, "V": 32000, "temperature": 0.6, "top_k": 0, "top_p": 0.9, "dtype": "float16", "seed": 2},
    {"T": 1, "V": 128256, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "dtype": "bfloat16", "seed": 3},
    {"T": 8, "V": 128256, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "dtype": "bfloat16", "seed": 4},
    {"T": 8, "V": 128256, "temperature": 0.7, "top_k": 50, "top_p": 0.95, "dtype": "bfloat16", "seed": 5},
]
MAX_TOKEN = tl.constexpr(2**31 - 1)
UNIT = tl.constexpr(2.0**43)  # of weights as integers: 2^19 of at most 1 fit 63 bits


def make_inputs(case: dict, device: torch.device | str = "cpu") -> dict:
    """Keywords of the operator: logits of standard deviation 3; every row has the case's settings."""
    generator = torch.Generator().manual_seed(case["seed"])
    t = case["T"]
    logits = torch.randn(t, case["V"], generator=generator) * 3
    inputs = {
        "logits": logits.to(getattr(torch, case["dtype"])),
        "seeds": torch.randint(-(2**63), 2**63 - 1, (t,), generator=generator),
        "positions": torch.randint(4096, (t,), generator=generator),
        "temperature": torch.full((t,), float(case["temperature"])),
        "top_k": torch.full((t,), case["top_k"], dtype=torch.int32),
        "top_p": torch.full((t,), float(case["top_p"])),
    }
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def reference(
    logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """tokens int64 [T], by sorting."""
    sampled = (temperature > 0)[:, None]
    logits = logits.float()
    x = logits / torch.where(sampled, temperature[:, None], 1)
    largest = x.amax(1, keepdim=True)  # NaN if any is
    w = noise.weight(x - largest)
    score = w / noise.exponential(noise.words(seeds, positions, logits.shape[1]))
    score = torch.where(sampled, score.masked_fill(~kept(logits, w, top_k, top_p), -1), x)
    return torch.where(largest.isfinite()[:, 0], score.argmax(1), -1)


def kept(logits: torch.Tensor, w: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """bool [T, V]: the tokens that top-k and then top-p keep, of float32 logits and their weights w [T, V]."""
    ranked, order = logits.sort(1, descending=True)
    larger = torch.searchsorted(-ranked, -ranked)  # how many tokens have larger logits; all of them for NaN
    larger = larger.clamp(max=logits.shape[1] - 1)
    stay = (larger < top_k[:, None]) | (top_k <= 0)[:, None]
    mass = (w * UNIT.value).long().gather(1, order) * stay
    above = (mass.cumsum(1) - mass).gather(1, larger).double()
    stay &= (above < top_p[:, None].double() * mass.sum(1, keepdim=True)) | (top_p >= 1)[:, None] | (larger == 0)
    return torch.empty_like(stay).scatter(1, order, stay)


def unsupported(device: torch.device | str) -> str | None:
    """Why this kernel cannot run on `device`, or None if it can."""
    return lacks("sample", device)


@triton.jit
def ordered(value):  # noqa: ANN001, ANN201
    """The bits of logits as uint32 that are ordered like them; -0 is 0."""
    HALF: tl.constexpr = 1 << (value.dtype.primitive_bitwidth - 1)
    bits = value.to(tl.int16 if HALF == 32768 else tl.int32, bitcast=True).to(tl.int32)
    bits = tl.where(bits == -HALF, 0, bits)
    bits = (bits ^ ((bits >> 31) & (HALF - 1))).to(tl.uint32, bitcast=True)
    return (bits ^ HALF) & (2 * HALF - 1)


@triton.jit
def row_peak(notes, row, T, SLICES, PAD: tl.constexpr):  # noqa: ANN001, ANN201
    """The largest logit of a row as float32; NaN if any is."""
    part, least = tl.arange(0, PAD), float("-inf")
    bits = tl.load(notes + row * SLICES + part, mask=part < SLICES, other=0).to(tl.int32)
    peaks = tl.where(part < SLICES, bits.to(tl.float32, bitcast=True), least)
    return tl.where(tl.max((peaks != peaks).to(tl.int32), axis=0) > 0, float("nan"), tl.max(peaks, axis=0))


@triton.jit
def smallest_kept(sums, bases, row, k, p, T, turn, ROUNDS: tl.constexpr):  # noqa: ANN001, ANN201
    """`ordered` of the smallest kept logit as far as `turn` rounds, of ROUNDS for k and then p, know; 0 below."""
    pivot, done = tl.arange(0, 16), turn - 1
    total = tl.load(sums + (done * T + row) * 16 + pivot)
    every = tl.sum(tl.where(pivot == 0, total, 0), axis=0).to(tl.float64)
    enough = total.to(tl.float64) >= tl.maximum(p.to(tl.float64) * every, 1.0)
    reached = tl.where(turn <= ROUNDS, total >= k, enough)
    digit = tl.sum((reached & (pivot > 0)).to(tl.int32), axis=0)
    base = (digit << (ROUNDS - 1 - done % ROUNDS) * 4).to(tl.uint32, bitcast=True)
    before = tl.load(bases + done * T + row).to(tl.uint32)
    return tl.where(done % ROUNDS > 0, base + before, base)


@triton.jit
def peak(logits, notes, row, part, T, SLICES, V, SLICE: tl.constexpr, BLOCK: tl.constexpr):  # noqa: ANN001, ANN201
    """Note the largest logit of a slice and its token."""
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    at, wrong = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    for i in range(0, min(SLICE, V - part * SLICE), BLOCK):
        token = part * SLICE + i + tl.arange(0, BLOCK)
        value = tl.load(logits + row.to(tl.int64) * V + token, mask=token < V, other=float("-inf")).to(tl.float32)
        at, wrong = tl.where(value > best, token, at), wrong | (value != value).to(tl.int32)
        best = tl.where(value > best, value, best)
    top = tl.max(best, axis=0)
    to = notes + row * SLICES + part
    largest = tl.where(tl.max(wrong, axis=0) > 0, float("nan"), top)
    tl.store(to, largest.to(tl.int32, bitcast=True).to(tl.int64))
    tl.store(to + T * SLICES, tl.min(tl.where(best == top, at, V), axis=0).to(tl.int64))


@triton.jit
def search(  # noqa: ANN201
    logits, notes, sums, bases, row, part, heat, k, p, T, SLICES, V, turn,  # noqa: ANN001
    SLICE: tl.constexpr, BLOCK: tl.constexpr, PAD: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Count the logits of a slice at or above 16 pivots, or add up their weights, in round `turn`."""
    k_on, p_on = (heat > 0) & (k > 0), (heat > 0) & (p < 1)
    by_weight = turn >= ROUNDS
    floor, base = tl.zeros((), tl.uint32), tl.zeros((), tl.uint32)  # smallest logit that k keeps; the known digits
    if turn == ROUNDS:
        if k_on:
            floor = smallest_kept(sums, bases, row, k, p, T, turn, ROUNDS)
        tl.store(bases + turn * T + row, floor.to(tl.int64))  # by every program alike, as below
    elif turn > 0:
        if by_weight:
            floor = tl.load(bases + ROUNDS * T + row).to(tl.uint32)
        if (k_on & (turn < ROUNDS)) | (p_on & by_weight):
            base = smallest_kept(sums, bases, row, k, p, T, turn, ROUNDS)
        tl.store(bases + turn * T + row, base.to(tl.int64))
    if (k_on & (turn < ROUNDS)) | (p_on & by_weight):
        digit = tl.arange(0, 16) << (ROUNDS - 1 - turn % ROUNDS) * 4
        pivot = tl.where(tl.arange(0, 16) == 0, floor, base + digit.to(tl.uint32, bitcast=True))
        to = sums + (turn * T + row) * 16 + tl.arange(0, 16)
        if by_weight:
            largest = tl.div_rn(row_peak(notes, row, T, SLICES, PAD), heat)
            total = tl.zeros((16,), tl.int64)
            for i in range(0, min(SLICE, V - part * SLICE), BLOCK):
                token = part * SLICE + i + tl.arange(0, BLOCK)
                value = tl.load(logits + row.to(tl.int64) * V + token, mask=token < V, other=0.0)
                mass = (noise.weight_block(tl.div_rn(value.to(tl.float32), heat) - largest) * UNIT).to(tl.int64)
                mass = tl.where(token < V, mass, 0)
                total += tl.sum(tl.where(ordered(value)[:, None] >= pivot[None, :], mass[:, None], 0), axis=0)
            tl.atomic_add(to, total, sem="relaxed")
        else:
            count = tl.zeros((16,), tl.int32)
            for i in range(0, min(SLICE, V - part * SLICE), BLOCK):
                token = part * SLICE + i + tl.arange(0, BLOCK)
                value = tl.load(logits + row.to(tl.int64) * V + token, mask=token < V, other=0.0)
                above = (ordered(value)[:, None] >= pivot[None, :]) & (token < V)[:, None]
                count += tl.sum(above.to(tl.int32), axis=0)
            tl.atomic_add(to, count.to(tl.int64), sem="relaxed")


@triton.jit
def race(  # noqa: ANN201
    logits, seeds, positions, notes, sums, bases, row, part, heat, k, p, T, SLICES, V,  # noqa: ANN001
    SLICE: tl.constexpr, BLOCK: tl.constexpr, PAD: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Note the largest w / E of a slice and its token."""
    floor = tl.load(bases + ROUNDS * T + row).to(tl.uint32)
    if p < 1:
        floor = smallest_kept(sums, bases, row, k, p, T, 2 * ROUNDS, ROUNDS)
    largest = tl.div_rn(row_peak(notes, row, T, SLICES, PAD), heat)
    seed, position = tl.load(seeds + row), tl.load(positions + row)
    best, at = tl.full((BLOCK,), -1.0, tl.float32), tl.zeros((BLOCK,), tl.int32)
    for i in range(0, min(SLICE, V - part * SLICE), BLOCK):
        token = part * SLICE + i + tl.arange(0, BLOCK)
        value = tl.load(logits + row.to(tl.int64) * V + token, mask=token < V, other=0.0)
        kept = (token < V) & (ordered(value) >= floor)
        if tl.max(kept.to(tl.int32), axis=0) > 0:
            e = noise.exponential_block(noise.words_block(seed, position, part * SLICE + i, BLOCK))
            w = noise.weight_block(tl.div_rn(value.to(tl.float32), heat) - largest)
            ratio = tl.where(kept, tl.div_rn(w, e), -1.0)
            at = tl.where(ratio > best, token, at)
            best = tl.maximum(best, ratio)
    top = tl.max(best, axis=0)
    to = notes + 2 * T * SLICES + row * SLICES + part
    tl.store(to, top.to(tl.int32, bitcast=True).to(tl.int64))
    tl.store(to + T * SLICES, tl.min(tl.where(best == top, at, V), axis=0).to(tl.int64))


@triton.jit
def choose(notes, tokens, row, heat, T, SLICES, PAD: tl.constexpr):  # noqa: ANN001, ANN201
    """Write the token of the best slice."""
    part = tl.arange(0, PAD)
    top, inside = row_peak(notes, row, T, SLICES, PAD), part < SLICES
    at = notes + row * SLICES + part
    if heat > 0:
        top = tl.div_rn(top, heat)
        at += 2 * T * SLICES
    bits = tl.load(at, mask=inside, other=0).to(tl.int32)
    value = tl.where(inside, bits.to(tl.float32, bitcast=True), float("-inf"))
    token = tl.load(at + T * SLICES, mask=inside, other=0)
    token = tl.min(tl.where(value == tl.max(value, axis=0), token, MAX_TOKEN), axis=0)
    tl.store(tokens + row, tl.where(tl.abs(top) < float("inf"), token, -1).to(tl.int64))


@triton.jit
def wait_for_all(arrived, count):  # noqa: ANN001, ANN201
    """Return when `count` programs, each of them so often, have come here; what they wrote before can be read then."""
    tl.debug_barrier()  # every thread of this program has written
    here = tl.atomic_add(arrived, 1, sem="release")
    while here < count:
        here = tl.atomic_add(arrived, 0, sem="acquire")
    tl.debug_barrier()


@triton.jit(do_not_specialize=["begin", "end"])
def sample_kernel(  # noqa: ANN201
    logits, seeds, positions, temperature, top_k, top_p, sums, tokens, V, begin, end,  # noqa: ANN001
    SLICE: tl.constexpr, PAD: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Parts `begin` to `end` of: the peak, 2 ROUNDS of the search, the race, the choice."""
    row, part, T, SLICES = tl.program_id(0), tl.program_id(1), tl.num_programs(0), tl.num_programs(1)
    heat, k, p = tl.load(temperature + row), tl.load(top_k + row), tl.load(top_p + row)
    bases = sums + 2 * ROUNDS * T * 16
    notes = bases + 2 * ROUNDS * T
    arrived, count = notes + 4 * T * SLICES + row, 0
    for do in range(begin, end):
        searched = (do > 0) & (do <= 2 * ROUNDS)
        works = (heat > 0) & (((do <= ROUNDS) & (k > 0)) | ((do > ROUNDS) & (p < 1)))
        if do == 0:
            peak(logits, notes, row, part, T, SLICES, V, SLICE, 512)
        elif searched:
            search(logits, notes, sums, bases, row, part, heat, k, p, T, SLICES, V, do - 1, SLICE, 256, PAD, ROUNDS)
        elif do == 2 * ROUNDS + 1:
            if heat > 0:
                race(
                    logits, seeds, positions, notes, sums, bases, row, part, heat, k, p, T, SLICES, V, SLICE, 512, PAD,
                    ROUNDS,
                )  # fmt: skip
        elif part == 0:
            choose(notes, tokens, row, heat, T, SLICES, PAD)
        if (do + 1 < end) & (works | (not searched)):  # a round without k and p stores nothing that others read
            count += SLICES
            wait_for_all(arrived, count)
        else:
            tl.debug_barrier()  # what one thread of a program stored, all of them load


def launch(
    logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor,
    top_p: torch.Tensor, size: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """tokens of the operator by the kernel; the tensors are not checked.

    Args:
        logits, seeds, positions, temperature, top_k, top_p: as of the operator.
        size: logits of a slice, a power of two from 512 on, which changes no token; None: so many that there are about
            256 slices.
    """
    given = logits, seeds, positions, temperature, top_k, top_p
    return prepare(*given, size=size)(*given)


def prepare(
    logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor,
    top_p: torch.Tensor, size: int | None = None,
) -> Callable[..., torch.Tensor]:  # fmt: skip
    """The launches of the operator for calls like this one."""
    count, length = logits.shape
    rounds = logits.element_size() * 2
    size = size or min(max(triton.next_power_of_2(triton.cdiv(count * length, 256)), 512), 32768)
    slices = triton.cdiv(length, size)
    parts = 2 * rounds + 3
    # All programs of a launch have to run at once where they wait for one another: two of 4 warps fit an SM.
    together = logits.device.type == "cuda" and count * slices <= 2 * processors(logits.device)
    kernel = Prepared(
        sample_kernel, (count, slices), SLICE=size, PAD=triton.next_power_of_2(slices), ROUNDS=rounds,
        enable_fp_fusion=False, **({"launch_cooperative_grid": True} if together else {}),
    )  # fmt: skip
    alone = slices == 1  # and waits for nobody
    launches = [(0, parts)] if together or alone else [(part, part + 1) for part in range(parts)]
    notes = count * (2 * rounds * (16 + 1) + 4 * slices + 1)
    make_notes, make_tokens = blank(torch.int64, notes), blank(torch.int64, count)

    def launch(
        logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, temperature: torch.Tensor,
        top_k: torch.Tensor, top_p: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        notes, tokens = make_notes(logits).zero_(), make_tokens(logits)
        for begin, end in launches:
            kernel(logits, seeds, positions, temperature, top_k, top_p, notes, tokens, length, begin, end)
        return tokens

    return launch


def limit(logits: torch.Tensor, *_: object) -> str | None:
    """What is wrong with checked arguments, or None."""
    return f"logits of {logits.shape[1]} tokens; V is at most 2^19" if logits.shape[1] > 1 << 19 else None


sample = operator(
    "sample",
    reference,
    launch,
    {
        "logits": Argument(FLOATS, "T V"),
        "seeds": Argument((torch.int64,), "T"),
        "positions": Argument((torch.int64,), "T"),
        "temperature": Argument((torch.float32,), "T"),
        "top_k": Argument((torch.int32,), "T"),
        "top_p": Argument((torch.float32,), "T"),
    },
    empty=lambda logits, seeds, *rest: torch.empty_like(seeds),
    limit=limit,
    prepare=prepare,
)
