"""Operators under autograd, autocast and inference mode, and with no tokens: nothing is lost or rounded in silence."""

import inspect

import pytest
import torch
from devices import DEVICES
from torch.autograd import forward_ad

pytest.importorskip("triton")

from repro.bench import kernel_list  # noqa: E402
from repro.kernels import linear, operators, packing, w8a8  # noqa: E402
from repro.kernels.rms_norm import rms_norm  # noqa: E402

FORM = {"N": 48, "K": 256, "bits": 4, "group": 64, "symmetric": False, "dtype": "float16", "seed": 0}
NO_GRADIENT = r"^{} has no gradient; call it under torch.no_grad\(\), or detach its result$"


def activations(count, device, dtype=torch.float16, columns=256):
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(count)).to(device, dtype)


def packed_weight(device):
    return kernel_list.load("w4a16_gemm").random_weight(FORM).to(device)


def int8_weight(device):
    return tuple(t.to(device) for t in w8a8.quantize_weight(activations(24, "cpu", torch.float32)))


def layers(device):
    """By the name of their operator: two layers and a norm, functions of x `[M, 256]`."""
    packed, int8 = packed_weight(device), int8_weight(device)
    weight = torch.ones(256, dtype=torch.float16, device=device)
    return {
        "wna16": lambda x: linear.wna16(x, packed),
        "w8a8": lambda x: w8a8.w8a8(x, *int8),
        "rms_norm": lambda x: rms_norm(x, weight, eps=1e-5)[0],  # an argument by its name
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["wna16", "w8a8", "rms_norm"])
def test_a_backward_pass_through_an_operator_is_an_error(name, device):
    """Also for a call like one before, and where another path through the residual would have a gradient."""
    layer = layers(device)[name]
    x = activations(3, device).requires_grad_()
    with torch.no_grad():
        want = layer(x)
    for _ in range(2):
        y = layer(x)
        assert torch.equal(y, want) and y.requires_grad
        with pytest.raises(RuntimeError, match=NO_GRADIENT.format(name)):
            (y.float().sum() + x.float().sum()).backward()
        assert x.grad is None
    y.detach().requires_grad_().sum().backward()


@pytest.mark.parametrize("device", DEVICES)
def test_a_weight_that_wants_a_gradient_does_not_get_none_either(device):
    codes, scales = int8_weight(device)
    y = w8a8.w8a8(activations(3, device), codes, scales.requires_grad_())
    with pytest.raises(RuntimeError, match=NO_GRADIENT.format("w8a8")):
        y.sum().backward()


def test_weights_made_in_inference_mode_take_activations_with_a_gradient():
    with torch.inference_mode():
        packed = packed_weight("cpu")
        packed = packing.PackedWeight(packed.codes.clone(), packed.scale_zero.clone(), 4, 64, 48, 256, False)
    assert linear.wna16(activations(3, "cpu").requires_grad_(), packed).requires_grad


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_compiled_forward_pass_runs_and_its_backward_pass_is_an_error(device, backend):
    torch._dynamo.reset()
    eager = layers(device)
    compiled = {name: torch.compile(layer, fullgraph=True, backend=backend) for name, layer in eager.items()}
    for name, layer in compiled.items():
        for count in (2, 5, 9):
            x = activations(count, device).requires_grad_()
            y = layer(x)
            torch.testing.assert_close(y.detach(), eager[name](x).detach(), rtol=4e-3, atol=4e-3)
            with pytest.raises(RuntimeError, match=NO_GRADIENT.format(name)):
                y.float().sum().backward()


@pytest.mark.parametrize("device", DEVICES)
def test_a_forward_mode_derivative_is_an_error_and_no_zero(device):
    layer = layers(device)["wna16"]
    x = activations(3, device)
    layer(x)  # from now on such a call is recognized
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        layer(forward_ad.make_dual(x, torch.ones_like(x)))
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(layer, (x,), (torch.ones_like(x),))


def test_a_call_that_is_recognized_is_none_in_forward_mode():
    calls, known = [], {}
    facts = operators.facts_of([0])
    on_device = operators.remembering("it", lambda values: None, lambda *values: lambda x: x, facts, known)

    def overload(*values):
        calls.append("dispatcher")
        return on_device(*values)

    function = operators.direct("it", overload, [0], [inspect.Parameter.empty], facts, known)
    x = torch.ones(2, 8)
    function(x), function(x)
    assert calls == ["dispatcher"]
    with forward_ad.dual_level(), pytest.raises(NotImplementedError):
        function(forward_ad.make_dual(x, x))


def test_a_view_that_is_negated_is_never_recognized():
    """Its memory has the other sign, and the same facts as a tensor without it."""
    facts, known, calls = operators.facts_of([0]), {}, []
    on_device = operators.remembering("it", lambda values: None, lambda *values: lambda x: x.sum(), facts, known)

    def overload(*values):
        calls.append("dispatcher")
        return on_device(*(value.resolve_neg() for value in values))

    function = operators.direct("it", overload, [0], [inspect.Parameter.empty], facts, known)
    x = torch.ones(2, 8)
    function(x), function(x)
    assert len(calls) == 1
    for _ in range(3):
        assert function(torch._neg_view(x)) == -16
    assert len(calls) == 4


@pytest.mark.parametrize("other", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_autocast_changes_no_result(device, dtype, other):
    for layer in list(layers(device).values())[:2]:
        for count in (1, 9, 40, 2100):  # on a GPU of every code path; 2100 tokens are the library's product
            x = activations(count, device, dtype)
            want = layer(x)
            with torch.autocast(device, dtype=other):
                y = layer(x)
            assert y.dtype == dtype and torch.equal(y, want)


@pytest.mark.parametrize("other", [torch.float16, torch.bfloat16])
def test_the_librarys_product_on_a_dense_weight_is_none_of_autocasts(other):
    x, dense = activations(5, "cpu", torch.bfloat16), activations(24, "cpu", torch.bfloat16).T
    want = torch.mm(x, dense)
    with torch.autocast("cpu", dtype=other):
        y = linear.product(x, dense)
        assert torch.is_autocast_enabled("cpu")
    assert y.dtype == torch.bfloat16 and torch.equal(y, want)


@pytest.mark.parametrize("device", DEVICES)
def test_no_tokens_are_checked_as_some_are(device):
    packed, (codes, scales) = packed_weight(device), int8_weight(device)
    for x in (activations(0, device, torch.float32), activations(0, "meta")):
        with pytest.raises(ValueError, match="^wna16: "):
            linear.wna16(x, packed)
        with pytest.raises(ValueError, match="^w8a8: "):
            w8a8.w8a8(x, codes, scales)
    none = activations(0, device)
    for wrong in (
        (codes.float(), scales),
        (codes, scales.double()),
        (codes, scales[1:]),
        (codes.T.contiguous().T, scales),
    ):
        with pytest.raises(ValueError, match="^w8a8: "):
            w8a8.w8a8(none, *wrong)
    assert linear.wna16(none, packed).shape == (0, 48) and w8a8.w8a8(none, codes, scales).shape == (0, 24)


def test_weights_without_columns_or_of_another_rank_are_refused():
    codes, scales = int8_weight("cpu")
    with pytest.raises(ValueError, match=r"^w8a8: x \[3, 0\] does not fit codes w_q \[24, 0\]"):
        w8a8.w8a8(activations(3, "cpu", columns=0), codes[:, :0].contiguous(), scales)
    for weight in (torch.ones(8), torch.ones(2, 8, 8), torch.ones(8, 8, dtype=torch.int8)):
        with pytest.raises(ValueError, match=r"^w8a8: a weight to quantize is a floating-point matrix \[N, K\], not "):
            w8a8.quantize_weight(weight)
