"""What compilers make of the sources of `w4a16_gemm.py`: no spills, no waits between products, no illegal addresses."""

import re
from itertools import chain

import nvcc
import pytest
from w4a16 import LARGEST, some_slow

from repro.kernels import w4a16_choice, w4a16_plans, w4a16_tiles, w8a8_gemv, wna16_gemv


@nvcc.NEEDS_NVCC
@pytest.mark.parametrize(
    "arch", [pytest.param("sm_80", marks=pytest.mark.slow), "sm_90a", pytest.param("sm_100", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("bits, group, symmetric, bf16", [(4, 128, 0, 0), (4, 0, 1, 1), (2, 64, 0, 1), (8, 32, 1, 0)])
def test_the_source_compiles(arch, bits, group, symmetric, bf16):
    """Ahead of time for three architectures, both kernels of the source, without spilling; products do not wait."""
    chosen = [w4a16_choice.cheapest(m, 4096, 4096, capability=(8, 0)) for m in (16, 64)]
    tiles = [tile | {"SPLIT": 1 if arch == "sm_80" else 2} for tile in chosen]
    for constants in ({}, *(w4a16_plans.fitted(tile, bits, group, bool(symmetric)) for tile in tiles)):
        macros = {"BITS": bits, "GROUP": group, "SYMMETRIC": symmetric, "BF16": bf16, **constants}
        report = nvcc.ptxas_report(w4a16_plans.SOURCE, macros, arch)
        assert "0 bytes spill stores" in report and "serialized" not in report


FORM = {"BITS": 4, "GROUP": 128, "SYMMETRIC": 0, "BF16": 1}
COMPILED = [*w4a16_tiles.ANY_WGMMA_TILES[:13:2], w4a16_tiles.ANY_WGMMA_TILES[-1]]


@nvcc.NEEDS_NVCC
@pytest.mark.parametrize("group, symmetric, bf16", [(128, 0, 0), (0, 1, 1), (32, 0, 1)])
@pytest.mark.parametrize("tile", some_slow(COMPILED, (0, 3, 6)), ids=str)
def test_the_source_with_wgmma_compiles(tile, group, symmetric, bf16):
    """For the one architecture that has the instruction, without spilling; products do not wait."""
    config, tokens = dict(zip(w4a16_tiles.WGMMA_OF_64S, (*tile, 2))), 64 * tile[1] - 40
    source, plan = w4a16_plans.plan_of(config, tokens, 4096, 4096, (4, group, bool(symmetric)), (9, 0))
    assert source == w4a16_plans.WGMMA_SOURCE and plan.macros["MT"] == tokens
    macros = {"BITS": 4, "GROUP": group, "SYMMETRIC": symmetric, "BF16": bf16, **plan.macros}
    report = nvcc.ptxas_report(source, macros)
    assert "serialized" not in report
    if (tile[0], group) != (4, 32):  # five warpgroups leave 96 registers each, four scales of a stage take a few more
        assert "0 bytes spill stores" in report


@nvcc.NEEDS_NVCC
@pytest.mark.parametrize("config, tokens", [
    (dict(zip(w4a16_tiles.WGMMA, (4, 96, 64, 5, 6, 2))), 96),
    (dict(zip(w4a16_tiles.MULTICAST, (4, 128, 4, 3, 1))) | {"PAIR": 1}, 128),
    (LARGEST | {"SPLIT": 2}, 336), (LARGEST | {"SPLIT": 2}, 352),
])  # fmt: skip
def test_the_largest_tiles_compile(config, tokens):
    """What holds the most sums in its registers does not spill, and no product waits for another."""
    source, plan = w4a16_plans.plan_of(config, tokens, 4096, 4096, (4, 128, False), (9, 0))
    assert plan.macros["MT"] == tokens
    report = nvcc.ptxas_report(source, {**FORM, "HEAD": 1, **plan.macros})
    assert "0 bytes spill stores" in report and "serialized" not in report


KNOWN_WGMMA = {"KNOWN": 1, "SCALED": 0}


@nvcc.NEEDS_NVCC
@pytest.mark.parametrize("config, tokens, columns", [
    (dict(zip(w4a16_tiles.WGMMA, (4, 32, 128, 5, 5, 2))) | KNOWN_WGMMA, 32, 4096),
    (dict(zip(w4a16_tiles.WGMMA, (3, 48, 128, 5, 5, 5))) | KNOWN_WGMMA, 48, 14336),
    ({"WGS": 4, "MT": 128, "STAGES": 4, "RING": 4, "SPLIT": 1, "PAIR": 1, "KNOWN": 1}, 104, 8192),
    (dict(zip(w4a16_tiles.MULTICAST, (4, 160, 4, 2, 1))) | {"PAIR": 1, "KNOWN": 1, "PRODUCER": 0}, 160, 8192),
    (dict(zip(w4a16_tiles.MULTICAST, (4, 160, 4, 2, 1))) | {"PAIR": 1, "KNOWN": 1, "PRODUCER": 0}, 136, 4096),
    (dict(zip(w4a16_tiles.MULTICAST, (3, 224, 4, 2, 2))) | {"PAIR": 1, "KNOWN": 1, "PRODUCER": 0}, 224, 4096),
    (dict(zip(w4a16_tiles.MULTICAST, (3, 128, 6, 3, 5))) | {"PAIR": 1, "KNOWN": 1}, 128, 14336),
    (dict(zip(w4a16_tiles.MULTICAST, (3, 192, 4, 2, 4))) | {"PAIR": 1, "KNOWN": 1}, 192, 5120),
    (dict(zip(w4a16_tiles.MULTICAST_OF_64S, (3, 6, 3, 1))) | {"PAIR": 1, "KNOWN": 1}, 192, 4096),
    (dict(zip(w4a16_tiles.MULTICAST_OF_64S, (4, 4, 2, 2))) | {"PAIR": 1, "KNOWN": 1}, 256, 8192),
], ids=(
    "few", "uneven", "four", "no producer", "136", "three without", "three", "large three", "two", "large two",
))  # fmt: skip
def test_the_unrolled_loop_compiles(config, tokens, columns):
    """No spills, and no product waits for another."""
    source, plan = w4a16_plans.plan_of(config, tokens, 14336, columns, (4, 128, False), (9, 0))
    assert plan.macros["MT"] == tokens and plan.macros["COLUMNS"] == columns
    report = nvcc.ptxas_report(source, {**FORM, **plan.macros})
    assert "0 bytes spill stores" in report and "serialized" not in report


@nvcc.NEEDS_NVCC
@pytest.mark.parametrize("config, m", [
    (w4a16_choice.cheapest(16, 4096, 4096), 16), (dict(zip(w4a16_tiles.WGMMA, (4, 96, 64, 5, 6, 2))), 40),
    (dict(zip(w4a16_tiles.MULTICAST_OF_64S, (2, 6, 4, 1))) | {"PAIR": 1}, 100),
], ids=("mma", "wgmma", "multicast"))  # fmt: skip
def test_two_launches_say_when_the_second_begins_and_ends(config, m):
    """The first lets the second begin, which waits for the first to end; a launch alone does neither."""
    source, plan = w4a16_plans.plan_of(config, m, 4096, 4096, (4, 128, False), (9, 0))
    controls = {}
    for part in ("alone", "HEAD", "TAIL"):
        macros = {**FORM, **plan.macros} if part == "alone" else {**FORM, **plan.macros, part: 1}
        controls[part] = re.findall(r"griddepcontrol\.(\w+)", nvcc.ptx(source, macros))
    waits = [] if "PAIR" in config else ["wait"]  # never the second launch
    assert controls == {"alone": [], "HEAD": ["launch_dependents"], "TAIL": waits}


@nvcc.NEEDS_DISASSEMBLER
@pytest.mark.parametrize("config, tokens, bits", [
    ({"WGS": 4, "MT": 32, "KS": 128, "STAGES": 5, "RING": 5, "SPLIT": 2}, 32, 4),
    ({"WGS": 4, "MT": 32, "KS": 128, "STAGES": 6, "RING": 4, "SPLIT": 2} | KNOWN_WGMMA, 24, 8),
    ({"WGS": 4, "MT": 48, "KS": 128, "STAGES": 4, "RING": 4, "SPLIT": 2} | KNOWN_WGMMA, 40, 4),
    (w4a16_choice.cheapest(16, 4096, 4096), 16, 4),
], ids=("arguments", "turns too long", "turns", "mma"))  # fmt: skip
def test_no_copy_has_a_shared_address_that_no_device_takes(config, tokens, bits):
    """ptxas 13.0 writes a register and a uniform one beside a cache policy, an illegal instruction when it runs."""
    source, plan = w4a16_plans.plan_of(config, tokens, 4096, 4096, (bits, 128, False), (9, 0))
    code = nvcc.sass(source, {"BITS": bits, "GROUP": 128, "SYMMETRIC": 0, "BF16": 1} | plan.macros)
    copies = re.findall(r"LDGSTS\S* \[([^]]*)\]", code)
    assert copies and not [address for address in copies if "+UR" in address]


def test_headers_take_no_name_that_a_kernel_is_given():
    headers = [header.read_text() for header in w4a16_plans.SOURCE.parent.glob("*.cuh")]
    taken = set(chain.from_iterable(re.findall(r"#\s*(?:define|undef)\s+(\w+)", header) for header in headers))
    assert len(headers) == 10
    given = {
        *w4a16_tiles.MMA,
        "COLUMNS",
        *w4a16_tiles.WGMMA_OF_64S,
        *w4a16_tiles.MULTICAST_OF_64S,
        "PAIR",
        "CLUSTER",
        "PRODUCER",
        "BITS",
        "GROUP",
        "SYMMETRIC",
        "BF16",
        "K",
        "HEAD",
        "TAIL",
        "RANK",
        "RANKS",
    }
    for config in (*wna16_gemv.SPACE, *w8a8_gemv.SPACE):
        given |= {name.upper() for name in config}
    assert not taken & given
