"""What functions of kernels that are no operators do with wrong tensors: the same as operators, on a CPU and a GPU.

Engines call them with addresses of other GPUs' memory, with a slice to write to, or between two streams.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from devices import DEVICES

pytest.importorskip("triton")

from repro.kernels import (  # noqa: E402
    compensate,
    linear,
    operators,
    packing,
    row_parallel,
    vocabulary_argmax,
    w2a2_gemv,
    wna16_gemv,
)


def latent(device):
    inputs = compensate.make_inputs(compensate.CASES[1], device)
    made = inputs["made"]
    tensors = {"x": inputs["x"], "down": made.down, "scales": made.scales, "gates": made.gates}

    def call(x, down, scales, gates):
        return compensate.latent(x, replace(made, down=down, scales=scales, gates=gates))

    return call, tensors


def add(device):
    inputs = compensate.make_inputs(compensate.CASES[1], device)
    made = inputs["made"]
    vectors = compensate.latent_reference(inputs["x"].float(), made)

    def call(y, vectors, up):
        compensate.add(y, vectors, replace(made, up=up))
        return y

    return call, {"y": inputs["y"], "vectors": vectors, "up": made.up}


def give(device):
    case = row_parallel.CASES[0]
    inputs = row_parallel.make_inputs(case, device)
    x, packed, down = inputs["parts"][0]
    values = case["rows"] + inputs["up"].shape[1]
    memory = torch.zeros(values, device=device)

    def call(x, codes, scale_zero, down, scales, memory):
        own = packing.PackedWeight(codes, scale_zero, 4, packed.group, packed.rows, packed.columns, packed.symmetric)
        row_parallel.give(x, own, down, scales, [memory])
        return memory

    weight = {"codes": packed.codes, "scale_zero": packed.scale_zero}
    return call, {"x": x, **weight, "down": down, "scales": inputs["scales"], "memory": memory}


def take(device):
    case = row_parallel.CASES[0]
    inputs = row_parallel.make_inputs(case, device)
    names = ("up", "gates", "scales", "residual", "weight")
    memory = torch.ones(case["rows"] + inputs["up"].shape[1], device=device)

    def call(memory, **others):
        return row_parallel.take(memory, eps=1e-5, **others)[0]

    return call, {"memory": memory, **{name: inputs[name] for name in names}}


def give_words(device):
    logits = torch.randn(3, 48, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)

    def call(logits, memory):
        vocabulary_argmax.give(logits, 40, 0, [memory])
        return memory

    return call, {"logits": logits, "memory": torch.zeros(3, dtype=torch.int64, device=device)}


def take_words(device):
    logits = torch.randn(3, 48, generator=torch.Generator().manual_seed(0))
    words = vocabulary_argmax.words_of(logits, 48, 0)
    return lambda memory: vocabulary_argmax.take(memory, 3), {"memory": words.to(device)}


def one_token(device):
    """x, a packed weight, its form, and what the product is written to, a part of a longer row."""
    form = {"rows": 40, "columns": 256, "bits": 4, "group": 64, "symmetric": False, "m": 1, "seed": 0}
    x, packed = wna16_gemv.make_inputs(form, dtype=torch.float16)
    return x.to(device), packed.to(device), torch.zeros(1, 64, dtype=torch.float16, device=device)[:, 8:48]


def write(device):
    x, packed, y = one_token(device)

    def call(x, codes, scale_zero, y):
        form = 4, packed.group, packed.rows, packed.columns, packed.symmetric
        linear.into(x, packing.PackedWeight(codes, scale_zero, *form), y)
        return y

    return call, {"x": x, "codes": packed.codes, "scale_zero": packed.scale_zero, "y": y}


def write_two_bit(device):
    inputs = {name: value.to(device) for name, value in w2a2_gemv.make_inputs(w2a2_gemv.CASES[0]).items()}
    y = inputs["x"].new_zeros(len(inputs["x"]), len(inputs["factors"]))
    return w2a2_gemv.into, {"y": y, **inputs}


CALLS = {
    "compensate": (latent, add),
    "row_parallel": (give, take),
    "vocabulary_argmax": (give_words, take_words),
    "wna16_gemv": (write,),
    "w2a2_gemv": (write_two_bit,),
}
EVERY, TENSORS = [], []
for kernel_name, makers in CALLS.items():
    for maker in makers:
        EVERY.append((kernel_name, maker))
        TENSORS += [(kernel_name, maker, argument) for argument in maker("cpu")[1]]
FREE = ("latent", "x"), ("write", "x")  # of any layout


def strided(tensor):
    """The same values in every second place."""
    return torch.stack([tensor, tensor], -1)[..., 0]


def refused(name, call, inputs, *words):
    with pytest.raises(ValueError) as caught:
        call(**inputs)
    message = str(caught.value)
    assert message.startswith(f"{name}: ") and "\n" not in message, message
    assert all(word in message for word in words), message


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name, make, argument", TENSORS)
def test_every_wrong_tensor_is_refused_by_name(name, make, argument, device):
    call, inputs = make(device)
    tensor = inputs[argument]
    if argument not in ("codes", "scale_zero"):  # a `PackedWeight` of other types or sizes cannot be made
        other = torch.float64 if tensor.dtype.is_floating_point else torch.int16
        refused(name, call, inputs | {argument: tensor.to(other)}, argument)
        refused(name, call, inputs | {argument: tensor[..., : tensor.shape[-1] // 2].contiguous()})
    if (make.__name__, argument) not in FREE:
        refused(name, call, inputs | {argument: strided(tensor)}, argument)
    if len(inputs) > 1:
        refused(name, call, inputs | {argument: tensor.to("meta")}, " on ")


@pytest.mark.parametrize("name, make", EVERY)
def test_inputs_are_the_same_when_made_again(name, make):
    """The test below makes them once for a GPU and once for a CPU."""
    torch.testing.assert_close(make("cpu")[1], make("cpu")[1], rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name, make", EVERY)
def test_right_tensors_are_taken_on_a_gpu(name, make):
    """And give what they give on a CPU, or the operator does where there is only a kernel."""
    call, inputs = make("cuda")
    reference, on_cpu = make("cpu")
    if make in (write, write_two_bit):
        del on_cpu["y"]
        form = (4, 64, 40, 256, False) if make is write else ()
        reference = getattr(torch.ops.lowbit, name)
        want = reference(*on_cpu.values(), *form)
    else:
        want = reference(**on_cpu)
    torch.testing.assert_close(call(**inputs).cpu(), want, rtol=1e-2, atol=1e-2)


def test_float32_is_computed_by_references_alone():
    """A kernel for two bytes a number would read it as twice as many; on a CPU it is the type of a model."""
    call, inputs = latent("cpu")
    assert call(**inputs | {"x": inputs["x"].float()}).dtype == torch.float32
    on_gpu = SimpleNamespace(dtype=torch.float32, device=torch.device("cuda"))
    assert operators.not_on_gpu(on_gpu, "x") == "x is float32; on a GPU it is float16 or bfloat16"
    with pytest.raises(ValueError, match="logits are float32 .*; the kernel takes float16 or bfloat16"):
        vocabulary_argmax.give(torch.zeros(1, 16), 16, 0, [torch.zeros(1, dtype=torch.int64)], on_kernel=True)


NUMBERS = [  # a call, what it says
    (lambda: vocabulary_argmax.give(torch.zeros(1, 16), 17, 0, [torch.zeros(1).long()]), "17 tokens from 0 on"),
    (lambda: vocabulary_argmax.give(torch.zeros(1, 16), 16, -1, [torch.zeros(1).long()]), "16 tokens from -1 on"),
    (lambda: vocabulary_argmax.give(torch.zeros(2, 16), 16, 0, []), "no memory to give words to"),
    (lambda: vocabulary_argmax.take(torch.zeros(3).long(), 4), "4 rows of a memory of 3"),
    (lambda: vocabulary_argmax.take(torch.zeros(3).long(), 0), "0 rows of a memory of 3"),
    (lambda: vocabulary_argmax.take(torch.zeros(2, 99).long(), 65), "65 rows of 2 ranks; ranks write up to 64 rows"),
    (lambda: vocabulary_argmax.take(torch.zeros(5, 9).long(), 1), "1 rows of 5 ranks"),
]


@pytest.mark.parametrize("call, message", NUMBERS)
def test_numbers_that_do_not_fit_are_refused(call, message):
    with pytest.raises(ValueError, match=f"^vocabulary_argmax: {message}"):
        call()


def test_a_rank_that_lacks_a_part_of_its_compensator_is_refused():
    call, inputs = give("cpu")
    refused("row_parallel", call, inputs | {"scales": None}, "down has no scales")
    refused("row_parallel", call, inputs | {"x": inputs["x"][:, :-8].contiguous()}, "for a weight of 40 x 208")
    x, packed, down = row_parallel.make_inputs(row_parallel.CASES[0])["parts"][0]
    without_marks = [torch.zeros(64)] * 2
    for memories, message in (([], "no memory"), (without_marks, "2 memories, one of float32, which has no marks")):
        with pytest.raises(ValueError, match=f"^row_parallel: {message}"):
            row_parallel.give(x, packed, down, inputs["scales"], memories)
    call, inputs = take("cpu")
    refused("row_parallel", call, inputs | {"scales": None}, "up has no scales")
    refused("row_parallel", call, inputs | {"up": None}, "gates without up")


def test_a_call_like_one_before_is_checked_once():
    """What differs in anything that the check looks at is checked, also after a call with the same numbers."""
    checked = []
    check = operators.checked_once(lambda numbers, tensors: checked.append(tensors))
    x = torch.zeros(2, 8)
    for _ in range(3):
        check((8,), (x, None))
    check((8,), (torch.ones(2, 8), None))
    assert len(checked) == 1
    for others in ((x, x), (x.half(), None), (x[:, :4], None), (x.to("meta"), None), (x.T, None), (x,)):
        before = len(checked)
        check((8,), others)
        assert len(checked) == before + 1
    check((9,), (x, None))
    assert len(checked) == 8

    def fails(numbers, tensors):
        checked.append(tensors)
        raise ValueError("never right")

    check = operators.checked_once(fails)
    for _ in range(2):
        with pytest.raises(ValueError, match="never right"):
            check((8,), (x,))
    assert len(checked) == 10


def test_spans_of_compensators_are_in_order_and_inside():
    inputs = compensate.make_inputs(compensate.CASES[1])
    made = inputs["made"]
    vectors = compensate.latent_reference(inputs["x"].float(), made)
    first, end, *rest = made.spans
    for spans in ((end, first, *rest), (first, end - 1, *rest), (first, end, 1000, 1024, *rest[2:])):
        with pytest.raises(ValueError, match=r"^compensate: outputs \[.* are not those of 2 compensators in order"):
            compensate.add(inputs["y"], vectors, replace(made, spans=spans))


def test_a_part_of_a_longer_row_is_what_one_token_is_written_to():
    """Of another length or with more tokens it is refused, and where it fits the check says nothing."""
    x, packed, y = one_token("cpu")
    wna16_gemv.check_into(x, packed, y)
    with pytest.raises(ValueError, match=r"^wna16_gemv: y is \[1, 32\], expected \[1, 40\]"):
        wna16_gemv.check_into(x, packed, y[:, :32])
    with pytest.raises(ValueError, match=r"^wna16_gemv: x must be .* \[1, K\]"):
        wna16_gemv.check_into(x.expand(2, -1).contiguous(), packed, y.expand(2, -1).contiguous())
