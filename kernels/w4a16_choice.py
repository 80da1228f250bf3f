"""Which configuration m tokens and a layer take in `w4a16_gemm.py`: a recorded one, or that with the least estimate.

`kernels/configs/<device>.json` has configurations of a layer for some numbers of tokens, `TOKENS`. Others take that of
the next one where it is for as many tokens as they need; where nothing is recorded, or tiles would be mostly empty, all
candidates of `w4a16_tiles.py` are estimated (`w4a16_estimates.py`).
"""

import itertools
from functools import lru_cache

import torch

from repro.kernels.launch_config import capability_of, launch_config, processors
from repro.kernels.w4a16_estimates import estimate
from repro.kernels.w4a16_plans import is_unrolled, runs, trimmed
from repro.kernels.w4a16_tiles import CANDIDATES, LEAST_MULTICAST, SEVERAL, tokens_of

TAIL = "w4a16_gemm_tail"  # where configurations for a second launch are recorded
HEAD = "w4a16_gemm_head"  # and how many tokens the first of two launches has: {"tokens": 448}, 0 for one launch
# Numbers of tokens: with configurations of their own; of those, each that serves all tokens above the one before it; as
# many as which fewer tokens are estimated.
TOKENS = (
    *(8, 12, 16, 24, 32, 40, 48, 56, 64, 72, 80, 96, 112, 128, 160, 192, 224, 256),
    *(288, 312, 320, 352, 360, 376, 384, 448, 456, 512, 640),
)
SERVED = (16, 24, 32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 288, 320, 384, 448, 512, 640)
ESTIMATED = (8, 12, 16, 24, 32, 40, 48, 64, 80)


def configuration(m: int, n: int, k: int, bits: int, device: torch.device | str, beside: bool = False) -> dict:
    """The tuned configuration, or that of all `CANDIDATES` with the least `estimate`.

    A launch `beside` another takes what is recorded as "w4a16_gemm_tail", if anything is, and no unrolled loop is
    chosen for it: what is fastest alone may have thread blocks or clusters that find no room beside others.

    Between tuned numbers of tokens and above the last one, the tuned configuration may be for tiles that m tokens
    do not fill: another is taken where its estimate for them is lower.
    """
    if config := serving_record(m, n, k, bits, device, beside):
        return config
    device = torch.device(device)
    tokens = next((t for t in ESTIMATED if m <= t), -(-m // 8) * 8)
    sizes = tokens, n, k, bits, processors(device)
    able = [cheapest(*sizes, capability_of(device), beside)]
    tuned = next_recorded(m, n, k, bits, device, beside)
    if tuned and (tokens >= LEAST_MULTICAST or "PAIR" not in tuned):
        # Of equal estimates it comes first where its tile is full: its stages are as many as fit beside that one.
        full = trimmed(tuned, m) == tokens_of(tuned)
        able.insert(0 if full else len(able), tuned)
    return min(able, key=lambda config: estimate(config, *sizes))


# ---- what is recorded


def tuning_key(case: dict) -> str:
    """The key of a case in the device's file: bits, the next tuned number of tokens, and shape."""
    tokens = next((t for t in TOKENS if case["M"] <= t), TOKENS[-1])
    return f"w{case['bits']} m{tokens} {case['N']}x{case['K']}"


def serving(m: int) -> list[int]:
    """The tuned numbers of tokens whose configuration m tokens take as it is; the first that is recorded counts."""
    last = next((t for t in SERVED if m <= t), -(-m // 8) * 8)
    return [t for t in TOKENS if m <= t <= last]


def serving_record(m: int, n: int, k: int, bits: int, device: torch.device | str, beside: bool = False) -> dict | None:
    """What is recorded for m tokens themselves, or for more that serve them, or None."""
    for tokens in serving(m):
        if config := recorded_for(tokens, n, k, bits, device, beside):
            return config
    return None


def recorded_head(m: int, n: int, k: int, bits: int, device: torch.device | str) -> int | None:
    """How many of m tokens have a launch of their own by a record, 0 if all have one launch; None without a record.

    A number of tokens has a record of its own or none: one for more tokens would count from far below on.
    """
    head = launch_config(HEAD, tuning_key({"M": m, "N": n, "K": k, "bits": bits}), device)
    if head and head["tokens"] < m:
        return head["tokens"]
    return 0 if serving_record(m, n, k, bits, device) else None


def recorded_for(
    tokens: int, n: int, k: int, bits: int, device: torch.device | str, beside: bool = False
) -> dict | None:
    """What is recorded for one of `TOKENS`, alone or `beside` another launch, or None."""
    key = tuning_key({"M": tokens, "N": n, "K": k, "bits": bits})
    return (beside and launch_config(TAIL, key, device)) or launch_config("w4a16_gemm", key, device)


def next_recorded(m: int, n: int, k: int, bits: int, device: torch.device, beside: bool = False) -> dict | None:
    """What is recorded for the next number of tokens with a record, m or more, or None.

    Above 256, if there is none, what is recorded for the largest number from there on: m tokens take several tiles.
    """
    enough = [tokens for tokens in TOKENS if tokens >= m]
    fewer = [tokens for tokens in reversed(TOKENS) if SEVERAL - 1 <= tokens < m]
    for tokens in enough + fewer:
        if config := recorded_for(tokens, n, k, bits, device, beside):
            return config
    return None


# ---- what is estimated


@lru_cache(maxsize=4096)
def cheapest(
    m: int, n: int, k: int, bits: int = 4, sms: int = 132, capability: tuple[int, int] = (9, 0), beside: bool = False
) -> dict[str, int]:
    """The candidate with the least `estimate` for m tokens and a weight `[n, k]` in groups of 128."""
    able = chosen_from(m, bits, capability, beside)
    return min(able, key=lambda config: estimate(config, m, n, k, bits, sms))


def chosen_from(m: int, bits: int, capability: tuple[int, int], beside: bool = False) -> list[dict[str, int]]:
    """The candidates for m tokens that a device runs; `beside` another launch none with an unrolled loop."""
    able = []
    for candidate in itertools.chain.from_iterable(CANDIDATES.values()):
        fits = candidate.suits(m, bits) and runs(candidate.config, capability)
        if fits and not (beside and is_unrolled(candidate.config)):
            able.append(candidate.config)
    return able
