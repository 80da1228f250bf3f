"""The packed format: an exact round trip, and every code where the docstring says."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.kernels.packing import block_columns, dequantize, pack, unpack
from repro.models.lowbit import QuantizedWeight


def grid(rows, columns, bits, group, symmetric, seed=0):
    """Random codes, float16 scales and zeros."""
    rng = torch.Generator().manual_seed(seed)
    groups = columns // group if group else 1
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=rng, dtype=torch.uint8)
    scales = (torch.rand(rows, groups, generator=rng) + 0.1).half()
    zeros = None if symmetric else torch.randint(0, 1 << bits, (rows, groups), generator=rng).half()
    return codes, scales, zeros


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 50),
    groups=st.integers(1, 5),
    bits=st.sampled_from([2, 4, 8]),
    group=st.sampled_from([0, 32, 64, 128]),
    symmetric=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_packed_codes_are_unpacked_as_they_were(rows, groups, bits, group, symmetric, seed):
    columns = groups * group if group else 37 * groups
    codes, scales, zeros = grid(rows, columns, bits, group, symmetric, seed)
    packed = pack(codes, scales, zeros, bits, group)
    back, back_scales, back_zeros = unpack(packed)
    assert torch.equal(back, codes) and torch.equal(back_scales, scales)
    assert torch.equal(back_zeros, torch.full_like(scales, 1 << (bits - 1)) if symmetric else zeros)
    want = QuantizedWeight(codes, scales, back_zeros, bits, group).dequantize()
    assert torch.equal(dequantize(packed), want)
    stored = -(-rows // 16) * 16 * (-(-columns // block_columns(bits)) * block_columns(bits) * bits // 8)
    assert packed.nbytes == stored + -(-rows // 16) * 16 * packed.groups * (2 if symmetric else 4)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_every_code_is_where_the_docstring_says(bits):
    """Read the fragments off the packed words as a lane does, with the masks of the docstring."""
    rows, columns = 40, 3 * block_columns(bits) - 5
    codes, scales, zeros = grid(rows, columns, bits, 0, False)
    packed = pack(codes, scales, zeros, bits, 0)
    mask, kb, per_word = (1 << bits) - 1, block_columns(bits), 16 // bits
    words = packed.codes.numpy().astype("uint32")
    for tile in range(words.shape[0]):
        for block in range(words.shape[1]):
            for lane in range(32):
                g, t = divmod(lane, 4)
                for s in range(kb // 16):
                    for i in range(4):
                        word, j = divmod(4 * s + i, per_word)
                        pair = int(words[tile, block, lane, word]) >> (bits * j) & (mask << 16 | mask)
                        for half in range(2):
                            row = 16 * tile + g + 8 * (i % 2)
                            col = kb * block + 32 * (s // 2) + 8 * t + 4 * (s % 2) + 2 * (i // 2) + half
                            inside = row < rows and col < columns
                            assert pair >> (16 * half) & 0xFFFF == (codes[row, col] if inside else 0)
    assert torch.equal(packed.scale_zero[1, 0, 3, 1], torch.stack([scales[27, 0], zeros[27, 0]]))
    assert not packed.scale_zero[2, 0, :, 1].any()


def test_misuse_names_the_shapes():
    codes, scales, zeros = grid(8, 128, 4, 64, False)
    for bad, words in (
        (dict(bits=3), "3 bits"),
        (dict(group=48), "48 columns"),
        (dict(group=128), r"\[8, 2\], expected \[8, 1\]"),
        (dict(bits=2), "below 4"),
        (dict(scales=scales[:4]), r"\[4, 2\], expected \[8, 2\]"),
        (dict(scales=scales.float() * 1e6), "float16"),
        (dict(codes=codes[:, :100]), "8 x 100"),
        (dict(codes=codes[0]), r"\[128\]"),
    ):
        with pytest.raises(ValueError, match=words):
            pack(**(dict(codes=codes, scales=scales, zeros=zeros, bits=4, group=64) | bad))
