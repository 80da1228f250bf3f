"""What the emulation of CUDA on a CPU promises to the tests of kernels, on kernels of a few lines."""

import cuda_on_cpu
import pytest
import torch

from repro.kernels import nvrtc

pytestmark = cuda_on_cpu.NEEDS_COMPILER
SOURCE = """
__global__ void widen(const u16 *halves, float *floats, int count) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) floats[i] = half_to_float(__ldg(halves + i));
}
template <int BRAIN> void round_to(const float *floats, u16 *halves, int count) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) halves[i] = to_half<BRAIN>(__ldg(floats + i));
}
__global__ void round_float16(const float *floats, u16 *halves, int count) { round_to<0>(floats, halves, count); }
__global__ void round_bfloat16(const float *floats, u16 *halves, int count) { round_to<1>(floats, halves, count); }
__global__ void reverse_of_a_block(const float *from, float *to) {
    extern __shared__ __align__(128) char shared[];
    ((float *)shared)[threadIdx.x] = __ldg(from + threadIdx.x);
    __syncthreads();
    to[threadIdx.x] = ((float *)shared)[blockDim.x - 1 - threadIdx.x];
}
__global__ void before_and_after_the_wait(const float *from, float *to) {
    extern __shared__ __align__(128) char shared[];
    copy(threadIdx.x * 16, from + threadIdx.x * 4, true, false);
    end_of_copies();
    to[threadIdx.x] = load4(threadIdx.x * 16);
    wait_for_copies<0>();
    to[blockDim.x + threadIdx.x] = load4(threadIdx.x * 16);
}
__global__ void before_and_after_the_wait_for_a_box(const __grid_constant__ TensorMap map, u16 *to) {
    extern __shared__ __align__(1024) char shared[];
    const u32 landed = shared_address(shared) + 128, other = landed + 8;
    if (threadIdx.x == 0) {
        signal_init(landed, 1), signal_init(other, 1);
        signal_expect(landed, 128), signal_arrive(other);
        copy_box(shared_address(shared), &map, 0, 0, landed);
    }
    __syncthreads();
    signal_wait(other, 0);
    to[threadIdx.x] = at_shared<u16>(threadIdx.x * 2);
    __syncthreads();
    signal_wait(landed, 0);
    to[blockDim.x + threadIdx.x] = at_shared<u16>(threadIdx.x * 2);
}
__global__ void one_warp_reads_without_a_barrier(u16 *to) {  // the first of block 0, the second of block 1
    extern __shared__ __align__(128) char shared[];
    const u32 lane = threadIdx.x % 32, is_ahead = threadIdx.x / 32 == blockIdx.x;
    if (!is_ahead) at_shared<u16>(lane * 2) = 1;
    __syncwarp();
    if (is_ahead) to[blockIdx.x * 32 + lane] = at_shared<u16>(lane * 2);
}
__global__ void the_other_warp_writes_after_it_arrived(u16 *to) {
    extern __shared__ __align__(128) char shared[];
    const u32 lane = threadIdx.x % 32, is_ahead = threadIdx.x / 32 == blockIdx.x, signal = shared_address(shared) + 128;
    if (threadIdx.x == 0) signal_init(signal, 1);
    __syncthreads();
    if (is_ahead) {
        signal_wait(signal, 0);
        to[blockIdx.x * 32 + lane] = at_shared<u16>(lane * 2);
    } else {
        if (lane == 0) signal_arrive(signal);
        at_shared<u16>(lane * 2) = 1;
    }
}
__global__ void where_it_runs(int *to) {
    if (threadIdx.x == 0) to[blockIdx.x] = gridDim.x * 1000 + blockDim.x;
}
__global__ void half_of_a_block_meets(int *to) {
    if (threadIdx.x < 32) __syncthreads();
    to[threadIdx.x] = 1;
}
__global__ void polls_until_it_is_there(const u64 *word, int *to) {
    while (load_system(word) == 0) {}
    to[threadIdx.x] = 1;
}
__global__ void bytes_from_the_next_block(int *to) {  // of two; the first one sends none if `to` says so
    extern __shared__ __align__(128) char shared[];
    const u32 landed = shared_address(shared) + 128, next = 1 - blockIdx.x;
    if (threadIdx.x == 0) expect_bytes(landed, 16);
    cluster_arrive(), cluster_wait();
    if (threadIdx.x == 0 && !(next && __ldg(to))) send(shared_address(shared), float4{1, 2, 3, 4}, landed, next);
    wait_for_bytes(landed);
    if (threadIdx.x == 0) to[1 + blockIdx.x] = 1;
}
"""


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    """Runs a kernel of the source with a grid, a block and arguments."""
    path = tmp_path_factory.mktemp("source") / "kernels.cu"
    path.write_text(SOURCE)

    def run(name, *arguments, shared_bytes=512, boxes_land_early=False, **macros):
        kernel = cuda_on_cpu.load(path, name, macros, "cpu", shared_bytes, boxes_land_early=boxes_land_early)
        kernel(*arguments)

    return run


def test_every_float16_is_the_float_that_torch_makes_of_it(launch):
    halves = torch.arange(1 << 16).to(torch.int32).to(torch.uint16).view(torch.float16)
    floats = torch.empty(1 << 16)
    launch("widen", 1, 32, halves, floats, len(halves))
    torch.testing.assert_close(floats, halves.float(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(floats.signbit(), halves.signbit())


@pytest.mark.parametrize("name, dtype", [("round_float16", torch.float16), ("round_bfloat16", torch.bfloat16)])
def test_floats_are_rounded_as_torch_rounds_them(launch, name, dtype):
    """Also at ties, where they become subnormal, and where they become infinite."""
    representable = torch.arange(1 << 16).to(torch.int32).to(torch.uint16).view(dtype).float()
    finite = representable[representable.isfinite()].sort().values
    between = (finite[1:].double() + finite[:-1].double()).div(2).float()
    close = [
        between,
        torch.nextafter(between, torch.tensor(torch.inf)),
        torch.nextafter(between, -torch.tensor(torch.inf)),
    ]
    floats = torch.cat([finite, *close, torch.tensor([torch.inf, -torch.inf, 65519.9, 65520, 3.4e38])])
    halves = torch.empty(len(floats), dtype=dtype)
    launch(name, 1, 32, floats, halves, len(floats))
    assert torch.equal(halves, floats.to(dtype))


def test_threads_of_a_block_meet_at_a_barrier(launch):
    values, reversed_ = torch.arange(64.0), torch.empty(64)
    launch("reverse_of_a_block", 1, 64, values, reversed_)
    assert torch.equal(reversed_, values.flip(0))


def test_copies_land_when_they_are_waited_for(launch):
    """Before that a kernel that reads them finds NaN."""
    values, read = torch.arange(128.0), torch.zeros(2, 32)
    launch("before_and_after_the_wait", 1, 32, values, read)
    assert read[0].isnan().all()
    assert torch.equal(read[1], values[::4])


@pytest.mark.parametrize("early", [False, True])
def test_boxes_land_when_they_are_waited_for_or_at_any_wait_before(launch, early, monkeypatch):
    monkeypatch.setattr(nvrtc, "encode", cuda_on_cpu.encode)
    values, read = torch.arange(64).to(torch.float16).view(1, 64), torch.zeros(2, 64, dtype=torch.float16)
    tensor_map = nvrtc.TensorMap(values, box=1)
    launch("before_and_after_the_wait_for_a_box", 1, 64, tensor_map, read, boxes_land_early=early)
    assert torch.equal(read[0], values[0]) if early else read[0].isnan().all()
    assert torch.equal(read[1], values[0])


@pytest.mark.parametrize("name", ["one_warp_reads_without_a_barrier", "the_other_warp_writes_after_it_arrived"])
def test_one_warp_is_as_far_ahead_of_the_others_as_it_may_be(launch, name):
    """What it reads too early is NaN, in every second block for the last warp: taking turns would hide it."""
    read = torch.zeros(2, 32, dtype=torch.float16)
    launch(name, 2, 64, read)
    assert read[:, 0].isnan().all()


def test_every_block_knows_its_grid(launch):
    seen = torch.zeros(3, dtype=torch.int32)
    launch("where_it_runs", 3, 64, seen)
    assert seen.tolist() == [3064] * 3


@pytest.mark.parametrize("name", ["reverse_of_a_block", "before_and_after_the_wait"])
def test_what_is_read_outside_the_given_tensors_is_counted(launch, name):
    """Plain reads and copies, by one thread."""
    whole = torch.arange(128.0)
    short = whole[: 31 if name == "reverse_of_a_block" else 124]
    with pytest.raises(AssertionError, match=f"{name} with {{}} is 1 times outside the tensors"):
        launch(name, 1, 32, short, torch.empty(64))


def test_what_is_written_behind_the_shared_memory_of_a_block_is_counted(launch):
    values = torch.arange(1.0, 65.0)
    launch("reverse_of_a_block", 1, 64, values, torch.empty(64), shared_bytes=256)
    with pytest.raises(AssertionError, match="reverse_of_a_block with {} is 4 times outside .* shared memory"):
        launch("reverse_of_a_block", 1, 64, values, torch.empty(64), shared_bytes=252)


def test_threads_that_wait_for_ever_are_an_error(launch):
    """At a barrier that others never reach, for a word that nobody writes, for bytes that no block sends; a block that
    ends does not hide it."""
    with pytest.raises(AssertionError, match="half_of_a_block_meets with {} never ends: every thread"):
        launch("half_of_a_block_meets", 1, 64, torch.zeros(64, dtype=torch.int32))
    with pytest.raises(AssertionError, match="polls_until_it_is_there with {} never ends: every thread"):
        launch("polls_until_it_is_there", 1, 32, torch.zeros(1, dtype=torch.int64), torch.zeros(32, dtype=torch.int32))
    marks = torch.tensor([0, 0, 0], dtype=torch.int32)
    launch("bytes_from_the_next_block", 2, 64, marks, CLUSTER=2)
    assert marks.tolist() == [0, 1, 1]
    with pytest.raises(AssertionError, match="bytes_from_the_next_block with .* never ends: every thread"):
        launch("bytes_from_the_next_block", 2, 64, torch.tensor([1, 0, 0], dtype=torch.int32), CLUSTER=2)


def test_the_library_that_runs_kernels_is_compiled_once_for_its_text(monkeypatch, tmp_path):
    """The second time stands for another process, which finds it."""
    runtime = tmp_path / "runtime.cpp"
    runtime.write_text("int one() { return 1; }")
    monkeypatch.setattr(cuda_on_cpu, "RUNTIME", runtime)
    monkeypatch.setattr(cuda_on_cpu, "KEPT", tmp_path / "kept")
    compile_anew = cuda_on_cpu._runtime.__wrapped__
    library = compile_anew()
    made = library.stat().st_mtime_ns
    assert compile_anew() == library and library.stat().st_mtime_ns == made
    runtime.write_text("int one() { return 2; }")
    assert compile_anew() != library
    assert {path.suffix for path in library.parent.iterdir()} == {".so", ""}, "libraries and a lock"
