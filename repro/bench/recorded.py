"""Peers that cannot be run here at all: what was measured of them once, in a CSV of their own.

`bridge` rescales them to another run by the ratio of that run's bf16 matmul to the recorded one, marked so.
"""

import csv
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from repro.errors import UserError
from repro.files import ROOT

COLD = "cold"
RECORDED = ROOT / "results" / "nvidia-h200" / "peers-recorded.csv"
GEMLITE_VARIANTS = ("", "_kc", "_h100cfg", "_h100cfg_kc", "max", "max_kc", "p8", "p8_kc")  # of packing and tuning
BRIDGED = (  # peers that do not run here: who, what they compute, and their recorded variants; the fastest counts
    ("awq_gemv", "w4-g128", "fp16", ("awq_gemv_g128",)),
    ("marlin", "w4-g128", "fp16", ("marlin_g128", "marlin_g128_t64x256")),
    *(
        ("gemlite-recorded", kernel, "fp16", tuple(name + variant for variant in GEMLITE_VARIANTS))
        for kernel, name in (("w4-g128", "gl_w4g128"), ("w2-g64", "gl_w2g64"))
    ),
)


@dataclass(frozen=True)
class Record:
    """One recorded time of a peer that does not run here."""

    peer: str
    N: int
    K: int
    M: int
    mode: str
    us: float
    bytes: int
    relerr: float | None
    floor_us: float | None
    device: str
    date: str
    environment: str


@functools.cache
def recorded(path: Path = RECORDED) -> tuple[Record, ...]:
    """The recorded peers; a file is read once.

    Raises:
        UserError: the file is missing or is not such a file.
    """
    try:
        with open(path, encoding="utf-8", newline="") as file:
            lines = list(csv.DictReader(file))
        numbers = {"N": int, "K": int, "M": int, "us": float, "bytes": int, "relerr": float, "floor_us": float}
        return tuple(
            Record(**{k: (numbers[k](v) if v else None) if k in numbers else v for k, v in line.items()})
            for line in lines
        )
    except FileNotFoundError:
        raise UserError(f"{path}: no such file of recorded peers") from None
    except (TypeError, ValueError, csv.Error) as error:
        raise UserError(f"{path}: not a file of recorded peers ({error})") from None


def bridge(
    here: Mapping[tuple[int, int, int, str], float],
    records: Iterable[Record],
    peers: Iterable[str],
    library: str = "cublas_bf16",
) -> list[tuple[Record, float, float]]:
    """Recorded peers rescaled by the library's ratio in this run.

    Args:
        here: microseconds of the bf16 matmul of this run by (N, K, M, mode).
        records: of peers and of the library.
        peers: names to carry over.
        library: the name of the bf16 matmul among the records.

    Returns:
        (record, ratio of the library here to then, microseconds bridged) wherever both runs have the library.
    """
    records, wanted = list(records), set(peers)
    then = {(r.N, r.K, r.M, r.mode): r.us for r in records if r.peer == library}
    found = []
    for r in records:
        place = (r.N, r.K, r.M, r.mode)
        if r.peer in wanted and place in here and place in then:
            ratio = here[place] / then[place]
            found.append((r, ratio, r.us * ratio))
    return found


def shapes(mode: str = COLD) -> list[tuple[int, int]]:
    """(N, K) of every layer for which peers are recorded, smallest first."""
    return sorted({(r.N, r.K) for r in recorded() if r.mode == mode}, key=lambda s: (s[0] * s[1], s))
