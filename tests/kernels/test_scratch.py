"""Memory between the launches of a call: kept on a device's default stream, for one call at a time."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from repro.engine import limits
from repro.kernels import linear, prepared
from repro.kernels.prepared import MOST_KEPT, Scratch, scratch

LIKE = torch.ones(1)
HERE = LIKE.get_device()


@pytest.fixture
def current(monkeypatch):
    """The current device and stream, which a test may set; nothing is kept."""
    now = SimpleNamespace(device=HERE, stream=prepared.DEFAULT_STREAM)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: now.device, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: now.stream, raising=False)
    own = lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype)  # noqa: E731
    monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_cuda", own)
    monkeypatch.setattr(prepared, "KEPT", {})
    return now


def is_kept(tensor):
    """Whether a tensor lies in the kept memory, from its first byte on."""
    return HERE in prepared.KEPT and tensor.data_ptr() == prepared.KEPT[HERE].memory.data_ptr()


def test_calls_one_after_the_other_have_the_same_memory(current):
    """Of whatever shape; each as it asked for."""
    codes, weight = scratch(torch.int8, 100), Scratch(torch.bfloat16, (6, 4), (1, 6))
    for _ in range(2):
        for memory, shape, strides in ((codes, (100,), (1,)), (weight, (6, 4), (1, 6))):
            tensor = memory.take(LIKE)
            assert is_kept(tensor) and tensor.shape == shape and tensor.stride() == strides
            memory.give_back(tensor)
    assert weight.take(LIKE).dtype == torch.bfloat16
    assert prepared.KEPT[HERE].memory.nbytes == MOST_KEPT


def test_a_call_meanwhile_has_memory_of_its_own(current):
    memory, other = scratch(torch.int8, 100), scratch(torch.int8, 100)
    first = memory.take(LIKE)
    second, third = other.take(LIKE), memory.take(LIKE)
    assert is_kept(first) and len({tensor.data_ptr() for tensor in (first, second, third)}) == 3
    for tensor in (second, third):
        other.give_back(tensor)
    assert not is_kept(other.take(LIKE)), "what is given back is not the kept one, which is still used"
    memory.give_back(first)
    assert is_kept(other.take(LIKE)) and not is_kept(memory.take(LIKE))


@pytest.mark.parametrize("what", ["another stream", "another device"])
def test_elsewhere_a_call_has_memory_of_its_own(current, what):
    """A stream may be in the capture of a graph, whose replays write to the memory at any time."""
    memory = scratch(torch.int8, 100)
    memory.give_back(memory.take(LIKE))
    if what == "another stream":
        current.stream = 70
    else:
        current.device = 3
    tensor = memory.take(LIKE)
    assert tensor.shape == (100,) and not is_kept(tensor)
    memory.give_back(tensor)
    assert len(prepared.KEPT[HERE].free) == 1


@pytest.mark.parametrize("size, kept", [(MOST_KEPT // 2, True), (MOST_KEPT // 2 + 1, False)])
def test_what_is_larger_is_not_kept(current, size, kept):
    assert is_kept(scratch(torch.int16, size).take(LIKE)) == kept


def test_threads_that_come_first_together_share_one_memory(current):
    """Only one has it, and none is made twice."""
    start, taken, made = threading.Barrier(8), [], []

    class Like:
        get_device = staticmethod(lambda: HERE)

        def new_empty(self, *size, **options):
            made.append(size)
            time.sleep(0.01)  # meanwhile the others come
            return LIKE.new_empty(*size, **options)

    memories = [scratch(torch.int8, 100) for _ in range(4)] * 2

    def call(memory):
        start.wait()
        taken.append(memory.take(Like()))

    threads = [threading.Thread(target=call, args=(memory,)) for memory in memories]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [(MOST_KEPT,)]
    assert sum(map(is_kept, taken)) == 1
    assert len({tensor.data_ptr() for tensor in taken}) == 8


def test_what_is_kept_is_given_to_the_device_again(current):
    """No view of it stays."""
    memory = scratch(torch.int8, 100)
    memory.give_back(memory.take(LIKE))
    storage = prepared.KEPT[HERE].memory.untyped_storage()._weak_ref()
    assert not torch.UntypedStorage._expired(storage)
    limits.release()
    assert torch.UntypedStorage._expired(storage) and not prepared.KEPT
    assert is_kept(memory.take(LIKE))


def test_views_are_bounded(current, monkeypatch):
    """What a call has while they are forgotten is given back all the same."""
    monkeypatch.setattr(prepared, "MOST_MAPS", 3)
    first, others = scratch(torch.int8, 1), [scratch(torch.int8, size) for size in range(2, 12)]
    for other in others:
        tensor = other.take(LIKE)
        assert is_kept(tensor) and len(tensor) == other.take(LIKE).numel()
        assert len(prepared.KEPT[HERE].views) <= 3
        other.give_back(tensor)
    tensor = first.take(LIKE)
    prepared.KEPT[HERE].views.clear()
    first.give_back(tensor)
    assert is_kept(first.take(LIKE))


def test_a_dense_weight_is_given_back_once_its_product_is_in_the_stream(current, monkeypatch):
    weight, x, seen = torch.randn(6, 4), torch.randn(5, 4), []

    def write(codes, scales, transposed):
        transposed.copy_(weight.T)
        seen.append((transposed, list(prepared.KEPT[HERE].free)))

    monkeypatch.setattr(linear.dense, "writer", lambda *_: write)
    launch = linear.prepare_dense(torch.float32, LIKE, 4, 0, 6, 4, False)
    for _ in range(2):
        torch.testing.assert_close(launch(x, LIKE, LIKE), x @ weight.T)
        assert prepared.KEPT[HERE].free == [True]
    assert [free for _, free in seen] == [[], []] and all(is_kept(transposed) for transposed, _ in seen)


def test_memory_between_the_launches_of_w8a8_is_given_back(current, monkeypatch):
    pytest.importorskip("triton")
    from repro.kernels import w8a8_gemm

    seen = []

    class Row:
        def __init__(self, names, launches):
            pass

        def launch(self, x, between, w_q, s_w, y):
            seen.append((between, list(prepared.KEPT[HERE].free)))

    monkeypatch.setattr(w8a8_gemm, "InARow", Row)
    x, w_q, s_w = torch.zeros(16, 64, dtype=torch.bfloat16), torch.zeros(32, 64, dtype=torch.int8), torch.ones(32)
    launch = w8a8_gemm.behind_quantizer(x, w_q, w8a8_gemm.heuristic(16, 32, 64))
    for _ in range(2):
        assert launch(x, w_q, s_w).shape == (16, 32) and prepared.KEPT[HERE].free == [True]
    assert [free for _, free in seen] == [[], []] and all(is_kept(between) for between, _ in seen)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_calls_beside_each_other_on_a_gpu():
    """On the default stream, on another one and in a graph that is replayed meanwhile: W8A8, and a dense weight."""
    from repro.kernels import w4a16_gemm, w8a8

    x = torch.randn(512, 2048, device="cuda", dtype=torch.bfloat16)
    long = torch.randn(512, 8192, device="cuda", dtype=torch.bfloat16)
    codes = w8a8.quantize_weight(torch.randn(2048, 8192, device="cuda"))
    form = {"N": 2048, "K": 2048, "bits": 4, "group": 128, "symmetric": False, "seed": 0}
    packed = w4a16_gemm.random_weight(form).to("cuda")
    calls = [lambda: w8a8.w8a8(long, *codes), lambda: linear.wna16(x, packed)]
    want = [call() for call in calls]
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = [call() for call in calls]
    runs = []
    for _ in range(20):
        with torch.cuda.stream(side):
            graph.replay()
        runs.append([call() for call in calls])
    with torch.cuda.stream(side):
        for _ in range(20):
            runs.append([call() for call in calls])
        runs.append(captured)
    torch.cuda.synchronize()
    assert x.get_device() in prepared.KEPT
    for outputs in runs:
        assert all(torch.equal(one, other) for one, other in zip(outputs, want, strict=True))
