"""W4A16 GEMM: the kernel's index arithmetic lane by lane, the operator on a CPU, misuse, and that it compiles."""

import functools
import re
from itertools import chain

import cuda_on_cpu
import nvcc
import pytest
import torch

from repro.kernels import (
    dequantize,
    nvrtc,
    packing,
    w4a16_choice,
    w4a16_estimates,
    w4a16_gemm,
    w4a16_plans,
    w4a16_tiles,
    w8a8_gemv,
    wna16_gemv,
)
from repro.kernels.launch_config import configurations


def random_weight(rows, columns, bits, group, symmetric=False, seed=0):
    case = {"N": rows, "K": columns, "bits": bits, "group": group, "symmetric": symmetric, "seed": seed}
    return w4a16_gemm.random_weight(case)


def weight(packed):
    names = ("codes", "scale_zero", "bits", "group", "rows", "columns", "symmetric")
    return [getattr(packed, name) for name in names]


def error(got, want):
    return float((got.float() - want.float()).norm() / want.float().norm())


BOUND = {"float16": 1e-3, "bfloat16": 4e-3}
SOURCE_CASES = [  # bits, group, symmetric, type, tokens, rows, columns; MT RT WR WK KS STAGES SPLIT
    (4, 128, False, "float16", 5, 40, 384, (16, 1, 1, 2, 256, 3, 1)),
    (4, 128, False, "bfloat16", 19, 70, 640, (16, 2, 2, 1, 128, 2, 2)),
    (4, 32, True, "float16", 33, 32, 512, (32, 1, 2, 2, 256, 3, 4)),
    (4, 64, False, "bfloat16", 64, 33, 320, (64, 2, 1, 1, 128, 3, 1)),
    (2, 64, False, "float16", 9, 24, 576, (16, 1, 1, 2, 256, 4, 2)),
    (2, 0, True, "bfloat16", 70, 48, 296, (64, 1, 2, 1, 128, 2, 1)),
    (8, 0, True, "float16", 17, 65, 264, (24, 1, 1, 2, 128, 2, 2)),
    (8, 128, False, "bfloat16", 40, 16, 384, (32, 1, 1, 1, 128, 4, 1)),
    (4, 0, False, "float16", 130, 96, 200, (64, 2, 2, 2, 256, 2, 1)),
    (4, 64, False, "bfloat16", 19, 300, 576, (24, 2, 7, 2, 256, 3, 1)),
    (4, 128, False, "bfloat16", 37, 100, 1152, (40, 1, 3, 4, 512, 4, 1)),
    (4, 128, False, "float16", 3, 100, 768, (8, 1, 6, 2, 256, 3, 2)),
    (4, 128, False, "bfloat16", 5, 48, 1024, (8, 1, 1, 2, 256, 2, 4)),  # one unit: three blocks only send
    (4, 128, False, "bfloat16", 11, 40, 384, (12, 1, 1, 2, 256, 3, 1)),  # units of eight and of four tokens
    (8, 64, True, "float16", 30, 70, 640, (12, 2, 2, 1, 128, 2, 2)),  # three tiles of such
]


def some_slow(cases, always):
    """Each case is compiled by itself; those that always run have every width, group, dtype and kind of tile."""
    return [pytest.param(case, marks=() if i in always else pytest.mark.slow) for i, case in enumerate(cases)]


@cuda_on_cpu.NEEDS_COMPILER
@pytest.mark.parametrize("case", some_slow(SOURCE_CASES, (1, 2, 4, 7, 8, 10, 11, 12, 14)), ids=str)
def test_source_on_the_cpu(case, monkeypatch):
    """The .cu file itself: staged copies and their waits, swizzle, fragments, folds, ragged ends, clusters."""
    bits, group, symmetric, dtype, m, rows, columns, numbers = case
    monkeypatch.setattr(nvrtc, "load", cuda_on_cpu.load)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    packed = random_weight(rows, columns, bits, group, symmetric)
    x = torch.randn(m, columns, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
    names = ("MT", "RT", "WR", "WK", "KS", "STAGES", "SPLIT")
    config = dict(zip(names, numbers)) | {"BLOCKS": 1}
    for scaled in (0, 1):
        y = w4a16_gemm.launch(x, packed, config | {"SCALED": scaled})
        assert error(y, w4a16_gemm.reference(x, packed)) < BOUND[dtype]


KNOWN_CASES = [  # the same, rows and columns in whole tiles
    (4, 128, False, "bfloat16", 17, 128, 1024, (24, 2, 2, 2, 256, 3, 2)),
    (4, 32, True, "float16", 19, 96, 1024, (24, 3, 1, 8, 512, 3, 1)),
    (2, 64, False, "float16", 70, 64, 1024, (16, 1, 2, 2, 256, 4, 1)),
    (8, 0, False, "bfloat16", 30, 112, 512, (16, 1, 7, 2, 256, 4, 2)),
    (4, 128, False, "bfloat16", 5, 96, 1024, (8, 3, 1, 4, 512, 3, 1)),
    (4, 128, False, "bfloat16", 9, 64, 1024, (16, 1, 2, 2, 256, 4, 1)),  # as many stages as there is room for
    (4, 128, True, "float16", 9, 32, 1024, (16, 1, 1, 2, 256, 3, 1)),  # one more: the loop goes round
    (4, 64, False, "bfloat16", 20, 32, 768, (24, 2, 1, 2, 256, 4, 2)),  # one thread block has two stages, one has one
    (4, 128, False, "bfloat16", 9, 96, 1024, (12, 3, 1, 4, 512, 2, 1)),  # units of eight and of four tokens
]


@cuda_on_cpu.NEEDS_COMPILER
@pytest.mark.parametrize("case", some_slow(KNOWN_CASES, (0, 1, 5, 6, 7)), ids=str)
def test_source_with_known_columns_on_the_cpu(case, monkeypatch):
    """The same sums to the last bit, and only where a weight ends with a tile."""
    bits, group, symmetric, dtype, m, rows, columns, numbers = case
    loaded = []

    def load(path, name, macros, *rest):
        loaded.append(macros.get("COLUMNS"))
        return cuda_on_cpu.load(path, name, macros, *rest)

    monkeypatch.setattr(nvrtc, "load", load)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    names = ("MT", "RT", "WR", "WK", "KS", "STAGES", "SPLIT")
    config = dict(zip(names, numbers)) | {"BLOCKS": 1, "SCALED": 0}
    x = torch.randn(m, columns, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
    packed = random_weight(rows, columns, bits, group, symmetric)
    y = w4a16_gemm.launch(x, packed, config | {"KNOWN": 1})
    assert error(y, w4a16_gemm.reference(x, packed)) < BOUND[dtype]
    assert torch.equal(y, w4a16_gemm.launch(x, packed, config))
    assert loaded == [columns, None]
    for ragged in ((rows - 1, columns), (rows, columns - columns // 4)):
        _, plan = w4a16_plans.plan_of(config | {"KNOWN": 1}, m, *ragged, (bits, 0, symmetric), (9, 0))
        assert ("COLUMNS" in plan.macros) == (ragged[1] % plan.macros["KS"] == 0 and ragged[0] == rows)


WGMMA_CASES = [  # bits, group, symmetric, type, tokens, rows, columns; WGS MB KS STAGES RING SPLIT
    (4, 128, False, "float16", 64, 200, 768, (2, 1, 128, 4, 3, 2)),
    (4, 128, False, "bfloat16", 50, 130, 1024, (3, 1, 128, 3, 2, 5)),
    (4, 32, False, "float16", 100, 70, 544, (2, 2, 64, 4, 4, 2)),
    (4, 64, True, "float16", 64, 128, 512, (1, 1, 256, 2, 2, 1)),
    (4, 128, False, "bfloat16", 64, 64, 1536, (1, 1, 256, 2, 2, 1)),
    (4, 0, False, "bfloat16", 130, 48, 301, (3, 2, 64, 2, 3, 2)),
    (4, 128, False, "float16", 7, 127, 128, (2, 1, 128, 5, 3, 4)),
    (2, 64, False, "float16", 64, 100, 832, (2, 1, 64, 3, 3, 3)),
    (8, 0, True, "bfloat16", 33, 66, 640, (1, 1, 64, 2, 4, 3)),
    (8, 128, False, "float16", 65, 129, 512, (4, 1, 128, 3, 2, 1)),
    (4, 128, False, "bfloat16", 90, 70, 256, (1, 2, 128, 3, 3, 1)),
    (4, 128, False, "bfloat16", 129, 130, 384, (2, 3, 64, 4, 4, 2)),
    (4, 128, False, "bfloat16", 65, 300, 640, (4, 2, 128, 3, 3, 1)),
    (4, 128, False, "bfloat16", 90, 70, 1024, (1, 2, 256, 3, 4, 2)),
    (4, 32, True, "float16", 43, 130, 512, (2, 1, 256, 3, 3, 2)),
]


@cuda_on_cpu.NEEDS_COMPILER
@pytest.mark.parametrize("case", some_slow(WGMMA_CASES, (1, 2, 3, 5, 7, 8, 12, 13)), ids=str)
def test_wgmma_source_on_the_cpu(case, monkeypatch):
    """Products of the tensor cores run as late as they may: a buffer that is written too early shows."""
    bits, group, symmetric, dtype, m, rows, columns, numbers = case
    monkeypatch.setattr(nvrtc, "load", cuda_on_cpu.load)
    packed = random_weight(rows, columns, bits, group, symmetric)
    x = torch.randn(m, columns, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    y = w4a16_gemm.launch(x, packed, dict(zip(w4a16_tiles.WGMMA_OF_64S, numbers)))
    assert error(y, w4a16_gemm.reference(x, packed)) < BOUND[dtype]


# The same for at most MT tokens a tile, columns in whole stages; SCALED. Turns of the loop and their rest, thread
# blocks with more stages than others, rows past the end, groups that share a stage or two stages.
KNOWN_WGMMA_CASES = [
    (4, 128, False, "bfloat16", 25, 256, 2048, (2, 32, 128, 3, 3, 2), 0),
    (4, 128, False, "bfloat16", 17, 200, 1792, (3, 24, 128, 2, 4, 5), 0),
    (4, 128, False, "bfloat16", 64, 100, 1536, (2, 64, 128, 3, 6, 1), 1),
    (4, 64, False, "float16", 25, 200, 1344, (2, 32, 64, 4, 3, 3), 1),
    (4, 64, True, "float16", 19, 128, 1024, (1, 24, 256, 2, 4, 1), 0),
    (4, 64, False, "bfloat16", 9, 64, 1280, (1, 16, 128, 2, 3, 2), 0),
    (2, 0, False, "bfloat16", 9, 64, 1024, (1, 24, 128, 3, 3, 2), 0),
    (8, 128, False, "float16", 41, 64, 1024, (1, 48, 64, 4, 4, 2), 0),
    (4, 128, False, "bfloat16", 17, 100, 3584, (2, 24, 256, 3, 3, 4), 0),
    (4, 128, False, "float16", 25, 130, 1280, (1, 32, 128, 4, 4, 3), 0),
    (4, 64, False, "bfloat16", 11, 200, 1152, (3, 16, 128, 2, 2, 2), 0),
    (4, 64, True, "bfloat16", 9, 70, 960, (3, 16, 64, 4, 4, 2), 0),
]


def known_and_not(x, packed, config, monkeypatch):
    """y with columns that are a constant and with columns that are an argument, and what was compiled for each."""
    loaded = []

    def load(path, name, macros, *rest):
        loaded.append(macros.get("COLUMNS"))
        return cuda_on_cpu.load(path, name, macros, *rest)

    monkeypatch.setattr(nvrtc, "load", load)
    monkeypatch.setattr(nvrtc, "encode", cuda_on_cpu.encode)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return w4a16_gemm.launch(x, packed, config | {"KNOWN": 1}), w4a16_gemm.launch(x, packed, config), loaded


def of_known_wgmma(case):
    """x, weight and configuration of a case."""
    bits, group, symmetric, dtype, m, rows, columns, numbers, scaled = case
    x = torch.randn(m, columns, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
    config = dict(zip(w4a16_tiles.WGMMA, numbers)) | {"SCALED": scaled}
    return x, random_weight(rows, columns, bits, group, symmetric), config


@cuda_on_cpu.NEEDS_COMPILER
@pytest.mark.parametrize("case", some_slow(KNOWN_WGMMA_CASES, (0, 1, 3, 4, 8, 10)), ids=str)
def test_wgmma_source_with_known_columns_on_the_cpu(case, monkeypatch):
    """The same sums to the last bit; a group's sums that its scale multiplies round once less than scaled weights."""
    x, packed, config = of_known_wgmma(case)
    y, other, loaded = known_and_not(x, packed, config, monkeypatch)
    assert torch.equal(y, other) and loaded == [x.shape[1], None]
    off = error(y, w4a16_gemm.reference(x, packed))
    assert off < BOUND[case[3]]
    if config["SCALED"] == 0 and packed.bits * packed.group == 512:
        scaled = w4a16_gemm.launch(x, packed, config | {"SCALED": 1})
        assert off < 0.75 * error(scaled, w4a16_gemm.reference(x, packed))


LARGEST = {"MT": w4a16_tiles.MOST_TOKENS, "STAGES": 4, "RING": 3, "SPLIT": 1, "PAIR": 1}
MULTICAST_CASES = [  # bits, group, symmetric, type, tokens, rows, columns; MB STAGES RING SPLIT PAIR
    (4, 128, False, "bfloat16", 72, 300, 512, (2, 3, 3, 1, 2)),
    (4, 64, False, "float16", 60, 230, 384, (4, 3, 3, 2, 2)),
    (4, 128, False, "bfloat16", 200, 130, 256, (4, 2, 2, 2, 1)),
    (4, 32, True, "float16", 140, 130, 544, (2, 3, 3, 2, 2)),
    (2, 64, False, "float16", 100, 200, 576, (2, 3, 2, 1, 2)),
    (8, 0, True, "bfloat16", 70, 200, 264, (4, 3, 2, 1, 2)),
    (4, 0, False, "bfloat16", 130, 300, 301, (2, 3, 2, 2, 1)),
    (4, 128, False, "bfloat16", 257, 70, 256, (5, 2, 2, 1, 1)),
    (4, 64, False, "float16", 300, 130, 256, (5, 3, 2, 1, 2)),
    (4, 128, False, "bfloat16", 345, 130, 384, LARGEST | {"SPLIT": 2}),
    (2, 64, False, "float16", 321, 70, 256, LARGEST),
    (4, 64, False, "bfloat16", 121, 300, 640, {"WGS": 4, "MT": 128, "STAGES": 3, "RING": 3, "SPLIT": 2, "PAIR": 1}),
    (4, 32, False, "float16", 75, 520, 384, {"WGS": 4, "MT": 128, "STAGES": 4, "RING": 3, "SPLIT": 1, "PAIR": 2}),
]


def multicast(case):
    """x, weight and configuration of a case; its last part is a configuration or the numbers of one."""
    bits, group, symmetric, dtype, m, rows, columns, numbers = case
    x = torch.randn(m, columns, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
    packed = random_weight(rows, columns, bits, group, symmetric)
    config = numbers if isinstance(numbers, dict) else dict(zip((*w4a16_tiles.MULTICAST_OF_64S, "PAIR"), numbers))
    return x, packed, config


@cuda_on_cpu.NEEDS_COMPILER
@pytest.mark.parametrize("case", some_slow(MULTICAST_CASES, (3, 4, 6, 9, 11)), ids=str)
def test_multicast_source_on_the_cpu(case, monkeypatch):
    """Boxes of x land in every thread block of a cluster as late as they may, and no stage is filled before all of them
    have read it."""
    monkeypatch.setattr(nvrtc, "load", cuda_on_cpu.load)
    monkeypatch.setattr(nvrtc, "encode", cuda_on_cpu.encode)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    x, packed, config = multicast(case)
    form = packed.bits, packed.group, packed.rows, packed.columns, packed.symmetric
    launch, other = w4a16_gemm.prepared(x, *form, config), -x
    want = w4a16_gemm.reference(x, packed)
    for tokens, sign in ((x, 1), (other, -1), (x, 1)):  # a tensor map holds an address
        assert error(sign * launch(tokens, packed.codes, packed.scale_zero), want) < BOUND[case[3]]


KNOWN_MULTICAST_CASES = [  # the same with columns in whole stages; WGS MT STAGES RING SPLIT PAIR, and PRODUCER
    (4, 128, False, "bfloat16", 97, 200, 1920, (2, 104, 4, 3, 3, 1)),
    (4, 128, False, "bfloat16", 97, 520, 1280, (4, 112, 6, 3, 2, 2)),
    (4, 64, True, "float16", 70, 128, 896, (2, 72, 3, 3, 1, 1)),
    (2, 128, False, "bfloat16", 65, 256, 1280, (4, 72, 8, 4, 2, 1)),
    (4, 128, False, "bfloat16", 65, 500, 1920, (4, 72, 6, 3, 2, 1, 0)),  # nobody but those that multiply copies x
    (4, 128, False, "bfloat16", 130, 200, 1280, (4, 136, 3, 3, 1, 2, 0)),
    (4, 64, False, "float16", 70, 400, 1408, (3, 72, 4, 2, 2, 1, 0)),
    (4, 128, False, "float16", 97, 200, 896, (3, 104, 6, 3, 1, 1, 1)),
    (4, 128, False, "bfloat16", 66, 130, 256, (3, 72, 8, 2, 1, 1, 0)),  # more stages than there are columns
]


def of_known_multicast(case):
    """x, weight and configuration of a case."""
    bits, group, symmetric, dtype, m, rows, columns, numbers = case
    x = torch.randn(m, columns, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
    config = dict(zip(("WGS", "MT", "STAGES", "RING", "SPLIT", "PAIR", "PRODUCER"), numbers))
    return x, random_weight(rows, columns, bits, group, symmetric), config


@cuda_on_cpu.NEEDS_COMPILER
@pytest.mark.parametrize("case", some_slow(KNOWN_MULTICAST_CASES, (0, 1, 4, 5, 6)), ids=str)
def test_multicast_source_with_known_columns_on_the_cpu(case, monkeypatch):
    """The same sums to the last bit."""
    x, packed, config = of_known_multicast(case)
    y, other, loaded = known_and_not(x, packed, config, monkeypatch)
    assert torch.equal(y, other) and loaded == [x.shape[1], None]
    assert error(y, w4a16_gemm.reference(x, packed)) < BOUND[case[3]]


@cuda_on_cpu.NEEDS_COMPILER
@pytest.mark.parametrize("case", some_slow(KNOWN_MULTICAST_CASES[4:7], (1, 2)), ids=str)
def test_no_stage_is_filled_before_all_have_read_it(case, monkeypatch):
    """Without a producer: boxes land as early as they may, while products run as late as they may."""
    monkeypatch.setenv("BOXES_LAND_EARLY", "1")
    monkeypatch.setattr(nvrtc, "load", cuda_on_cpu.load)
    monkeypatch.setattr(nvrtc, "encode", cuda_on_cpu.encode)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    x, packed, config = of_known_multicast(case)
    assert config["PRODUCER"] == 0
    y = w4a16_gemm.launch(x, packed, config | {"STAGES": 3})  # one is read, one waits, the third is filled
    assert error(y, w4a16_gemm.reference(x, packed)) < BOUND[case[3]]


def test_all_stages_are_copied_at_once_where_each_has_a_place():
    config = dict(zip(w4a16_tiles.MMA, (16, 1, 2, 4, 512, 4, 1, 0, 2))) | {"KNOWN": 1}
    assert w4a16_plans.copies_all_at_once(config, 64, 4096)  # two thread blocks of four stages
    assert w4a16_plans.copies_all_at_once(config, 64, 2048)
    assert not w4a16_plans.copies_all_at_once(config, 64, 5120)  # of five
    assert not w4a16_plans.copies_all_at_once(config, 64, 1536)  # of one and of two
    assert not w4a16_plans.copies_all_at_once(config, 48, 4096)  # rows end within a tile
    assert not w4a16_plans.copies_all_at_once({"WGS": 1, "MT": 64, "KS": 256, "STAGES": 8, "KNOWN": 1}, 64, 1024)
    unknown_columns = {name: value for name, value in config.items() if name != "KNOWN"}
    assert not w4a16_plans.copies_all_at_once(unknown_columns, 64, 4096)
    once = w4a16_estimates.estimate(config, 16, 4096, 4096, 4, 132)
    assert once < 0.95 * w4a16_estimates.estimate(unknown_columns, 16, 4096, 4096, 4, 132)


def test_small_thread_blocks_share_an_sm():
    small = dict(zip(w4a16_tiles.MMA, (8, 1, 1, 8, 512, 3, 1, 0, 2)))  # 40 KB, 256 threads
    large = dict(zip(w4a16_tiles.MMA, (16, 1, 2, 8, 1024, 4, 1, 0, 1)))  # 197 KB
    tiny = dict(zip(w4a16_tiles.MMA, (8, 1, 1, 2, 256, 2, 1, 0, 1)))  # 20 KB, 64 threads
    rooms = [w4a16_estimates.blocks_with_room(config, 4) for config in (small, large, tiny)]
    assert rooms == [2, 1, 10]  # by registers, by shared memory, by registers
    assert w4a16_estimates.blocks_with_room(large | {"BLOCKS": 3}, 4) == 3


def test_columns_are_a_constant_where_stages_and_groups_divide_them():
    """Rows may end within a tile of `wgmma`, not of `mma`, whose thread blocks copy whole tiles."""
    wgmma = dict(zip(w4a16_tiles.WGMMA, (2, 32, 128, 3, 3, 2))) | {"KNOWN": 1}
    narrow = wgmma | {"KS": 64}
    multicast = dict(zip(w4a16_tiles.MULTICAST_OF_64S, (2, 6, 3, 2))) | {"PAIR": 1, "KNOWN": 1}
    cases = (
        (wgmma, 130, 640, 128, True), (wgmma, 128, 640 + 64, 64, False), (wgmma, 128, 640, 0, True),
        (wgmma, 128, 640, 32, False),
        (narrow, 128, 640, 64, True), (narrow, 128, 640, 128, False), (narrow, 128, 768, 128, True),
        (multicast, 130, 640, 128, True), (multicast, 128, 640 + 64, 64, False),
    )  # fmt: skip
    for config, rows, columns, group, want in cases:
        assert w4a16_plans.known(config, rows, columns, group) is want
        _, plan = w4a16_plans.plan_of(config, 32, rows, columns, (4, group, False), (9, 0))
        assert ("COLUMNS" in plan.macros) is want
        without = {name: value for name, value in config.items() if name != "KNOWN"}
        assert not w4a16_plans.known(without, rows, columns, group)


@cuda_on_cpu.NEEDS_COMPILER
@pytest.mark.parametrize("bits, group, symmetric, dtype, rows, columns", [
    (4, 128, False, "float16", 40, 384), (2, 0, True, "bfloat16", 33, 301), (8, 64, False, "bfloat16", 16, 320),
])  # fmt: skip
def test_dequantize_on_the_cpu(bits, group, symmetric, dtype, rows, columns, monkeypatch):
    """The dense weight that the library multiplies with, also where a row ends inside eight columns."""
    monkeypatch.setattr(nvrtc, "load", cuda_on_cpu.load)
    packed = random_weight(rows, columns, bits, group, symmetric)
    want = packing.dequantize(packed).to(getattr(torch, dtype))
    assert torch.equal(dequantize.launch(packed, want.dtype), want)


SMALL = [case for case in w4a16_gemm.CASES if case["N"] < 1000]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_operator_on_a_cpu(case):
    x, packed = w4a16_gemm.make_inputs(case)
    y = torch.ops.lowbit.w4a16_gemm(x, *weight(packed))
    assert y.shape == (case["M"], case["N"]) and y.dtype == x.dtype
    assert error(y, w4a16_gemm.reference(x, packed)) < BOUND[case["dtype"]]


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
)
@pytest.mark.parametrize("case", WGMMA_CASES, ids=str)
def test_wgmma_on_a_gpu(case):
    bits, group, symmetric, dtype, m, rows, columns, numbers = case
    packed = random_weight(rows, columns, bits, group, symmetric).to("cuda")
    x = torch.randn(m, columns, generator=torch.Generator().manual_seed(1)).to("cuda", getattr(torch, dtype))
    config = dict(zip(w4a16_tiles.WGMMA_OF_64S, numbers))
    assert error(w4a16_gemm.launch(x, packed, config), w4a16_gemm.reference(x, packed)) < BOUND[dtype]


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
)
@pytest.mark.parametrize("case", MULTICAST_CASES, ids=str)
def test_multicast_on_a_gpu(case):
    x, packed, config = multicast(case)
    x, packed = x.cuda(), packed.to("cuda")
    launch = functools.partial(w4a16_gemm.launch, x, packed, config)
    assert error(launch(), w4a16_gemm.reference(x, packed)) < BOUND[case[3]] and torch.equal(launch(), launch())


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
)
@pytest.mark.parametrize("case", [*KNOWN_WGMMA_CASES, *KNOWN_MULTICAST_CASES], ids=str)
def test_known_columns_of_wgmma_on_a_gpu(case):
    """The same bits as with columns that are an argument."""
    x, packed, config = (of_known_wgmma if len(case) == 9 else of_known_multicast)(case)
    x, packed = x.cuda(), packed.to("cuda")
    y = w4a16_gemm.launch(x, packed, config | {"KNOWN": 1})
    assert error(y, w4a16_gemm.reference(x, packed)) < BOUND[case[3]]
    assert torch.equal(y, w4a16_gemm.launch(x, packed, config))


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs clusters"
)
@pytest.mark.parametrize("case", KNOWN_CASES, ids=str)
def test_known_columns_on_a_gpu(case):
    """The same bits as with columns that are an argument."""
    bits, group, symmetric, dtype, m, rows, columns, numbers = case
    names = ("MT", "RT", "WR", "WK", "KS", "STAGES", "SPLIT")
    config = dict(zip(names, numbers)) | {"BLOCKS": 1, "SCALED": 0}
    x = torch.randn(m, columns, generator=torch.Generator().manual_seed(1)).to("cuda", getattr(torch, dtype))
    packed = random_weight(rows, columns, bits, group, symmetric).to("cuda")
    y = w4a16_gemm.launch(x, packed, config | {"KNOWN": 1})
    assert error(y, w4a16_gemm.reference(x, packed)) < BOUND[dtype]
    assert torch.equal(y, w4a16_gemm.launch(x, packed, config))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", w4a16_gemm.CASES, ids=str)
def test_operator_on_a_gpu(case):
    x, packed = w4a16_gemm.make_inputs(case, "cuda")
    y = torch.ops.lowbit.w4a16_gemm(x, *weight(packed))
    assert error(y, w4a16_gemm.reference(x, packed)) < BOUND[case["dtype"]]
    assert torch.equal(y, torch.ops.lowbit.w4a16_gemm(x, *weight(packed)))


def test_operator_is_traceable():
    x, packed = w4a16_gemm.make_inputs(SMALL[0])
    torch.library.opcheck(torch.ops.lowbit.w4a16_gemm.default, (x, *weight(packed)))


def test_misuse():
    packed = random_weight(32, 128, 4, 32)
    for x, words in (
        (
            torch.zeros(4, 64),
            r"x must be a contiguous float16 or bfloat16 tensor .*, not a float32 tensor",
        ),
        (torch.zeros(4, 64, dtype=torch.float16), r"x is \[4, 64\], expected \[1 to 2048, 128\]"),
        (torch.zeros(128, dtype=torch.float16), r"x must be .* \[M, K\] on cpu, not a float16 tensor \[128\]"),
    ):
        with pytest.raises(ValueError, match=words):
            torch.ops.lowbit.w4a16_gemm(x, *weight(packed))
    with pytest.raises(ValueError, match="codes .* must be .* for a weight of 32 x 64"):
        torch.ops.lowbit.w4a16_gemm(torch.zeros(4, 64, dtype=torch.float16), *weight(packed)[:5], 64, False)


def test_recorded_number_of_tokens(monkeypatch):
    """The configuration of the next recorded number of tokens, where as many make the same tiles."""
    monkeypatch.setattr(w4a16_choice, "launch_config", lambda kernel, key, device: {"key": key})
    configs = {m: w4a16_choice.configuration(m, 8, 64, 4, "cpu") for m in (1, 16, 25, 33, 49, 57, 81, 97, 128, 250)}
    wanted = (8, 16, 32, 40, 56, 64, 96, 112, 128, 256)
    assert [config["key"] for config in configs.values()] == [f"w4 m{t} 8x64" for t in wanted]


def test_a_number_of_tokens_that_is_not_recorded_is_served_by_the_next_up_to_64(monkeypatch):
    """1 to 8 tokens by 8, 12 or 16, 9 to 12 by 12 or 16, 33 to 64 by 40, 48, 56 or 64; 65 by 80 alone, or estimate."""
    assert [w4a16_choice.serving(m) for m in (1, 9, 33, 41, 64, 65, 81, 113, 128, 129, 200, 256, 300, 400)] == [
        [8, 12, 16], [12, 16], [40, 48, 56, 64], [48, 56, 64], [64], [80], [96], [128], [128], [160], [224], [256],
        [320], [],
    ]  # fmt: skip
    recorded = {f"w4 m{t} 4096x4096": {"key": t} for t in (16, 48, 64)}
    monkeypatch.setattr(w4a16_choice, "launch_config", lambda kernel, key, device: recorded.get(key))
    assert [w4a16_choice.configuration(m, 4096, 4096, 4, "cpu") for m in (5, 33, 48, 49)] == [
        {"key": 16}, {"key": 48}, {"key": 48}, {"key": 64},
    ]  # fmt: skip
    assert w4a16_choice.configuration(65, 4096, 4096, 4, "cpu") in w4a16_gemm.SPACE
    recorded |= {f"w4 m{t} 4096x4096": {"key": t} for t in (256, 320)}
    nearest = [w4a16_choice.next_recorded(m, 4096, 4096, 4, torch.device("cpu")) for m in (17, 65, 300, 400)]
    assert nearest == [{"key": 48}, {"key": 256}, {"key": 320}, {"key": 320}]
    del recorded["w4 m256 4096x4096"], recorded["w4 m320 4096x4096"]
    assert w4a16_choice.next_recorded(65, 4096, 4096, 4, torch.device("cpu")) is None
    assert w4a16_choice.next_recorded(400, 4096, 4096, 4, torch.device("cpu")) is None


def test_tiles_have_no_more_tokens_than_there_are():
    """Each as many, a multiple of 8, or of 16 where two copies bring it; 16 at least, or all of a smaller tile."""
    for small in (8, 12, 16):
        tile = dict(zip(w4a16_tiles.MMA, (small, 1, 2, 4, 512, 4, 1, 0, 1)))
        assert {w4a16_plans.trimmed(tile, m) for m in (1, 8, 9, 12, 13, 40)} == {small}
        assert w4a16_plans.grid_of(tile, 25, 32, 4096).clusters == -(-25 // small)
    tile = dict(zip(w4a16_tiles.MMA, (64, 1, 4, 1, 128, 4, 2, 0, 1)))
    assert [w4a16_plans.trimmed(tile, m) for m in (1, 16, 17, 40, 41, 64, 65, 129)] == [16, 16, 24, 40, 48, 64, 40, 48]
    tile = {"WGS": 1, "MB": 2}
    assert [w4a16_plans.trimmed(tile, m) for m in (1, 33, 65, 113, 128, 129, 300)] == [16, 40, 72, 120, 128, 72, 104]
    for pair, want in ((1, [72, 136, 256, 272, 320, 168]), (2, [80, 144, 256, 272, 320, 176])):
        tile = {"MB": 5, "PAIR": pair}
        assert [w4a16_plans.trimmed(tile, m) for m in (65, 129, 256, 257, 320, 321)] == want
        assert [w4a16_plans.box_rows({"MT": mt, "PAIR": pair}) for mt in (256, 272)] == [256 // pair, 136]
    for config in w4a16_gemm.SPACE[::7]:
        tokens = w4a16_tiles.tokens_of(config)
        whole = w4a16_estimates.estimate(config, -(-129 // tokens) * tokens, 4096, 4096, 4, 132)
        assert w4a16_estimates.estimate(config, 129, 4096, 4096, 4, 132) <= whole


def test_thread_blocks_of_a_launch():
    """Tiles of tokens and rows in clusters that share columns, and with PAIR tokens; a stage each at least."""
    mma = dict(zip(w4a16_tiles.MMA, (64, 1, 4, 1, 128, 4, 2, 0, 4)))
    wgmma = dict(zip(w4a16_tiles.WGMMA, (3, 64, 128, 3, 3, 4)))
    pair = {"WGS": 4, "MT": 128, "STAGES": 4, "RING": 3, "SPLIT": 4, "PAIR": 2}
    for config, want in (
        (mma, w4a16_plans.Grid(40, 3, 3, 2 * 5)),  # 80 tokens, 300 rows in tiles of 64, 384 columns in three stages
        (wgmma, w4a16_plans.Grid(40, 3, 3, 2 * 2)),
        (pair, w4a16_plans.Grid(80, 3, 6, 1)),  # 512 rows a pair, each with 256
        ({name: pair[name] for name in pair if name != "WGS"}, w4a16_plans.Grid(80, 3, 6, 2)),
    ):
        grid = w4a16_plans.grid_of(config, 80, 300, 384)
        assert grid == want and grid.blocks == want.clusters * want.together
        _, plan = w4a16_plans.plan_of(config, 80, 300, 384, (4, 128, False), (9, 0))
        assert (plan.grid, plan.macros["SPLIT"], plan.macros["MT"]) == (grid.blocks, grid.split, grid.tokens)


def test_shared_memory_of_sums():
    """Behind three stages a sum of each unit from either block; 48 units of four warps are more than two stages."""
    config = dict(zip(w4a16_tiles.MMA, (16, 4, 1, 8, 1024, 3, 1, 0, 2)))
    stages = 3 * 8 * (16 * 128 * 2 + 4 * (128 * 16 // 2 + 16 * 4))
    assert w4a16_plans.shared_bytes(config, 4, 128, False) == stages + 2 * 4 * 512 + 8
    twelve = config | {"MT": 12}  # a unit of eight and one of four tokens
    stages = 3 * 8 * (12 * 128 * 2 + 4 * (128 * 16 // 2 + 16 * 4))
    assert w4a16_plans.shared_bytes(twelve, 4, 128, False) == stages + 2 * 4 * 512 + 8
    many = dict(zip(w4a16_tiles.MMA, (64, 3, 2, 4, 256, 2, 1, 1, 2)))
    assert w4a16_plans.shared_bytes(many, 4, 128, False) == 4 * 48 * 512 + 2 * 24 * 512 + 8
    assert w4a16_plans.shared_bytes(many | {"SPLIT": 1}, 4, 128, False) == 4 * 48 * 512


def test_where_nothing_else_fits_fewer_warps_share_columns():
    """8 bits of seven row tiles a warp: eight tokens and half the warps, as many columns each."""
    config = dict(zip(w4a16_tiles.MMA, (16, 7, 1, 8, 1024, 2, 1, 0, 1)))
    fitted = w4a16_plans.fitted(config, 8, 128, False)
    assert fitted == config | {"MT": 8, "WK": 4, "KS": 512}
    assert w4a16_plans.fitted(config, 4, 32, False) == config


@pytest.mark.parametrize("m, n, k", [(1, 512, 2048), (16, 4096, 4096), (64, 28672, 8192), (2048, 127, 96)])
def test_every_configuration_divides(m, n, k):
    recorded = configurations("nvidia-h200").get("w4a16_gemm", {}).values()
    for config in [w4a16_choice.cheapest(m, n, k), *w4a16_gemm.SPACE, *recorded]:
        if "PAIR" in config:
            assert w4a16_plans.box_rows(config | {"MT": w4a16_tiles.tokens_of(config)}) <= w4a16_plans.MOST_BOX
            most = {"MT"} if config.get("MT") == w4a16_tiles.MOST_TOKENS else {"MB"}
            if "WGS" in config:
                most = {"MT", "WGS"}
            assert set(config) - {"KNOWN", "PRODUCER"} == {"STAGES", "RING", "SPLIT", "PAIR"} | most
            assert config["SPLIT"] * config["PAIR"] <= 8
            for bits in packing.BITS:
                _, plan = w4a16_plans.plan_of(config, m, n, k, (bits, 32, False), (9, 0))
                assert plan.macros["MT"] % (8 * config["PAIR"]) == 0 and plan.shared <= 232448
            continue
        if "WGS" in config:
            names = w4a16_tiles.WGMMA_OF_64S if "MB" in config else w4a16_tiles.WGMMA
            assert set(config) - {"KNOWN", "SCALED"} == set(names)
            assert w4a16_plans.wgmma_fitted(config, 4, 128, False) == config and 1 <= config["SPLIT"] <= 8
            for bits in packing.BITS:
                fitted = w4a16_plans.wgmma_fitted(config, bits, 32, False)
                assert fitted["KS"] % packing.block_columns(bits) == 0 and min(fitted["STAGES"], fitted["RING"]) > 1
                assert w4a16_plans.wgmma_shared_bytes(fitted, w4a16_tiles.tokens_of(fitted), bits, 32, False) <= 232448
            continue
        assert set(config) - {"KNOWN"} == set(w4a16_tiles.MMA)
        for bits in packing.BITS:
            fitted = w4a16_plans.fitted(config, bits, 32, False)
            columns = fitted["KS"] // fitted["WK"]
            assert columns % packing.block_columns(bits) == 0 and columns % 64 == 0
            assert columns in (64, 128) or columns % 128 == 0  # of one group, or whole groups
            assert 32 * fitted["WR"] % (columns // 8) == 0  # the warps that share a stage copy whole rows of it
            assert w4a16_plans.shared_bytes(fitted, bits, 32, False) <= 232448 and 1 <= config["SPLIT"] <= 8


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


def test_a_configuration_for_wgmma_serves_one_capability(monkeypatch):
    config = dict(zip(w4a16_tiles.WGMMA_OF_64S, (*w4a16_tiles.ANY_WGMMA_TILES[0], 2)))
    x, packed = torch.ones(2, 128).half(), random_weight(32, 128, 4, 128)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match="capability 9.0"):
        w4a16_gemm.launch(x, packed, config)


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
    given |= {name.upper() for config in (*wna16_gemv.SPACE, *w8a8_gemv.SPACE) for name in config}
    assert not taken & given
