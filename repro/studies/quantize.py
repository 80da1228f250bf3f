"""How long Q4_K takes for a large model: one block is quantized, the whole extrapolated. SpQt: 70B under five minutes.

    python -m repro.studies.quantize --device cuda

Random weights of the block's shapes are made on the device; reading and writing files is not in the time. The time of
the model is that of one block times the number of blocks, which is arithmetic (grade D), not a measurement.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from statistics import median

import torch

from repro.core.errors import UserError, sentence, unknown
from repro.methods.spqt.q4_k_weight import pack
from repro.specs import scale

LAYOUTS = ("row", "zigzag")


def block_shapes(model: str) -> tuple[list[tuple[int, int]], int]:
    """(N, K) of the linears of one block of a paper's model, and how many blocks it has.

    Raises:
        UserError: the shape is not known.
    """
    shape = scale.shape(model)
    if shape is None:
        raise unknown("shape", model, [name for name, pin in scale.pins().items() if pin.shape])
    linears = shape.linears
    return linears[: len(linears) // shape.layers], shape.layers


def seconds(shapes: Sequence[tuple[int, int]], layout: str, device: torch.device, repeats: int) -> list[float]:
    """Of quantizing all matrices of the shapes `(N, K)`, `repeats` times, after a warm-up; weights are random."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    generator = torch.Generator(device).manual_seed(0)
    times = []
    for repeat in range(repeats + 1):
        spent = 0.0
        for rows, columns in shapes if repeat else shapes[:1]:  # the first matrix warms up
            weight = 0.02 * torch.randn(rows, columns, generator=generator, device=device)
            wait()
            start = time.perf_counter()
            pack({"": weight}, layout)
            wait()
            spent += time.perf_counter() - start
        if repeat:
            times.append(spent)
    return times


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each layout."""
    parser = argparse.ArgumentParser(prog="python -m repro.studies.quantize", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="Llama-2-70B")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(arguments)
    try:
        shapes, blocks = block_shapes(args.model)
        if args.device.startswith("cuda") and not torch.cuda.is_available():
            raise UserError(f"device {args.device}: there is no CUDA device here; give --device cpu")
        if args.repeats < 1:
            raise UserError(f"repeats is {args.repeats}; it must be 1 or more")
    except UserError as error:
        print(sentence(error), file=sys.stderr)
        return 2
    device = torch.device(args.device)
    torch.set_num_threads(1)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "one CPU core"
    weights = sum(rows * columns for rows, columns in shapes)
    for layout in LAYOUTS:
        times = seconds(shapes, layout, device, args.repeats)
        spread = f"{median(times):.2f} s ({min(times):.2f} to {max(times):.2f})"
        print(f"{args.model} q4_k {layout} on {name}: one block of {weights:,} weights {spread}")
        print(f"    {blocks} blocks, extrapolated (grade D): {blocks * median(times):.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
