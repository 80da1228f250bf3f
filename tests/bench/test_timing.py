"""The timer on a fake device with a clock of its own: what it must measure, and everything that must not get a time."""

import contextlib
import dataclasses
import gc
import statistics
import weakref
from types import SimpleNamespace

import pytest
import torch
from fake_device import Fake, Host

from repro.bench import devices, timing
from repro.bench.devices import Cuda, Nvml, powers
from repro.bench.timing import COLD, WARM, GraphRun, Task, Unsound, measure

N, K = 48, 64


def kernel(fake, cost=None, side=False, rows=N, spoil=False):
    """y = x W^T as a launch on the fake device, honest unless told otherwise."""

    def launch(x, weight):
        y = torch.full((x.shape[0], N), 7.0)

        def work():
            y[:, :rows] = (x @ weight.T)[:, :rows]
            if spoil:
                weight[0, 0] += 1

        fake.run(work, cost or (lambda: fake.read(weight)), side)
        return y

    return launch


def task(launch, name="gemv", **changes):
    torch.manual_seed(0)
    facts = {"inputs": {"x": torch.randn(2, K), "weight": torch.randn(N, K)}, "want": lambda x, weight: x @ weight.T}
    return Task(**{"name": name, "launch": launch, "tolerance": 1e-5, **facts, **changes})


def test_an_honest_kernel_gets_its_time():
    fake = Fake()
    (result,) = measure([task(kernel(fake, cost=3e-6))], fake)
    assert result.us == pytest.approx(3.0) and result.p20 == pytest.approx(3.0) and len(result.samples) == timing.ROUNDS
    assert result.nbytes == N * K * 4 and result.gb_per_s == pytest.approx(N * K * 4 / 3e3)
    assert result.relerr <= 1e-5 and result.clock_mhz == 1980 and result.throttle == "none"


def test_cold_misses_the_cache_and_warm_hits_it(monkeypatch):
    monkeypatch.setattr(timing, "COLD_BYTES", 0)
    fake = Fake(l2=10 * N * K * 4)
    cold, warm = (measure([task(kernel(fake))], fake, mode)[0] for mode in (COLD, WARM))
    assert cold.copies >= 25 and cold.us == pytest.approx(4.0)
    assert warm.copies == 1 and warm.us == pytest.approx(1.0)


def test_copies_hold_more_than_two_and_a_half_caches_and_every_copy_is_launched():
    fake = Fake(l2=50 * 2**20)
    weight = torch.randn(1024, 4096)
    inputs = {"x": torch.randn(1, 4096), "weight": weight}
    seen = set()

    def launch(x, weight):
        seen.add(weight.data_ptr())
        return x @ weight.T

    fake.most = 13
    run = GraphRun(task(launch, inputs=inputs), fake)
    assert run.copies * weight.nbytes >= max(2.5 * fake.l2, timing.COLD_BYTES)
    assert len(seen) == run.copies and run.launches >= 13 and run.launches % run.copies == 0


@dataclasses.dataclass(frozen=True)
class Packed:
    codes: torch.Tensor
    rows: int

    def __post_init__(self):
        assert self.codes.shape == (self.rows, 8)


def test_copies_lie_in_a_row_and_are_the_same_in_everything_but_place():
    torch.manual_seed(0)
    value = {
        "packed": Packed(torch.randint(0, 9, (6, 8), dtype=torch.int32), 6),
        "turned": torch.randn(5, 7).t(),
        "pieces": (torch.randn(3), [torch.tensor(2.5), 4, "x"]),
        "fp8": torch.randn(40).to(torch.float8_e4m3fn),
        "every other": torch.randn(4, 6)[:, ::2],
    }
    copies = timing.copies_in_a_row(value, 3)
    flat = [timing.tensors(each) for each in copies]
    for tensors in flat:
        for copied, original in zip(tensors, timing.tensors(value)):
            assert copied.dtype == original.dtype and torch.equal(copied.float(), original.float())
    assert flat[1][1].stride() == value["turned"].stride() and copies[2]["pieces"][1][1:] == [4, "x"]
    assert copies[1]["packed"].rows == 6 and copies[1]["packed"] is not value["packed"]
    every = [tensor for tensors in flat for tensor in tensors]
    addresses = [tensor.data_ptr() for tensor in every]
    assert addresses == sorted(addresses)
    assert len({tensor.untyped_storage().data_ptr() for tensor in every}) == 1
    assert all((address - addresses[0]) % 64 == 0 for address in addresses)
    steps = {b[0].data_ptr() - a[0].data_ptr() for a, b in zip(flat, flat[1:])}
    assert len(steps) == 1


def test_median_and_percentiles_of_the_rounds():
    fake = Fake()
    noise = [0.0] * timing.WARMUP + [i / 100 for i in range(25)]
    fake.noise = iter(noise)
    (result,) = measure([task(kernel(fake, cost=1e-6))], fake)
    assert result.us == pytest.approx(1.12)
    assert (result.p20, result.p80) == pytest.approx((1.042, 1.198))


def test_tasks_take_turns_and_the_floor_reads_their_exact_bytes():
    fake = Fake()
    order, sizes = [], []

    def named(name):
        inner = kernel(fake, cost=2e-6)
        return task(inner, name)

    def floor(nbytes):
        sizes.append(nbytes)
        slow, fast = kernel(fake, cost=1.5e-6), kernel(fake, cost=1e-6)
        return [task(slow, "slow floor", nbytes=nbytes), task(fast, "floor", nbytes=nbytes)]

    real = GraphRun.round
    try:
        GraphRun.round = lambda self, number, check=False: (order.append(self.task.name), real(self, number, check))[1]
        results = measure([named("a"), named("b")], fake, floor=floor, rounds=4)
    finally:
        GraphRun.round = real
    assert sizes == [N * K * 4]
    assert [f.fraction for f in results] == pytest.approx([0.5, 0.5])
    rounds = [order[i : i + 4] for i in range(0, len(order), 4)]
    assert all(sorted(r) == ["a", "b", "floor", "slow floor"] for r in rounds)
    assert {r[0] for r in rounds} == {"a", "b", "floor", "slow floor"}


def test_energy_is_per_launch():
    fake = Fake()
    (result,) = measure([task(kernel(fake))], fake, joule_seconds=0.1)
    assert result.joule == pytest.approx(8e-6 / result.launches)


class Driver:
    """An energy counter that is updated every 0.1 s, and its clock; an answer takes 2 ms. Loads set the power."""

    def __init__(self, step=0.1):
        self.step, self.now, self.energy, self.shown, self.watts = step, 10.03, 0.0, 0, 100.0

    def clock(self):
        return self.now

    def counter(self):
        before, self.now = self.now, self.now + 0.002
        self.energy += self.watts * 2.0
        if self.now // self.step > before // self.step:
            self.shown = round(self.energy)
        return self.shown

    def load(self, watts):
        return lambda: setattr(self, "watts", watts)


@pytest.mark.parametrize("seconds, steps", [(0.05, 1), (0.1, 2), (0.35, 4)])
def test_power_is_the_step_between_two_updates_of_the_counter(seconds, steps):
    """Loads follow each other, each from an update to an update."""
    driver = Driver()
    begin, watts = driver.now, [600.0, 150.0, 700.0]
    measured = powers(driver.counter, [driver.load(w) for w in watts], seconds, driver.clock)
    assert measured == pytest.approx(watts, rel=0.03)
    assert driver.now - begin < 0.11 + len(watts) * (steps * driver.step + 0.01)


@pytest.mark.parametrize("reading", [None, 7])
def test_a_counter_that_cannot_be_read_or_stands_still_gives_no_energy(reading):
    driver = Driver()

    def counter():
        driver.counter()
        return reading

    assert powers(counter, [driver.load(9.0)] * 3, 0.1, driver.clock) == [None] * 3
    assert powers(counter, [], 0.1, driver.clock) == []


@pytest.mark.parametrize(
    "mask, reasons",
    [(0, "none"), (0x04, "power cap"), (0x24, "power cap+thermal (software)"), (0x01, "none"), (None, None)],
)
def test_throttle_reasons_in_words(mask, reasons):
    nvml = Nvml.__new__(Nvml)
    nvml._read = lambda call, *arguments: mask if "Reasons" in call else 1980
    assert nvml.state() == {"clock_mhz": 1980, "throttle": reasons}


@pytest.mark.parametrize("copies, seconds, turns", [(1, 30e-6, 34), (6, 90e-6, 12), (90, 230e-6, 2), (2, 5e-3, 1)])
def test_a_graph_is_long_enough_that_its_start_does_not_count(copies, seconds, turns):
    """At least a millisecond, or 128 launches; whole turns through the copies."""
    run = GraphRun.__new__(GraphRun)
    run.copies, run.backend = copies, Cuda
    assert run._turns(seconds) == turns


class Node:
    """In a cycle with itself, so that only the collector ends it; its destructor calls the device."""

    def __init__(self, destroyed):
        self.me, self.destroyed = self, destroyed

    def __del__(self):
        self.destroyed()


def device_without_gpu(monkeypatch, capturing):
    """`repro.devices` with a `torch.cuda` whose captures only say that they are under way."""

    @contextlib.contextmanager
    def graph(*_, **__):
        capturing.append(True)
        try:
            yield
        finally:
            capturing.clear()

    nothing = lambda *_, **__: SimpleNamespace(wait_stream=str)  # noqa: E731
    names = ("Stream", "current_stream", "synchronize", "CUDAGraph", "Event")
    cuda = SimpleNamespace(**dict.fromkeys(names, nothing), stream=contextlib.nullcontext, graph=graph)
    monkeypatch.setattr(devices, "torch", SimpleNamespace(cuda=cuda))


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("was_on", [True, False])
def test_no_destructor_of_garbage_runs_inside_a_capture(monkeypatch, was_on, fails):
    """It could call CUDA, and the capture would fail. Afterwards the collector is as it was, and the garbage goes."""
    capturing, destroyed, before = [], [], gc.get_threshold()
    device_without_gpu(monkeypatch, capturing)

    def call():
        Node(lambda: destroyed.append(bool(capturing)))
        kept = [[] for _ in range(1000)]  # enough for a collection
        if fails and capturing:
            raise RuntimeError("cannot")
        return kept

    gc.set_threshold(100, 1, 1)
    if not was_on:
        gc.disable()
    try:
        with pytest.raises(RuntimeError, match="cannot") if fails else contextlib.nullcontext():
            devices.CudaGraph([call] * 5, 0)
        assert gc.isenabled() == was_on
    finally:
        gc.enable()
        gc.set_threshold(*before)
    gc.collect()
    assert len(destroyed) == (3 if fails else 7) and not any(destroyed)


# ---- what must not get a time


def cached(fake):
    """Computes once, then hands out what it has."""
    kept = []

    def launch(x, weight):
        if not kept:
            kept.append(x @ weight.T)
        return kept[0]

    return launch


def cached_clone(fake):
    """Computes once for these addresses, then copies what it has: a launch that does a little work."""
    kept = {}

    def launch(x, weight):
        if x.data_ptr() not in kept:
            kept[x.data_ptr()] = x @ weight.T
        y = torch.empty(2, N)
        fake.run(lambda: y.copy_(kept[x.data_ptr()]))
        return y

    return launch


def late(fake):
    """Returns before the last rows are written, but only once it has been checked."""
    count = [0]

    def launch(x, weight):
        y = torch.empty(2, N)

        def work():
            count[0] += 1
            rows = N if count[0] < 60 else N - 1
            y[:, :rows] = (x @ weight.T)[:, :rows]

        fake.run(work)
        return y

    return launch


@pytest.mark.parametrize(
    "make, words",
    [
        (cached, "not written"),
        (cached_clone, "is off by"),
        (lambda fake: kernel(fake, side=True), "not written"),
        (lambda fake: kernel(fake, rows=N - 1), "not written"),
        (late, "not written"),
        (lambda fake: kernel(fake, spoil=True), "changed its weights|is off by"),
        (lambda fake: lambda x, weight: (fake.run(lambda: None), torch.zeros(2, N))[1], "not written"),
        (lambda fake: lambda x, weight: torch.empty(2, N + 1), "expected"),
    ],
    ids=["cached", "cached-clone", "side-stream", "early-return", "late-early-return", "mutates", "nothing", "shape"],
)
def test_cheats_get_no_time(make, words):
    fake = Fake()
    with pytest.raises(Unsound, match=words) as caught:
        measure([task(make(fake))], fake)
    assert str(caught.value).startswith("gemv: ")


def test_a_weight_that_is_changed_without_harm_to_the_output_is_caught():
    fake = Fake()

    def launch(x, weight, unused):
        y = torch.empty(2, N)

        def work():
            y.copy_(x @ weight.T)
            unused[0] = 9.0

        fake.run(work)
        return y

    inputs = {"x": torch.randn(2, K), "weight": torch.randn(N, K), "unused": torch.randn(4)}
    with pytest.raises(Unsound, match="changed its weights"):
        measure([task(launch, inputs=inputs, want=lambda x, weight, unused: x @ weight.T)], fake)


def test_an_activation_that_is_changed_after_use_is_caught():
    fake = Fake()

    def launch(x, weight):
        y = torch.empty(2, N)

        def work():
            y.copy_(x @ weight.T)
            x[:] = 5.0

        fake.run(work)
        return y

    with pytest.raises(Unsound, match="off by|changed its activations"):
        measure([task(launch)], fake)


@pytest.mark.parametrize("name", ["x", "weight"])
@pytest.mark.parametrize("fill", [0.0, 1.5])
def test_zeros_and_constants_are_refused(name, fill):
    inputs = {"x": torch.randn(2, K), "weight": torch.randn(N, K)}
    inputs[name] = torch.full_like(inputs[name], fill)
    with pytest.raises(Unsound, match=f"input {name} .* time random inputs"):
        measure([task(kernel(Fake()), inputs=inputs)], Fake())


def test_a_wrong_kernel_says_how_wrong():
    fake = Fake()
    with pytest.raises(Unsound, match=r"off by 0\.00[0-9]+ \(allowed 1e-05\)"):
        measure(
            [task(lambda x, weight: (y := torch.empty(2, N), fake.run(lambda: y.copy_(1.001 * x @ weight.T)))[0])], fake
        )


def test_a_failure_among_peers_is_noted_and_the_others_are_timed():
    fake, failures = Fake(), {}
    tasks = [task(kernel(fake, rows=3), "bad"), task(kernel(fake, cost=2e-6), "good")]
    results = measure(tasks, fake, failures=failures)
    assert [f.name for f in results] == ["good"] and isinstance(failures["bad"], Unsound)


def test_whatever_a_task_raises_is_noted_and_keeps_nothing_alive(monkeypatch):
    """Frames of its traceback would hold the copies and graphs of everybody, in a cycle."""
    fake, failures, alive = Fake(), {}, weakref.WeakSet()

    class Watched(GraphRun):
        def __init__(self, *arguments):
            alive.add(self)
            super().__init__(*arguments)

    def breaks(error):
        def launch(x, weight):
            raise error("no")

        return launch

    monkeypatch.setattr(timing, "GraphRun", Watched)
    gc.disable()
    try:
        bad = {"a": breaks(RuntimeError), "b": breaks(KeyError), "c": kernel(fake, rows=3)}
        tasks = [task(launch, name) for name, launch in bad.items()]
        assert [result.name for result in measure([*tasks, task(kernel(fake))], fake, failures=failures)] == ["gemv"]
        assert not alive
    finally:
        gc.enable()
    assert {name: type(error) for name, error in failures.items()} == {"a": RuntimeError, "b": KeyError, "c": Unsound}
    assert str(failures["a"]) == "a: cannot be captured: no"


def test_a_floor_that_is_unsound_is_nobody_else_s_failure():
    fake, failures = Fake(), {}
    with pytest.raises(Unsound, match="^floor: "):
        measure([task(kernel(fake))], fake, floor=lambda n: [task(kernel(fake, rows=3), "floor")], failures=failures)
    assert not failures


def test_a_wrong_mode_and_equal_names_are_refused():
    fake = Fake()
    with pytest.raises(ValueError, match="'cold' or 'warm'"):
        measure([task(kernel(fake))], fake, mode="tepid")
    with pytest.raises(ValueError, match="share a name"):
        measure([task(kernel(fake)), task(kernel(fake))], fake)


def test_integer_and_fp8_outputs_are_poisoned_and_compared():
    fake = Fake()

    def whole(x, weight):
        y = torch.empty(2, N, dtype=torch.int32)
        fake.run(lambda: y.copy_(x.int() @ weight.int().T))
        return y

    inputs = {
        "x": torch.randint(-9, 9, (2, K), dtype=torch.int8),
        "weight": torch.randint(-9, 9, (N, K), dtype=torch.int8),
    }
    want = lambda x, weight: x.int() @ weight.int().T  # noqa: E731
    assert measure([task(whole, inputs=inputs, want=want, tolerance=0.0)], fake)[0].relerr == 0
    y = torch.zeros(3, dtype=torch.float8_e4m3fn)
    timing.poison(y)
    assert y.float().isnan().all()


def test_the_processor_itself():
    """Packing, quantizers and references are timed by the host's clock, as plain calls."""
    (result,) = measure([task(lambda x, weight: x @ weight.T)], Host(), WARM, rounds=5)
    assert result.us > 0 and result.copies == 1 and result.clock_mhz is None
    with pytest.raises(Unsound):
        measure([task(cached(None))], Host(), WARM, rounds=5)


def test_samples_are_in_microseconds_a_launch():
    fake = Fake()
    (result,) = measure([task(kernel(fake, cost=5e-6))], fake, rounds=7)
    assert statistics.median(result.samples) == result.us == pytest.approx(5.0) and len(result.samples) == 7
