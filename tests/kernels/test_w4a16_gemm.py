"""W4A16 GEMM: the kernel's index arithmetic lane by lane, the operator on a CPU and on a GPU, and misuse."""

import functools

import cuda_on_cpu
import pytest
import torch
from relative_error import ROUNDING, relative_error
from w4a16 import LARGEST, NEEDS_WGMMA, random_weight, some_slow, weight

from repro.kernels import nvrtc, w4a16_gemm, w4a16_plans, w4a16_tiles


def emulate(monkeypatch, load=cuda_on_cpu.load):
    """Launches run on the CPU, as on a device of compute capability 9.0."""
    monkeypatch.setattr(nvrtc, "load", load)
    monkeypatch.setattr(nvrtc, "encode", cuda_on_cpu.encode)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def inputs_of(case):
    """x and the weight of a case, whose first seven entries say what they are."""
    bits, group, symmetric, dtype, m, rows, columns = case[:7]
    x = torch.randn(m, columns, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
    return x, random_weight(rows, columns, bits, group, symmetric)


def known_and_not(x, packed, config, monkeypatch):
    """y with columns that are a constant and with columns that are an argument, and what was compiled for each."""
    loaded = []

    def load(path, name, macros, *rest):
        loaded.append(macros.get("COLUMNS"))
        return cuda_on_cpu.load(path, name, macros, *rest)

    emulate(monkeypatch, load)
    return w4a16_gemm.launch(x, packed, config | {"KNOWN": 1}), w4a16_gemm.launch(x, packed, config), loaded


MMA_WITHOUT_BLOCKS = ("MT", "RT", "WR", "WK", "KS", "STAGES", "SPLIT")
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


@cuda_on_cpu.NEEDS_COMPILER
@pytest.mark.parametrize("case", some_slow(SOURCE_CASES, (1, 2, 4, 7, 8, 10, 11, 12, 14)), ids=str)
def test_source_on_the_cpu(case, monkeypatch):
    """The .cu file itself: staged copies and their waits, swizzle, fragments, folds, ragged ends, clusters."""
    emulate(monkeypatch)
    x, packed = inputs_of(case)
    config = dict(zip(MMA_WITHOUT_BLOCKS, case[7])) | {"BLOCKS": 1}
    for scaled in (0, 1):
        y = w4a16_gemm.launch(x, packed, config | {"SCALED": scaled})
        assert relative_error(y, w4a16_gemm.reference(x, packed)) < ROUNDING[case[3]]


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


def of_known(case):
    """x, weight and configuration of a case."""
    return *inputs_of(case), dict(zip(MMA_WITHOUT_BLOCKS, case[7])) | {"BLOCKS": 1, "SCALED": 0}


@cuda_on_cpu.NEEDS_COMPILER
@pytest.mark.parametrize("case", some_slow(KNOWN_CASES, (0, 1, 5, 6, 7)), ids=str)
def test_source_with_known_columns_on_the_cpu(case, monkeypatch):
    """The same sums to the last bit, and only where a weight ends with a tile."""
    x, packed, config = of_known(case)
    (m, columns), rows, form = x.shape, packed.rows, (packed.bits, 0, packed.symmetric)
    y, other, loaded = known_and_not(x, packed, config, monkeypatch)
    assert relative_error(y, w4a16_gemm.reference(x, packed)) < ROUNDING[case[3]]
    assert torch.equal(y, other) and loaded == [columns, None]
    for ragged in ((rows - 1, columns), (rows, columns - columns // 4)):
        _, plan = w4a16_plans.plan_of(config | {"KNOWN": 1}, m, *ragged, form, (9, 0))
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
    emulate(monkeypatch)
    x, packed = inputs_of(case)
    y = w4a16_gemm.launch(x, packed, dict(zip(w4a16_tiles.WGMMA_OF_64S, case[7])))
    assert relative_error(y, w4a16_gemm.reference(x, packed)) < ROUNDING[case[3]]


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
    (4, 128, False, "bfloat16", 99, 300, 1280, (4, 104, 128, 6, 3, 2), 1),  # sums lie where stages did
    (4, 64, False, "float16", 121, 130, 896, (2, 128, 128, 6, 3, 1), 1),
]


def of_known_wgmma(case):
    """x, weight and configuration of a case."""
    return *inputs_of(case), dict(zip(w4a16_tiles.WGMMA, case[7])) | {"SCALED": case[8]}


@cuda_on_cpu.NEEDS_COMPILER
@pytest.mark.parametrize("case", some_slow(KNOWN_WGMMA_CASES, (0, 1, 3, 4, 8, 10, 12, 13)), ids=str)
def test_wgmma_source_with_known_columns_on_the_cpu(case, monkeypatch):
    """The same sums to the last bit; a group's sums that its scale multiplies round once less than scaled weights."""
    x, packed, config = of_known_wgmma(case)
    y, other, loaded = known_and_not(x, packed, config, monkeypatch)
    assert torch.equal(y, other) and loaded == [x.shape[1], None]
    off = relative_error(y, w4a16_gemm.reference(x, packed))
    assert off < ROUNDING[case[3]]
    if config["SCALED"] == 0 and packed.bits * packed.group == 512:
        scaled = w4a16_gemm.launch(x, packed, config | {"SCALED": 1})
        assert off < 0.75 * relative_error(scaled, w4a16_gemm.reference(x, packed))


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
    numbers = case[7]
    config = numbers if isinstance(numbers, dict) else dict(zip((*w4a16_tiles.MULTICAST_OF_64S, "PAIR"), numbers))
    return *inputs_of(case), config


@cuda_on_cpu.NEEDS_COMPILER
@pytest.mark.parametrize("case", some_slow(MULTICAST_CASES, (3, 4, 6, 9, 11)), ids=str)
def test_multicast_source_on_the_cpu(case, monkeypatch):
    """Boxes of x land in every thread block of a cluster as late as they may, and no stage is filled before all of them
    have read it."""
    emulate(monkeypatch)
    x, packed, config = multicast(case)
    form = packed.bits, packed.group, packed.rows, packed.columns, packed.symmetric
    launch, other = w4a16_gemm.prepared(x, *form, config), -x
    want = w4a16_gemm.reference(x, packed)
    for tokens, sign in ((x, 1), (other, -1), (x, 1)):  # a tensor map holds an address
        assert relative_error(sign * launch(tokens, packed.codes, packed.scale_zero), want) < ROUNDING[case[3]]


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
    return *inputs_of(case), dict(zip(("WGS", "MT", "STAGES", "RING", "SPLIT", "PAIR", "PRODUCER"), case[7]))


@cuda_on_cpu.NEEDS_COMPILER
@pytest.mark.parametrize("case", some_slow(KNOWN_MULTICAST_CASES, (0, 1, 4, 5, 6)), ids=str)
def test_multicast_source_with_known_columns_on_the_cpu(case, monkeypatch):
    """The same sums to the last bit."""
    x, packed, config = of_known_multicast(case)
    y, other, loaded = known_and_not(x, packed, config, monkeypatch)
    assert torch.equal(y, other) and loaded == [x.shape[1], None]
    assert relative_error(y, w4a16_gemm.reference(x, packed)) < ROUNDING[case[3]]


@cuda_on_cpu.NEEDS_COMPILER
@pytest.mark.parametrize("case", some_slow(KNOWN_MULTICAST_CASES[4:7], (1, 2)), ids=str)
def test_no_stage_is_filled_before_all_have_read_it(case, monkeypatch):
    """Without a producer: boxes land as early as they may, while products run as late as they may."""
    emulate(monkeypatch, functools.partial(cuda_on_cpu.load, boxes_land_early=True))
    x, packed, config = of_known_multicast(case)
    assert config["PRODUCER"] == 0
    y = w4a16_gemm.launch(x, packed, config | {"STAGES": 3})  # one is read, one waits, the third is filled
    assert relative_error(y, w4a16_gemm.reference(x, packed)) < ROUNDING[case[3]]


SMALL = [case for case in w4a16_gemm.CASES if case["N"] < 1000]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_operator_on_a_cpu(case):
    x, packed = w4a16_gemm.make_inputs(case)
    y = torch.ops.lowbit.w4a16_gemm(x, *weight(packed))
    assert y.shape == (case["M"], case["N"]) and y.dtype == x.dtype
    assert relative_error(y, w4a16_gemm.reference(x, packed)) < ROUNDING[case["dtype"]]


@pytest.mark.gpu
@NEEDS_WGMMA
@pytest.mark.parametrize("case", WGMMA_CASES, ids=str)
def test_wgmma_on_a_gpu(case):
    x, packed = inputs_of(case)
    x, packed = x.cuda(), packed.to("cuda")
    y = w4a16_gemm.launch(x, packed, dict(zip(w4a16_tiles.WGMMA_OF_64S, case[7])))
    assert relative_error(y, w4a16_gemm.reference(x, packed)) < ROUNDING[case[3]]


@pytest.mark.gpu
@NEEDS_WGMMA
@pytest.mark.parametrize("case", MULTICAST_CASES, ids=str)
def test_multicast_on_a_gpu(case):
    x, packed, config = multicast(case)
    x, packed = x.cuda(), packed.to("cuda")
    launch = functools.partial(w4a16_gemm.launch, x, packed, config)
    assert relative_error(launch(), w4a16_gemm.reference(x, packed)) < ROUNDING[case[3]]
    assert torch.equal(launch(), launch())


@pytest.mark.gpu
@NEEDS_WGMMA
@pytest.mark.parametrize("case", [*KNOWN_WGMMA_CASES, *KNOWN_MULTICAST_CASES], ids=str)
def test_known_columns_of_wgmma_on_a_gpu(case):
    """The same bits as with columns that are an argument."""
    x, packed, config = (of_known_wgmma if len(case) == 9 else of_known_multicast)(case)
    x, packed = x.cuda(), packed.to("cuda")
    y = w4a16_gemm.launch(x, packed, config | {"KNOWN": 1})
    assert relative_error(y, w4a16_gemm.reference(x, packed)) < ROUNDING[case[3]]
    assert torch.equal(y, w4a16_gemm.launch(x, packed, config))


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs clusters"
)
@pytest.mark.parametrize("case", KNOWN_CASES, ids=str)
def test_known_columns_on_a_gpu(case):
    """The same bits as with columns that are an argument."""
    x, packed, config = of_known(case)
    x, packed = x.cuda(), packed.to("cuda")
    y = w4a16_gemm.launch(x, packed, config | {"KNOWN": 1})
    assert relative_error(y, w4a16_gemm.reference(x, packed)) < ROUNDING[case[3]]
    assert torch.equal(y, w4a16_gemm.launch(x, packed, config))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", w4a16_gemm.CASES, ids=str)
def test_operator_on_a_gpu(case):
    x, packed = w4a16_gemm.make_inputs(case, "cuda")
    y = torch.ops.lowbit.w4a16_gemm(x, *weight(packed))
    assert relative_error(y, w4a16_gemm.reference(x, packed)) < ROUNDING[case["dtype"]]
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


def test_a_configuration_for_wgmma_serves_one_capability(monkeypatch):
    config = dict(zip(w4a16_tiles.WGMMA_OF_64S, (*w4a16_tiles.ANY_WGMMA_TILES[0], 2)))
    x, packed = torch.ones(2, 128).half(), random_weight(32, 128, 4, 128)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match="capability 9.0"):
        w4a16_gemm.launch(x, packed, config)
