"""Read floor of a sparse product: a kernel that does little more than read the listed columns of a weight in zigzag.

A listed column is a line of 128 bytes and a header of 16 in every band of 256 rows, so that memory delivers pieces of
64 bytes, not one stream. Per program, the sum of all words that it reads, modulo 2^32.

Nothing asks to be kept in L2. When headers did, a ninth of the weight, they were still there when their copy's turn
came again, behind codes that were not kept, and the floor was not one of memory.
"""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from repro.bench.task import Task
from repro.kernels.triton_language import tl, triton

CONFIGS = []  # programs of a band, columns that each reads at a time, warps; the fastest is the floor
for splits in (8, 16, 32):
    for columns, warps in ((16, 1), (32, 2), (64, 4)):
        CONFIGS.append({"splits": splits, "columns": columns, "warps": warps})


@triton.jit
def listed_reader_kernel(  # noqa: ANN201
    words, headers, active, out, K, SPLITS: tl.constexpr, COLUMNS: tl.constexpr,  # noqa: ANN001
):  # fmt: skip
    band, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane, word, header = tl.arange(0, COLUMNS), tl.arange(0, 32), tl.arange(0, 4)
    count = tl.load(active).to(tl.int64)
    start, end = (count * part // SPLITS).to(tl.int32), (count * (part + 1) // SPLITS).to(tl.int32)
    total = tl.zeros((COLUMNS, 32), tl.int32)
    others = tl.zeros((COLUMNS, 4), tl.int32)
    for position in range(start, end, COLUMNS):
        here = (position + lane < end)[:, None]
        column = tl.load(active + 1 + position + lane, mask=position + lane < end, other=0)
        place = (band * K + column)[:, None]
        total += tl.load(words + place * 32 + word[None, :], mask=here, other=0, eviction_policy="evict_first")
        others += tl.load(headers + place * 4 + header[None, :], mask=here, other=0, eviction_policy="evict_first")
    all_words = tl.sum(tl.sum(total, axis=1), axis=0) + tl.sum(tl.sum(others, axis=1), axis=0)
    tl.store(out + band * SPLITS + part, all_words)


def launch(codes: Tensor, headers: Tensor, active: Tensor, config: Mapping[str, int]) -> Tensor:
    """int32 `[bands, splits]` by the kernel."""
    bands, columns = codes.shape[:2]
    out = torch.empty(bands, config["splits"], dtype=torch.int32, device=codes.device)
    listed_reader_kernel[(bands, config["splits"])](
        codes.view(torch.int32), headers.view(torch.int32), active, out, columns,
        SPLITS=config["splits"], COLUMNS=config["columns"], num_warps=config["warps"],
    )  # fmt: skip
    return out


def reference(codes: Tensor, headers: Tensor, active: Tensor, config: Mapping[str, int]) -> Tensor:
    """int32 `[bands, splits]`, one program after the other."""
    count, splits = int(active[0]), config["splits"]
    sums = codes.view(torch.int32).long().sum(2) + headers.view(torch.int32).long().sum(2)
    parts = []
    for part in range(splits):
        listed = active[1 + count * part // splits : 1 + count * (part + 1) // splits].long()
        parts.append(sums[:, listed].sum(1))
    return torch.stack(parts, 1).to(torch.int32)  # which keeps the low 32 bits


def tasks(codes: Tensor, headers: Tensor, active: Tensor) -> list[Task]:
    """A task for every configuration; on a CPU each is its reference."""
    made = []
    run = launch if codes.is_cuda else reference
    inputs: dict[str, Any] = {"codes": codes, "headers": headers}
    for config in CONFIGS:
        name = "listed reader, " + ", ".join(f"{key} {value}" for key, value in config.items())
        given = {"active": active, "config": config}
        nbytes = int(active[0]) * codes.shape[0] * (codes.shape[2] + headers.shape[2])
        launched, want = functools.partial(run, **given), functools.partial(reference, **given)
        made.append(Task(name, launched, inputs, want, 0.0, (), nbytes))
    return made
