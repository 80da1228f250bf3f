"""Bit-by-Bit's 2-bit kernels on a GPU: `python -m repro.bench.two_bit --out DIR`.

Three files of kernel times in DIR, as `python -m repro bench` writes them: whole after every shape, and gone on with
where they stop. `accept` takes each of them.

    table7.csv    the twelve shapes of Table 7, one token, cold and warm
    figure6.csv   products of an MLP and of 8B's attention with a tenth more input channels, one token, cold and warm
    tokens.csv    the shapes of table7.csv, 2 to 4 tokens, cold

Who is timed: W2A2 with activations quantized inside the launch, and ready as the paper has them; W2A16 of the same
codes; 16-bit products by the library and by our own kernel; and the readers of the same bytes, interleaved. Outputs
are compared with float64 of the same codes, in the first and in the last of the timed rounds.
"""

import argparse
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

from repro.bench import bench
from repro.core.errors import UserError
from repro.store import kernel_rows

WHO = ("w2a2-g32/", "w2-g32/", "bf16/bf16/dense_gemv")
MLP = ((8192, 3072), (3072, 8192), (14336, 4096), (4096, 14336))  # N x K, of Llama 3.2 3B and Llama 3 8B (Figure 6)
TABLE7 = (
    *((1024, 3072), (3072, 3072), *MLP[:2], (1024, 4096), (4096, 4096), *MLP[2:]),
    *((1024, 8192), (8192, 8192), (8192, 28672), (28672, 8192)),
)
GROUP, SPLIT = 32, 0.1  # input channels that share a scale, and the share of them that is split (section 4.1)


def wider(columns: int) -> int:
    """Columns of a layer of so many input channels when a tenth is split, in whole groups."""
    return -(-round(columns * (1 + SPLIT)) // GROUP) * GROUP


STEP = ((6144, 4096), (28672, 4096))  # q, k, v and gate, up of Llama 3 8B in one launch each
SPLIT_LAYERS = tuple((rows, wider(columns)) for rows, columns in (*MLP, *TABLE7[4:6]))  # of 8B with split channels, too
PARTS = {  # a file: shapes, tokens, modes
    "table7": (TABLE7, (1,), ("cold", "warm")),
    "figure6": (SPLIT_LAYERS, (1,), ("cold", "warm")),
    "tokens": (TABLE7, (2, 3, 4), ("cold",)),
}


def main(words: Sequence[str] | None = None) -> None:
    """Measure what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for the files")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="only files whose name contains one of these words"
    )
    args = parser.parse_args(words)
    try:
        run(args.out, bench.this_gpu(), args.only)
    except UserError as error:
        raise SystemExit(f"error: {error}") from None


def run(out: Path, device: bench.Device, only: Sequence[str] = ()) -> None:
    """Write the files; what the device can do at best is measured once.

    Raises:
        UserError: a kernel of ours was wrong or failed, and where.
    """
    device = dataclasses.replace(device, ceilings=functools.cache(device.ceilings))
    broken = []
    for name, (shapes, counts, modes) in PARTS.items():
        if only and not any(word in name for word in only):
            continue
        path = out / f"{name}.csv"
        rows = bench.bench(path, shapes, counts, modes, WHO, joule_seconds=0, resume=True, device=device)
        broken += [f"{row.label} at {row.N} x {row.K}: {row.note}" for row in rows if kernel_rows.broken_of_ours(row)]
    if broken:
        raise UserError(f"not right or failed: {'; '.join(broken)}")


if __name__ == "__main__":
    main()
