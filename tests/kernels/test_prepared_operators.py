"""What an operator prepares once: the second call looks up nothing, and computes with its own tensors.

The sources are emulated; what is in Triton runs in its interpreter in `test_kernels_triton.py`.
"""

import inspect
import types

import cuda_on_cpu
import pytest
import torch
from relative_error import relative_error

pytest.importorskip("triton")

from repro.bench import kernel_list  # noqa: E402
from repro.kernels import compensated_gemv, launch_config, nvrtc, w2a2_gemv  # noqa: E402
from repro.store.kernel_rows import KERNELS  # noqa: E402

CASES = {  # of operators whose source is CUDA C++, and that no other test prepares
    "q4_k_gemv": {"N": 67, "K": 512, "dtype": "bfloat16"},
    "zigzag_gemv": {"N": 300, "K": 97, "dtype": "float16", "ordered": True},
    "zigzag_sparse": {"N": 300, "K": 97, "dtype": "float16", "ordered": True, "share": 0.5},
    "zigzag_masked": {"N": 300, "K": 97, "dtype": "bfloat16", "ordered": False, "share": 0.5},
    "w2a2_gemv": {"M": 2, "N": 19, "K": 352, "dtype": "float16", "split": 30},
    "w2a2_ready": {"M": 1, "N": 19, "K": 352, "dtype": "float16"},
    "active_inputs": {"K": 311, "share": 0.5, "ordered": True, "dtype": "float16"},
    "rms_norm_active": {"H": 1301, "residual": True, "threshold": 0.7, "dtype": "float16"},
    "silu_product_active": {"F": 129, "threshold": 0.5, "dtype": "bfloat16"},
    "compensated_gemv": compensated_gemv.CASES[1],
}
WITHOUT = ("read_floor",)  # reads memory for the timer alone


@pytest.mark.parametrize("name", [name for name in KERNELS if name not in WITHOUT])
def test_every_operator_prepares_its_calls(name):
    assert kernel_list.function_of(name).prepare is not None


def by_position(module, inputs):
    """An operator's arguments in order, as an engine gives them; those behind the last that is given are left out."""
    parameters = inspect.signature(module.reference).parameters
    last = max(position for position, name in enumerate(parameters) if name in inputs)
    return [inputs.get(name, parameters[name].default) for name in list(parameters)[: last + 1]]


def flat(result):
    return result if isinstance(result, tuple) else (result,)


@cuda_on_cpu.NEEDS_COMPILER
@pytest.mark.parametrize("name", CASES)
def test_a_prepared_call_looks_up_nothing_and_computes_with_its_own_tensors(name, monkeypatch):
    """Two inputs of the same sizes and numbers; weights are others, too, and no output is written twice."""
    facts = types.SimpleNamespace(multi_processor_count=8, shared_memory_per_block_optin=cuda_on_cpu.SHARED_BYTES)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(compensated_gemv, "unsupported", lambda device: None)
    monkeypatch.setattr(w2a2_gemv, "bulk_unsupported", lambda device: None)
    monkeypatch.setattr(nvrtc, "load", cuda_on_cpu.load)
    module = kernel_list.load(name)
    first, second = (module.make_inputs(CASES[name] | {"seed": seed}) for seed in (1, 2))
    for number, value in first.items():  # such as a threshold, which a launch is prepared for
        if not torch.is_tensor(value):
            second[number] = value
    caches = [plans for plans in (vars(module).get("_plan"), vars(w2a2_gemv)["prepared"]) if plans is not None]
    for plans in caches:
        plans.cache_clear()
    call = kernel_list.function_of(name).prepare(*by_position(module, first))

    def looked_up(*given, **named):
        raise AssertionError(f"a prepared call looks up {given} {named}")

    monkeypatch.setattr(nvrtc, "load", looked_up)
    monkeypatch.setattr(launch_config, "configurations", looked_up)
    monkeypatch.setattr(torch.cuda, "get_device_properties", looked_up)
    results = [flat(call(*by_position(module, inputs))) for inputs in (first, second)]
    for outputs, inputs in zip(results, (first, second)):
        for output, want in zip(outputs, flat(module.reference(**inputs)), strict=True):
            if output.dtype == torch.int32:
                assert int((output != want).sum()) <= 2 * (name != "active_inputs")  # values at the threshold
            else:
                assert relative_error(output, want) < 6e-3
    for plans in caches:
        plans.cache_clear()
