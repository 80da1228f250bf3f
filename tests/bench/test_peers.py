"""Peers: each optional, each with a sentence where it cannot run, each right about the weights that it really holds."""

import collections
import importlib.metadata
import sys
import types

import pytest
import torch
from fake_device import Host

from repro.bench import kernel_list, peers, timing
from repro.bench.kernel_list import CALLED, DISPATCHERS, KERNELS, OURS, load
from repro.bench.peers import PEERS
from repro.bench.stored_peers import TYPES, rescale, shapes, times
from repro.bench.task import Layer, dense
from repro.core.errors import UserError
from repro.kernels import nvrtc

EVERYONE = {**PEERS, **OURS}
LAYERS = ("/linear", "/w8a8", "w2-g32/bf16/wna16_gemv")  # whose functions take layers and call an operator themselves


@pytest.mark.parametrize("label", EVERYONE)
def test_without_a_gpu_everyone_says_why_not(label):
    reason = EVERYONE[label].unavailable("cpu")
    assert reason and "\n" not in reason and ("CUDA" in reason or "cannot be imported" in reason)


def test_labels_and_formats():
    assert all(label == p.label and p.name and p.format for label, p in EVERYONE.items())
    assert {"torch.matmul", "torch.compile", "tinygemm", "gemlite", "torch._scaled_mm", "torch._int_mm"} == {
        p.name for p in PEERS.values()
    }


def test_gemlite_is_compared_at_one_release(monkeypatch):
    monkeypatch.setattr(peers, "needs_cuda", lambda device: None)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1.0")
    assert peers.no_gemlite("cuda") == f"is compared at gemlite=={peers.GEMLITE}, here is 0.1.0"
    monkeypatch.setattr(importlib.metadata, "version", lambda name: peers.GEMLITE)
    assert peers.no_gemlite("cuda") is None


@pytest.mark.parametrize("bits, group, symmetric", [(4, 128, False), (2, 64, False), (8, 0, True), (4, 0, False)])
def test_a_layer_and_its_codes(bits, group, symmetric):
    layer = Layer(48, 256, seed=3, device="cpu")
    codes, scales, zeros = layer.codes(bits, group, symmetric)
    assert codes.dtype == torch.uint8 and int(codes.max()) == 2**bits - 1
    assert scales.shape == zeros.shape == (48, 256 // (group or 256))
    weight = dense(codes, scales, zeros)
    steps = scales.float().repeat_interleave(group or 256, 1)
    assert ((weight - layer.weight).abs() <= 0.51 * steps + 1e-6).float().mean() > (0.999 if not symmetric else 0.99)
    assert not symmetric or (zeros == 2 ** (bits - 1)).all()
    assert torch.equal(Layer(48, 256, seed=3, device="cpu").weight, layer.weight)
    assert not torch.equal(layer.activations(2, torch.float32)[0], layer.activations(2, torch.float32)[1])


@pytest.mark.parametrize("label, count", [("bf16/bf16/torch.matmul", 3), ("int8/int32/torch._int_mm", 32)])
def test_those_that_a_processor_can_run_are_timed_soundly(label, count):
    task = EVERYONE[label].task(Layer(48, 256, device="cpu"), count)
    (result,) = timing.measure([task], Host(), timing.WARM, rounds=3)
    assert result.facts["M"] == count and result.facts["N"] == 48 and result.relerr <= EVERYONE[label].tolerance


@pytest.mark.parametrize("label", OURS)
def test_our_operators_run_on_a_processor_and_are_right(label):
    """Operators have a slow path on the processor, so what `bench` would launch is tested without a GPU."""
    provider = OURS[label]
    if "cannot be imported" in provider.unavailable("cpu"):
        pytest.skip(provider.unavailable("cpu"))
    task = provider.task(Layer(48, 256, device="cpu"), max(2, provider.least))
    (result,) = timing.measure([task], Host(), timing.WARM, rounds=3)
    assert result.relerr <= provider.tolerance and result.nbytes > 48 * 256 // 4


@pytest.mark.parametrize("label", [name for name in OURS if not name.endswith(LAYERS)])
def test_what_a_call_costs_the_host_is_that_of_an_engines_call(label, monkeypatch):
    """By the module's function and by position: around the dispatcher, whose operators take keywords more slowly."""
    calls, function_of = [], kernel_list.function_of

    def noted(name):
        def call(*values, **named):
            calls.append((name, len(values), named))
            return function_of(name)(*values, **named)

        return call

    monkeypatch.setattr(kernel_list, "function_of", noted)
    provider = OURS[label]
    task = provider.task(Layer(512, 1024, device="cpu"), max(1, provider.least))
    task.launch(**task.inputs)
    ((name, count, named),) = calls
    assert name == label.rsplit("/", 1)[-1] and count >= 2 and not named


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True


def test_a_configuration_of_the_sweep_is_prepared_once(monkeypatch):
    """At its first launch, after `nvrtc.jobs_of` has asked what it would compile, and for all copies of its weight."""
    module, asked, launched = load("zigzag_gemv"), [], []

    def prepare(*values, config):
        asked.append(config)
        if len(asked) == 1:
            raise nvrtc.NotCompiled("zigzag")
        return lambda *given: launched.append([id(value) for value in given])

    monkeypatch.setattr(module, "prepare", prepare)
    layer = Layer(512, 1024, device="cpu")
    activations = layer.activations
    object.__setattr__(layer, "activations", lambda count, dtype: activations(count, dtype).as_subclass(OnGpu))
    task = OURS["q4_k-zigzag-n16/bf16/zigzag_gemv"].task(layer, 1)
    assert not asked
    with pytest.raises(nvrtc.NotCompiled):
        task.launch(**task.inputs)
    copy = task.inputs | {"codes": task.inputs["codes"].clone()}
    for inputs in (task.inputs, copy):
        task.launch(**inputs)
    assert asked == [kernel_list.ZIGZAG | {"n1": 16}] * 2
    order = ("x", "codes", "headers")
    assert [given[:3] for given in launched] == [[id(inputs[key]) for key in order] for inputs in (task.inputs, copy)]


@pytest.mark.parametrize("name", [*KERNELS, *CALLED])
def test_every_listed_kernel_is_a_room_of_its_own(name):
    try:
        module = load(name)
    except ImportError as error:
        pytest.skip(str(error))
    assert module.__doc__
    if name not in DISPATCHERS:
        assert module.CASES and callable(module.make_inputs) and callable(module.reference)
        assert isinstance(module.unsupported("cpu"), str) and module.unsupported("cpu").count("\n") == 0


def test_recorded_peers_are_whole():
    rows = times()
    names = {r.peer for r in rows}
    assert {"awq_gemv_g128", "marlin_g128", "cublas_bf16", "inductor_bf16", "gl_w2g64"} <= names
    assert len(shapes()) == 20 and all(r.us > 0 and r.bytes > 0 and r.date and r.device for r in rows)
    awq = {(r.N, r.K): r.us for r in rows if (r.peer, r.M, r.mode) == ("awq_gemv_g128", 1, "cold")}
    assert awq[4096, 4096] == 5.379


Record = collections.namedtuple("Record", TYPES)


def record(peer, us, n=64, m=1, mode="cold"):
    return Record(peer, n, 64, m, mode, us, 100, 1e-3, 1.0, "X", "2026-01-01", "e")


def test_bridging_is_by_the_ratio_of_the_library():
    records = [record("cublas_bf16", 10.0), record("awq", 5.0), record("awq", 7.0, n=128), record("marlin", 3.0, m=16)]
    here = {(64, 64, 1, "cold"): 11.0, (128, 64, 1, "cold"): 9.0}
    ((r, ratio, us),) = rescale(here, records, ["awq", "marlin"])
    assert r.us == 5.0 and ratio == pytest.approx(1.1) and us == pytest.approx(5.5)


@pytest.mark.parametrize("text", [None, "peer,N\nx,1\n", "peer\nx,1,2\n", "\x00"])
def test_a_damaged_file_of_recorded_peers(tmp_path, text):
    path = tmp_path / "r.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match="stored peers"):
        if not times(path):
            raise UserError("stored peers: empty")


def test_gemlite_runs_with_recorded_configurations_only(monkeypatch):
    """What its tuner found on this device, or what it ships for the H100; a row says which."""
    key = "({}, 48, 64, 128, 8, 104)"
    core = types.SimpleNamespace(
        GEMLITE_TRITON_CONFIG_CACHE={"GEMM_SPLITK": {key.format(m): {} for m in (4, 8)}},
        get_matmul_type=lambda m, bits: "GEMM" if m >= 64 else "GEMM_SPLITK" if m > 4 else "GEMV",
    )
    package = types.ModuleType("gemlite")
    package.core = core
    utils = types.SimpleNamespace(get_closest_m=lambda m: m)
    for name, module in {
        "": package,
        ".core": core,
        ".triton_kernels": package,
        ".triton_kernels.utils": utils,
    }.items():
        monkeypatch.setitem(sys.modules, f"gemlite{name}", module)
    monkeypatch.setattr(peers, "_gemlite_ready", lambda device: {"GEMV": {key.format(1): {}}})
    layer, provider = Layer(48, 64, device="cpu"), PEERS["w4-g128/fp16/gemlite"]
    assert provider.note(layer, 1) == "GEMV, tuned by GemLite on this device"
    assert provider.note(layer, 4) == provider.note(layer, 8) == "GEMM_SPLITK, as GemLite ships it for the H100"
    with pytest.raises(ValueError, match="python -m repro tune gemlite"):
        provider.task(layer, 64)


def test_what_providers_of_a_layer_share_is_made_once():
    layer = Layer(48, 256, device="cpu")
    assert layer.codes(4, 128)[0] is layer.codes(4, 128)[0] and layer.codes(4, 128)[0] is not layer.codes(4, 0)[0]
    assert torch.equal(layer.dequantized(4, 128), dense(*layer.codes(4, 128))) and layer.int8()[0] is layer.int8()[0]
