"""Measured shapes, and stored times of peers that cannot run here, from a CSV of their own.

`rescale` rescales them to another run by the ratio of that run's bf16 matmul to the stored one, marked so.
"""

import functools
import io
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from repro.core.errors import UserError
from repro.core.files import ROOT, read_text

COUNTS = (1, 4, 8, 16, 64, 256, 512, 1024, 2048)  # activation rows; the last three: prefill, of those made for it
STORED = ROOT / "results" / "nvidia-h200" / "peers-recorded.csv.xz"
TYPES = {
    **{"peer": str, "N": int, "K": int, "M": int, "mode": str, "us": float, "bytes": int, "relerr": float},
    **{"floor_us": float, "device": str, "date": str, "environment": str},
}
LIBRARY = "cublas_bf16"  # the bf16 matmul among the stored
GEMLITE_VARIANTS = ("", "_kc", "_h100cfg", "_h100cfg_kc", "max", "max_kc", "p8", "p8_kc")  # of packing and tuning
RESCALED_PEERS = (  # peers that do not run here: who, what they compute, and their stored variants; the fastest counts
    ("awq_gemv", "w4-g128", "fp16", ("awq_gemv_g128",)),
    ("marlin", "w4-g128", "fp16", ("marlin_g128", "marlin_g128_t64x256")),
    *(
        ("gemlite-recorded", kernel, "fp16", tuple(name + variant for variant in GEMLITE_VARIANTS))
        for kernel, name in (("w4-g128", "gl_w4g128"), ("w2-g64", "gl_w2g64"))
    ),
)


@functools.cache
def times(path: Path = STORED) -> tuple[Any, ...]:
    """The stored times, one a named tuple with the columns of `TYPES`; a file is read once.

    Raises:
        UserError: the file is missing or is not such a file.
    """
    import pandas as pd

    try:
        lines = io.StringIO(read_text(path))
        frame = pd.read_csv(lines, usecols=list(TYPES), dtype=TYPES, float_precision="round_trip")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file of stored peers") from None
    except ValueError as error:
        raise UserError(f"{path}: not a file of stored peers ({error})") from None
    return tuple(frame.itertuples(index=False, name="Record"))


def rescale(
    here: Mapping[tuple[int, int, int, str], float], records: Iterable[Any], peers: Collection[str]
) -> list[tuple[Any, float, float]]:
    """The fastest of some stored peers on each shape, rescaled by the library's ratio in this run.

    Args:
        here: microseconds of the bf16 matmul of this run by (N, K, M, mode).
        records: of peers and of the library.
        peers: names of variants of one peer.

    Returns:
        (record, ratio of the library here to then, microseconds rescaled) wherever both runs have the library.
    """
    records = sorted(records, key=lambda r: r.us)
    then = {(r.N, r.K, r.M, r.mode): r.us for r in records if r.peer == LIBRARY}
    fastest: dict[tuple, Any] = {}
    for r in records:
        shape = (r.N, r.K, r.M, r.mode)
        if r.peer in peers and shape in here and shape in then:
            fastest.setdefault(shape, r)
    ratios = {shape: here[shape] / then[shape] for shape in fastest}
    return [(r, ratios[shape], r.us * ratios[shape]) for shape, r in fastest.items()]


def shapes() -> list[tuple[int, int]]:
    """(N, K) of every layer for which peers are stored with cold weights, smallest first."""
    return sorted({(r.N, r.K) for r in times() if r.mode == "cold"}, key=lambda s: (s[0] * s[1], s))
