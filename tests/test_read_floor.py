"""The read floor: its source on a CPU, word by word, and the operator."""

import cuda_on_cpu
import numpy as np
import pytest
import torch

from repro.kernels import nvrtc, read_floor
from repro.kernels.launch_config import FOLDER, configurations

SOME = [c for c in read_floor.SPACE if c["block"] <= 8192 and c["block"] // c["warps"] in (128, 1024, 2048)]


def by_block(x: torch.Tensor, block: int) -> np.ndarray:
    """The exclusive or of each block of words."""
    words = x.view(torch.uint8).view(torch.int32).numpy()
    return np.bitwise_xor.reduce(np.pad(words, (0, -len(words) % block)).reshape(-1, block), axis=1)


@cuda_on_cpu.NEEDS_COMPILER
@pytest.mark.parametrize("config", SOME, ids=str)
def test_source_on_the_cpu(config, tmp_path, monkeypatch):
    """Whole blocks and every kind of ragged end; entries past the last block stay as they are."""
    monkeypatch.setattr(nvrtc, "load", cuda_on_cpu.load(tmp_path))
    block = config["block"]
    for words in (1, 3, 4, block - 5, block, block + 1, 2 * block + block // 2 + 2):
        x, _ = read_floor.make_inputs({"bytes": 4 * words, "seed": words})
        blocks = -(-words // block)
        out = torch.full((blocks + 1,), 7, dtype=torch.int32)
        read_floor.launch(x, out, config)
        assert np.array_equal(out[:blocks].numpy(), by_block(x, block)), words
        assert out[blocks] == 7


@cuda_on_cpu.NEEDS_COMPILER
def test_an_address_that_loads_cannot_take(tmp_path, monkeypatch):
    monkeypatch.setattr(nvrtc, "load", cuda_on_cpu.load(tmp_path))
    x, out = read_floor.make_inputs({"bytes": 4 * 700, "seed": 0})
    read_floor.launch(x[4:], out, read_floor.SPACE[0])
    assert read_floor.reference(out) == read_floor.reference(x[4:])


def test_operator_on_a_cpu():
    x, out = read_floor.make_inputs({"bytes": 4 * 4097, "seed": 3})
    torch.ops.lowbit.read_floor(x, out)
    assert read_floor.reference(out) == read_floor.reference(x) != 0


@pytest.mark.parametrize(
    "x, out, words",
    [
        (torch.zeros(6, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32), "multiple of 4"),
        (torch.zeros(0), torch.zeros(1, dtype=torch.int32), "not 0"),
        (torch.zeros(8, 8).T[:4], torch.zeros(1, dtype=torch.int32), "contiguous"),
        (torch.zeros(513), torch.zeros(1, dtype=torch.int32), "int32 with 2 or more"),
        (torch.zeros(8), torch.zeros(1), "int32 with 1 or more"),
    ],
)
def test_misuse(x, out, words):
    with pytest.raises(ValueError, match=words):
        read_floor.launch(x, out, {"block": 512, "warps": 1})


def test_configurations_are_of_the_space():
    """Recorded ones, and the heuristic's where nothing is recorded."""
    recorded = [c for path in FOLDER.glob("*.json") for c in configurations(path.stem).get("read_floor", {}).values()]
    guessed = [read_floor.configuration(nbytes, "cpu") for nbytes in (4, 1 << 20, 1 << 30)]
    assert all(config in read_floor.SPACE for config in recorded + guessed)


@pytest.mark.skipif(nvrtc.unavailable() is not None, reason=f"compile check: {nvrtc.unavailable()}")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
def test_compiles(arch, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for config in read_floor.SPACE[::9]:
        macros = {name.upper(): value for name, value in config.items()}
        assert nvrtc.compile_cubin(read_floor.SOURCE, macros, arch)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", read_floor.CASES, ids=str)
def test_operator_on_a_gpu(case):
    x, out = read_floor.make_inputs(case, "cuda")
    torch.ops.lowbit.read_floor(x, out)
    assert read_floor.reference(out) == read_floor.reference(x)
