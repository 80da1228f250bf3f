"""What every operator does with every wrong tensor: one table over all of them, on a CPU and on a GPU.

A wrong dtype, device, layout, address, size or number of elements is a ValueError of one sentence that names operator
and argument. Nothing is computed from it: not by a kernel, not by a reference, not by tracing.
"""

import math

import pytest
import torch
from devices import DEVICES

pytest.importorskip("triton")

from repro.bench import kernel_list  # noqa: E402
from repro.bench.operator_tasks import OPERATORS  # noqa: E402
from repro.bench.task import tensors  # noqa: E402
from repro.kernels import active_inputs, linear, operators, packing, w8a8  # noqa: E402
from repro.kernels.operators import VECTOR, Argument  # noqa: E402

WEIGHT = {"N": 48, "K": 256, "bits": 4, "group": 64, "symmetric": False, "dtype": "float16", "seed": 0}
INT8 = {"M": 4, "N": 24, "K": 64, "dtype": "float16", "seed": 0}
SMALL = {
    "rms_norm": {"H": 256},
    "silu_product": {"F": 128},
    "sample": {"V": 1024},
}  # changes of an operator's first case
LISTS = ("active_inputs", "rms_norm_active", "silu_product_active")  # whose last output is a list of active inputs
NAMES = (
    "compensated_gemv",
    *("rms_norm_active", "silu_product_active", "quantize_2bit", "w2a2_gemv", "w2a2_ready", "dense_gemv"),
    *("active_inputs", "q4_k_gemv", "q4_k_naive_sparse", "zigzag_gemv", "zigzag_sparse", "zigzag_masked"),
    *("rms_norm", "silu_product", "rope_append", "attention", "sample", "argmax", "pple"),
    *("wna16", "wna16_gemv", "w4a16_gemm", "dequantize"),
    *("w8a8", "w8a8_gemv", "w8a8_gemm", "quantize_activation", "read_floor"),
)


def overload(name):
    return getattr(torch.ops.lowbit, name).default


def right(name, device="cpu"):
    """Keywords of an operator that it takes."""
    if name in OPERATORS or name == "compensated_gemv":
        module = kernel_list.load(name)
        return module.make_inputs(module.CASES[0] | SMALL.get(name, {}), device)
    if name in ("wna16", "wna16_gemv", "w4a16_gemm", "dequantize"):
        packed = kernel_list.load("w4a16_gemm").random_weight(WEIGHT).to(device)
        x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1)).to(device, torch.float16)
        form = {n: getattr(packed, n) for n in ("codes", "scale_zero", "bits", "group", "rows", "columns", "symmetric")}
        return form | {"dtype": torch.float16} if name == "dequantize" else {"x": x} | form
    if name == "read_floor":
        x, out = kernel_list.load(name).make_inputs({"bytes": 8192, "seed": 0}, device)
        return {"x": x, "out": out}
    if name == "quantize_activation":
        return {"x": kernel_list.load(name).make_inputs(INT8, device)}
    if name == "w8a8_gemm":
        x_q, s_x, w_q, s_w = kernel_list.load(name).make_inputs(INT8, device)
        return {"x_q": x_q, "s_x": s_x, "w_q": w_q, "s_w": s_w, "dtype": torch.float16}
    return dict(zip(("x", "w_q", "s_w"), kernel_list.load("w8a8_gemv").make_inputs(INT8, device)))


def called(name, inputs):
    """The outputs of an operator, those that it writes to among them; of a list only what it lists, in order."""
    inputs = {n: v.clone() if torch.is_tensor(v) and is_written(name, n) else v for n, v in inputs.items()}
    results = tensors(overload(name)(**inputs))
    if name in LISTS and not results[-1].is_meta:
        results[-1] = active_inputs.in_order(results[-1])  # what is behind the count may be memory that nobody wrote
    return results + [v for n, v in inputs.items() if is_written(name, n)]


def is_written(name, argument):
    return (name, argument) in (("rope_append", "keys"), ("rope_append", "values"), ("read_floor", "out"))


def arguments(name):
    return [argument for argument, value in right(name).items() if torch.is_tensor(value)]


TENSORS = []
for operator in NAMES:
    TENSORS += [(operator, argument) for argument in arguments(operator)]
OPTIONAL = (("compensated_gemv", "gates"), ("rms_norm", "residual"), ("rms_norm_active", "residual"))
PAIRED = (("attention", "mask"), ("attention", "start"))  # both or neither


def strided(x):
    """The same values in every second place."""
    wide = torch.stack([x, x], -1)
    return wide[..., 0]


def shifted(x, nbytes):
    """The same values at an address so many bytes past a multiple of 256."""
    room = torch.zeros(x.nbytes + 512, dtype=torch.uint8, device=x.device)
    start = -room.data_ptr() % 256 + nbytes
    there = room[start : start + x.nbytes].view(x.dtype).view(x.shape)
    return there.copy_(x)


def of_another_dtype(x):
    return x.to(torch.float64 if x.dtype.is_floating_point else torch.int16)


def other_devices(device):
    return ["meta"] if device == "cpu" else ["meta", "cpu"]


def refused(name, inputs, argument, *words):
    with pytest.raises(ValueError) as caught:
        overload(name)(**inputs)
    message = str(caught.value)
    assert message.startswith(f"{name}: ") and "\n" not in message, message
    assert argument in message and all(word in message for word in words), message


def test_the_table_has_every_operator():
    there = {name for name in dir(torch.ops.lowbit)} & set(NAMES)
    defined = {
        str(o).partition("::")[2].partition(".")[0] for o in torch._C._dispatch_get_all_op_names() if "lowbit" in o
    }
    assert defined - {"no_gradient"} == set(NAMES) == there
    for name in kernel_list.KERNELS:
        assert name in NAMES or name == "linear"  # whose operator is wna16


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_right_inputs_are_taken(name, device):
    assert all(t.numel() > 0 for t in called(name, right(name, device)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name, argument", TENSORS)
def test_every_wrong_tensor_is_refused_by_name(name, argument, device):
    inputs = right(name, device)
    tensor = inputs[argument]
    refused(name, inputs | {argument: of_another_dtype(tensor)}, argument)
    refused(name, inputs | {argument: strided(tensor)}, argument, "strided")
    refused(name, inputs | {argument: tensor[:0]}, argument, "empty")
    if (name, argument) != ("read_floor", "x"):  # which takes any shape
        refused(name, inputs | {argument: tensor[None]}, "[1, ")
    for elsewhere in other_devices(device):
        moved = inputs | {argument: tensor.to(elsewhere)}
        if len(arguments(name)) == 1:  # then it is computed, or traced, there
            assert all(result.device.type == elsewhere for result in called(name, moved))
            continue
        with pytest.raises(ValueError, match=f"^{name}: .* on .* on "):
            overload(name)(**moved)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name, argument", TENSORS)
def test_no_tensor_and_one_of_no_dimension_are_refused(name, argument, device):
    """None stands for what may be left out, and for nothing else."""
    inputs = right(name, device)
    if (name, argument) != ("read_floor", "x"):  # which takes any shape
        with pytest.raises(ValueError, match=f"^{name}: {argument} "):
            overload(name)(**inputs | {argument: inputs[argument].flatten()[0].clone()})
    if len(arguments(name)) == 1:  # the dispatcher finds no device
        return
    if (name, argument) in OPTIONAL:
        called(name, inputs | {argument: None})
        return
    said = "mask and start belong to a tree" if (name, argument) in PAIRED else f"{argument} is None, not a tensor"
    with pytest.raises(ValueError, match=f"^{name}: {said}"):
        overload(name)(**inputs | {argument: None})


@pytest.mark.parametrize("name", ["argmax", "pple"])
def test_a_row_of_2_to_the_31_logits_is_refused(name):
    """Places in a row are numbers of 32 bits."""
    with pytest.raises(ValueError, match=f"^{name}: logits have 2147483648 columns"):
        overload(name)(torch.empty(1, 1 << 31, dtype=torch.float16, device="meta"))


def test_places_beyond_a_cache_are_refused_on_a_cpu():
    """A negative one would count from the end."""
    inputs = right("rope_append")
    live = int((inputs["rows"] >= 0).sum())
    for argument, size in (("rows", 2), ("slots", 16), ("positions", 16)):
        for bad in (-7, size):
            if (argument, bad) == ("rows", -7):  # padding
                continue
            tensor = inputs[argument].clone()
            tensor[live - 1] = bad
            with pytest.raises(
                ValueError, match=f"^rope_append: {argument} are from .*; they must be from 0 to {size - 1}"
            ):
                overload("rope_append")(**inputs | {argument: tensor})
    inputs = right("attention")
    slots = inputs["keys"].shape[2]
    for argument, bad in (("lengths", slots + 1), ("rows", 2)):
        tensor = inputs[argument].clone()
        tensor[-1] = bad
        with pytest.raises(ValueError, match=f"^attention: rows up to .*; the cache has 2 rows of {slots} slots"):
            overload("attention")(**inputs | {argument: tensor})


@pytest.mark.parametrize("device", DEVICES)
def test_a_token_of_a_negative_length_sees_nothing(device):
    inputs = {n: v for n, v in right("attention", device).items() if n not in ("mask", "start")}
    lengths = inputs["lengths"].clone()
    lengths[:3] = -1
    y = overload("attention")(**inputs | {"lengths": lengths})
    assert not y[:3].any() and y[3:].all(-1).all()
    one = {n: v[:1] for n, v in inputs.items() if n in ("q", "rows")}
    assert not overload("attention")(**inputs | one | {"lengths": lengths[:1]}).any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name, argument", TENSORS)
def test_a_tensor_off_its_alignment_is_refused_or_computed_right(name, argument, device):
    """CUDA C++ loads 16 bytes at once and says so; Triton and `pad` take any address that a dtype can have."""
    inputs = right(name, device)
    tensor = inputs[argument]
    moved = inputs | {argument: shifted(tensor, max(4, tensor.element_size()))}
    vectors = (("w8a8_gemv", "x"), ("w8a8_gemv", "w_q"), ("read_floor", "x"))
    vectors += tuple(("compensated_gemv", one) for one in ("down", "up", "gates"))
    in_words = argument in ("codes", "scale_zero", "headers", "units")
    if in_words or (name, argument) in vectors:
        refused(name, moved, argument, f"multiple of {VECTOR} bytes", "4 off")
        return
    for output, want in zip(called(name, moved), called(name, inputs)):
        torch.testing.assert_close(output, want, rtol=4e-3, atol=4e-3, equal_nan=True)


@pytest.mark.parametrize("name", LISTS)
def test_what_is_behind_a_lists_count_is_not_compared(name, monkeypatch):
    """A kernel that keeps no order writes as many entries as it lists, in any order; the rest is what was there."""
    inputs, true = right(name), overload(name)
    want = called(name, inputs)

    def unordered(**inputs):
        *others, active = tensors(true(**inputs))
        count = int(active[0])
        active[1 : 1 + count] = active[1 : 1 + count].flip(0)
        active[1 + count :] = torch.randint(-(2**31), 2**31, active[1 + count :].shape, dtype=torch.int32)
        return *others, active

    monkeypatch.setitem(globals(), "overload", lambda _: unordered)
    assert all(torch.equal(output, reference) for output, reference in zip(called(name, inputs), want, strict=True))


LIMITS = [  # an operator, what is changed, and what is said: more tokens than it takes, or numbers that do not fit
    ("wna16_gemv", {"x": torch.ones(20, 256).half()}, r"x is \[20, 256\], expected \[1 to 16, 256\]"),
    ("w4a16_gemm", {"x": torch.ones(2049, 256).half()}, r"x is \[2049, 256\], expected \[1 to 2048, 256\]"),
    ("wna16", {"x": torch.ones(3, 128).half()}, r"x \[3, 128\] does not fit a weight of 48 x 256"),
    ("wna16_gemv", {"columns": 128}, r"x is \[5, 256\], expected \[1 to 16, 128\]"),
    ("wna16", {"rows": 64}, r"codes \[3, 4, 32, 4\] must be \[4, 4, 32, 4\] for a weight of 64 x 256"),
    ("w4a16_gemm", {"bits": 8}, r"codes \[3, 4, 32, 4\] must be \[3, 8, 32, 4\]"),
    ("dequantize", {"group": 0}, r"scale_zero \[3, 4, 8, 2, 2\] must be \[3, 1, 8, 2, 2\]"),
    ("dequantize", {"symmetric": True}, r"scale_zero \[3, 4, 8, 2, 2\] must be \[3, 4, 8, 2\]"),
    ("dequantize", {"bits": 3}, "codes of 3 bits"),
    ("dequantize", {"group": 48}, "groups of 48 columns"),
    ("dequantize", {"dtype": torch.float32}, "dtype is float32"),
    ("w8a8_gemm", {"dtype": torch.float32}, "dtype is float32"),
    ("w8a8_gemv", {"x": torch.ones(9, 64).half()}, "1 to 8 tokens"),
    ("q4_k_gemv", {"x": torch.ones(1, 256).half()}, r"codes \[67, 2, 128\] are of 512 columns, and x has 256"),
    ("q4_k_gemv", {"x": torch.ones(2, 512)}, r"x must be .* \[1, K\]"),
    ("zigzag_gemv", {"x": torch.ones(1, 332).half()}, r"codes \[2, 333, 128\] are of 333 columns, and x has 332"),
    ("zigzag_gemv", {"rows": 256}, "rows is 256, but 2 bands hold 257 to 512"),
    ("zigzag_sparse", {"rows": 513}, "rows is 513, but 2 bands hold 257 to 512"),
    ("zigzag_sparse", {"active": torch.ones(333).int()}, "active has 333 entries; a count and 333 indices are 334"),
    ("q4_k_naive_sparse", {"active": torch.ones(9).int()}, "active has 9 entries"),
    ("zigzag_masked", {"threshold": -1.0}, "threshold is -1.0"),
    ("quantize_2bit", {"x": torch.ones(1, 40)}, "x has 40 columns, no multiple of 32"),
    ("w2a2_gemv", {"x": torch.ones(5, 352)}, "x has 5 tokens; it takes 1 to 4"),
    ("w2a2_gemv", {"x": torch.ones(1, 544)}, r"units \[3, 1, 1184\] must be \[3, 2\] for 19 rows and 17 groups"),
    ("w2a2_gemv", {"factors": torch.ones(25)}, r"units .* must be \[4, 1\] for 25 rows and 11 groups"),
    ("w2a2_gemv", {"units": torch.ones(3, 1, 1180, dtype=torch.uint8)}, "must have 1184 bytes each, or 1408"),
    ("w2a2_gemv", {"index": torch.zeros(330, dtype=torch.int32)}, "index has 330 columns, no multiple of 32"),
    ("w2a2_ready", {"factors": torch.ones(16)}, r"must be \[2, 1\] for 16 rows"),
    ("rms_norm_active", {"threshold": math.nan}, "threshold is nan"),
    ("silu_product_active", {"threshold": -1.0}, "threshold is -1.0"),
    ("silu_product_active", {"x": torch.ones(1, 7)}, "x has 7 columns; it takes an even number"),
    ("active_inputs", {"threshold": math.nan}, "threshold is nan"),
    ("active_inputs", {"x": torch.ones(1, (1 << 16) + 1)}, "x has 65537 columns; a list holds 65536 at most"),
    ("rms_norm", {"eps": -1e-5}, "eps is -1e-05; it is a number of 0 or more"),
    ("rms_norm", {"eps": math.nan}, "eps is nan"),
    ("rms_norm_active", {"eps": math.inf}, "eps is inf"),
    ("attention", {"scale": math.nan}, "scale is nan, which is no number"),
    ("attention", {"scale": -math.inf}, "scale is -inf"),
    ("read_floor", {"x": torch.ones(6, dtype=torch.uint8)}, "x of 6 bytes"),
    ("read_floor", {"x": torch.ones(16384, dtype=torch.uint8)}, "out has 4 entries"),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name, change, message", LIMITS, ids=[f"{name}-{i}" for i, (name, *_) in enumerate(LIMITS)])
def test_numbers_that_do_not_fit_are_refused(name, change, message, device):
    change = {n: v.to(device) if torch.is_tensor(v) else v for n, v in change.items()}
    with pytest.raises(ValueError, match=f"^{name}: .*{message}"):
        overload(name)(**right(name, device) | change)


@pytest.mark.parametrize("device", DEVICES)
def test_layers_take_any_layout_any_address_and_no_tokens(device):
    packed = kernel_list.load("w4a16_gemm").random_weight(WEIGHT).to(device)
    inputs = right("w8a8", device)
    layers = [
        (lambda x: linear.wna16(x, packed), 48, 256),
        (lambda x: w8a8.w8a8(x, inputs["w_q"], inputs["s_w"]), 24, 64),
    ]
    for layer, rows, columns in layers:
        x = torch.randn(2, 3, columns, generator=torch.Generator().manual_seed(0)).to(device, torch.float16)
        want = layer(x)
        assert want.shape == (2, 3, rows) and want.is_contiguous()
        for same in (strided(x), x.transpose(0, 1).contiguous().transpose(0, 1), shifted(x, 2)):
            assert torch.equal(layer(same), want)
        assert layer(x[:0]).shape == (0, 3, rows) and layer(x[:, :0]).shape == (2, 0, rows)
        assert layer(x[0, 0]).shape == (rows,)
        with pytest.raises(ValueError, match="does not fit"):
            layer(x[..., :-1])
        with pytest.raises(ValueError, match=r"x must be a contiguous float16 or bfloat16 .* not a float32"):
            layer(x.float())


@pytest.mark.parametrize("device", DEVICES)
def test_layers_compile_into_one_graph_at_every_number_of_tokens(device):
    """`fullgraph`: nothing falls back to Python; 17 and 2049 tokens take other code paths than 1, none take none."""
    torch._dynamo.reset()
    packed = kernel_list.load("w4a16_gemm").random_weight(WEIGHT).to(device)
    inputs = right("w8a8", device)

    @torch.compile(fullgraph=True, backend="eager" if device == "cpu" else "inductor")
    def both(x, y):
        return linear.wna16(x, packed) * 2, w8a8.w8a8(y, inputs["w_q"], inputs["s_w"]) + 1

    for count in (1, 2, 7, 8, 9, 16, 17, 40, 129, 300, 2048, 2049, 0):
        x, y = (torch.randn(count, k, device=device, dtype=torch.float16) for k in (256, 64))
        outputs, want = both(x, y), (linear.wna16(x, packed) * 2, w8a8.w8a8(y, inputs["w_q"], inputs["s_w"]) + 1)
        for output, reference in zip(outputs, want):
            torch.testing.assert_close(output, reference, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_is_no_number_is_never_swallowed(bad, dtype, device):
    """A token with a NaN, or under int8 with an infinity, has NaN in every channel; the others are as before."""
    packed = kernel_list.load("w4a16_gemm").random_weight(WEIGHT).to(device)
    inputs = right("w8a8", device)
    for count in (1, 2, 8, 17, 64, 200):
        for columns, layer in (
            (256, lambda x: linear.wna16(x, packed)),
            (64, lambda x: w8a8.w8a8(x, inputs["w_q"], inputs["s_w"])),
        ):
            x = torch.randn(count, columns, generator=torch.Generator().manual_seed(count)).to(device, dtype)
            want, token = layer(x), count // 2
            x[token, columns - 3] = bad
            y = layer(x)
            assert not y[token].isfinite().any() and (columns == 256 or y[token].isnan().all())
            others = torch.arange(count, device=device) != token
            torch.testing.assert_close(y[others], want[others], rtol=4e-3, atol=4e-3)
    _, scales = torch.ops.lowbit.quantize_activation(torch.tensor([[1.0, bad], [1.0, 2.0]], dtype=dtype, device=device))
    assert scales[0].isnan() and scales[1] == torch.tensor(2.0) / 127


def test_sizes_that_share_a_name_are_equal_and_digits_are_that_size():
    def signature(a, b): ...

    declared = {"a": Argument((torch.float32,), "T 4"), "b": Argument("a", "T ...")}
    check = operators.checker("it", operators.inspect.signature(signature), declared, None)
    check((torch.ones(3, 4), torch.ones(3, 5, 6)))
    with pytest.raises(ValueError, match=r"^it: b must be .* \[T = 3, ...\] on cpu, not a float32 tensor \[2, 5\]"):
        check((torch.ones(3, 4), torch.ones(2, 5)))
    with pytest.raises(ValueError, match=r"^it: a must be .* \[T, 4\] on cpu, not a float32 tensor \[3, 5\]"):
        check((torch.ones(3, 5), torch.ones(3, 5)))


def test_a_weight_is_checked_once_for_all_its_calls():
    packing._misfit.cache_clear()
    inputs = right("wna16")
    for _ in range(3):
        overload("wna16")(**inputs)
    checked = packing._misfit.cache_info()
    assert checked.misses == 1 and checked.hits >= 2
