"""The packed weight format of every low-bit kernel here: codes in the order of the tensor core's operand.

A weight W [N, K] is codes q of b = 2, 4 or 8 bits with a scale and a zero per row and group: w = (q - zero) * scale.
It is the A operand of `mma.m16n8k16`, 16 rows x 16 columns per step. A block is 16 rows x KB columns, KB = 256 / b, so
that each of a warp's 32 lanes owns 128 bits of it: KB = 128, 64, 32 for b = 2, 4, 8. A block is 512 contiguous bytes.

    codes       int32   [ceil(N/16), ceil(K/KB), 32 lanes, 4 words]
    scale_zero  float16 [ceil(N/16), G, 8 (g), 2 (rows g, g+8), 2 (scale, zero)]
    symmetric           [ceil(N/16), G, 8, 2], scales only

Lane 4 g + t (g < 8, t < 4) holds in step s = 0 ... KB/16 - 1 four half2 registers:

    a0 = (row g, e = 0, 1)    a1 = (row g+8, e = 0, 1)    a2 = (row g, e = 2, 3)    a3 = (row g+8, e = 2, 3)
    column of (t, s, e) = 32 (s // 2) + 8 t + 4 (s % 2) + e

so that a lane needs 8 consecutive activations, one 16-byte load, for two steps, and 32 consecutive columns are always
of one group. Register r = 4 s + i is in word r // P, P = 16 / b: bits [b j, b j + b) hold its low half's code and
[16 + b j, ...) its high half's, j = r % P. Hence `(word >> b j) & 0x000F000F` (4 bits) is a half2 of codes as float16
subnormals, code * 2^-24: no bias and no conversion, and the constant is part of the row's last factor.

N is padded with rows of scale 0, K with codes 0, whose activations the kernels read as 0. Bytes per weight:
b / 8 + 4 / group (2 / group if symmetric).
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from repro.kernels.operators import VECTOR, Argument

BITS = (2, 4, 8)
GROUPS = (0, 32, 64, 128)
TILE = 16  # rows of a block
MOST_SCALE = 128  # keeps scale * code far below the largest float16


def block_columns(bits: int) -> int:
    """KB, the columns of a block: 128, 64 or 32 for 2, 4 or 8 bits."""
    return 256 // bits


@dataclass(frozen=True)
class PackedWeight:
    """A packed weight `[rows, columns]`; the module's docstring has the layout.

    Attributes:
        codes: int32 `[ceil(rows/16), ceil(columns/KB), 32, 4]`.
        scale_zero: float16 `[ceil(rows/16), G, 8, 2, 2]`, or `[ceil(rows/16), G, 8, 2]` if symmetric.
        bits: 2, 4 or 8.
        group: columns per group, 32, 64 or 128; 0 is one group a row.
        rows: N, without padding.
        columns: K, without padding.
        symmetric: no zeros are stored; every zero is 2^(bits-1).
    """

    codes: Tensor
    scale_zero: Tensor
    bits: int
    group: int
    rows: int
    columns: int
    symmetric: bool

    def __post_init__(self) -> None:
        form = self.bits, self.group, self.rows, self.columns, self.symmetric
        if sentence := misfit(self.codes.shape, self.scale_zero.shape, *form):
            raise ValueError(sentence)
        for name, tensor, dtype in (("codes", self.codes, torch.int32), ("scale_zero", self.scale_zero, torch.float16)):
            if tensor.dtype != dtype:
                raise ValueError(f"{name} is {tensor.dtype}, expected {dtype}")

    @property
    def groups(self) -> int:
        """G, groups of a row."""
        return self.columns // self.group if self.group else 1

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zeros: what a kernel must read."""
        return self.codes.nbytes + self.scale_zero.nbytes

    def to(self, device: torch.device | str) -> "PackedWeight":
        """The same weight on another device."""
        return PackedWeight(
            self.codes.to(device),
            self.scale_zero.to(device),
            self.bits,
            self.group,
            self.rows,
            self.columns,
            self.symmetric,
        )


def misfit(
    codes: torch.Size, scale_zero: torch.Size, bits: int, group: int, rows: int, columns: int, symmetric: bool
) -> str | None:
    """What is wrong with the shapes of a packed weight's tensors, or with its grid, in a sentence; None if nothing."""
    sizes = (*codes, *scale_zero, rows, columns)
    if all(type(size) is int for size in sizes):
        return _misfit(codes, scale_zero, bits, group, rows, columns, symmetric)
    # A graph that is traced has symbols for sizes, which are no key of a cache.
    shapes = torch.Size(map(int, codes)), torch.Size(map(int, scale_zero))
    return _misfit(*shapes, int(bits), int(group), int(rows), int(columns), bool(symmetric))


@lru_cache(maxsize=4096)
def _misfit(
    codes: torch.Size, scale_zero: torch.Size, bits: int, group: int, rows: int, columns: int, symmetric: bool
) -> str | None:
    if sentence := _no_grid(rows, columns, bits, group):
        return sentence
    tiles = -(-rows // TILE)
    groups = columns // group if group else 1
    want_codes = (tiles, -(-columns // block_columns(bits)), 32, 4)
    want_scales = (tiles, groups, 8, 2) if symmetric else (tiles, groups, 8, 2, 2)
    for name, shape, expected in (("codes", codes, want_codes), ("scale_zero", scale_zero, want_scales)):
        if tuple(shape) != expected:
            return f"{name} {list(shape)} must be {list(expected)} for a weight of {rows} x {columns}"
    return None


def _no_grid(rows: int, columns: int, bits: int, group: int) -> str | None:
    if bits not in BITS:
        return f"codes of {bits} bits: expected one of {BITS}"
    if group not in GROUPS:
        return f"groups of {group} columns: expected one of {GROUPS}, 0 for one group a row"
    if rows < 1 or columns < 1 or (group and columns % group):
        return f"a weight of {rows} x {columns} does not divide into groups of {group} columns"
    return None


TENSORS = {  # of a packed weight, as arguments of an operator
    "codes": Argument((torch.int32,), "N/16 K/KB 32 4", VECTOR),
    "scale_zero": Argument((torch.float16,), "N/16 ...", VECTOR),
}


def pack(codes: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, group: int) -> PackedWeight:
    """Put codes, scales and zeros into the packed format.

    Args:
        codes: uint8 `[N, K]`, each below 2^bits.
        scales: `[N, G]`, rounded to float16.
        zeros: `[N, G]`, rounded to float16 (integers up to 2048 are exact), or None for symmetric weights.
        bits: 2, 4 or 8.
        group: columns per group, 32, 64 or 128; 0 is one group a row.

    Raises:
        ValueError: shapes that do not fit together, codes of more than `bits` bits, scales that are not below 128.
    """
    if codes.ndim != 2:
        raise ValueError(f"codes are {list(codes.shape)}, expected [N, K]")
    rows, columns = codes.shape
    if sentence := _no_grid(rows, columns, bits, group):
        raise ValueError(sentence)
    groups = columns // group if group else 1
    for name, tensor in (("scales", scales), ("zeros", zeros)):
        if tensor is not None and tuple(tensor.shape) != (rows, groups):
            raise ValueError(f"{name} are {list(tensor.shape)}, expected {[rows, groups]} for {rows} x {columns} codes")
    if codes.dtype != torch.uint8 or int(codes.max()) >= 1 << bits:
        raise ValueError(f"codes are {codes.dtype} up to {int(codes.max())}, expected uint8 below {1 << bits}")
    scales = scales.to(torch.float16)
    if not (scales.abs() < MOST_SCALE).all():
        raise ValueError(f"scales of {rows} x {columns} weights are not all below {MOST_SCALE} (float16 products)")

    kb = block_columns(bits)
    tiles, blocks = -(-rows // TILE), -(-columns // kb)
    padded = codes.new_zeros(tiles * TILE, blocks * kb)
    padded[:rows, :columns] = codes
    # Columns are (block, s // 2, t, s % 2, pair, half), rows (tile, row >= 8, g); the lanes' axes come first.
    view = padded.view(tiles, 2, 8, blocks, kb // 32, 4, 2, 2, 2).permute(0, 3, 2, 5, 4, 6, 7, 1, 8)
    fields = view.reshape(tiles, blocks, 32, 4, 16 // bits, 2).to(torch.int32)
    words = (fields << _shifts(bits, codes.device)).sum((-1, -2), dtype=torch.int32)

    parts = [scales] if zeros is None else [scales, zeros.to(torch.float16)]
    pairs = torch.zeros(tiles * TILE, groups, len(parts), dtype=torch.float16, device=codes.device)
    pairs[:rows] = torch.stack(parts, -1)
    pairs = pairs.view(tiles, 2, 8, groups, len(parts)).permute(0, 3, 2, 1, 4)
    scale_zero = (pairs[..., 0] if zeros is None else pairs).contiguous()
    return PackedWeight(words, scale_zero, bits, group, rows, columns, zeros is None)


def _shifts(bits: int, device: torch.device) -> Tensor:
    """int32 `[P, 2]`: the bit at which half h of a word's register j begins."""
    register = torch.arange(16 // bits, dtype=torch.int32, device=device) * bits
    return register[:, None] + torch.tensor([0, 16], dtype=torch.int32, device=device)


def unpack(packed: PackedWeight) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of `pack`: codes uint8 `[N, K]`, scales and zeros float16 `[N, G]`."""
    tiles, blocks = packed.codes.shape[:2]
    kb = block_columns(packed.bits)
    rows = packed.rows
    columns = packed.columns
    words = packed.codes[..., None, None] >> _shifts(packed.bits, packed.codes.device)
    fields = (words & ((1 << packed.bits) - 1)).to(torch.uint8)
    view = fields.view(tiles, blocks, 8, 4, kb // 32, 2, 2, 2, 2).permute(0, 7, 2, 1, 4, 3, 5, 6, 8)
    codes = view.reshape(tiles * TILE, blocks * kb)[:rows, :columns].contiguous()

    pairs = packed.scale_zero
    if packed.symmetric:
        pairs = torch.stack([pairs, torch.full_like(pairs, 1 << (packed.bits - 1))], -1)
    pairs = pairs.permute(0, 3, 2, 1, 4).reshape(tiles * TILE, packed.groups, 2)[:rows]
    return codes, pairs[..., 0].contiguous(), pairs[..., 1].contiguous()


def dequantize(packed: PackedWeight) -> Tensor:
    """The dequantized weight, float32 `[N, K]`."""
    codes, scales, zeros = unpack(packed)
    group = torch.arange(packed.columns, device=codes.device) // (packed.group or packed.columns)
    return (codes.float() - zeros.float()[:, group]) * scales.float()[:, group]
