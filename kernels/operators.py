"""Register operators `lowbit::<name>`: a kernel on a GPU, its reference on a CPU, one argument check for both.

The check runs before the kernel, before the reference, and before tracing, where one tensor on `meta` beside others
elsewhere would otherwise return memory that nobody wrote. It looks at every tensor: dtype, sizes, device, layout,
address, emptiness. A wrong input is a ValueError of one sentence, which names operator and argument.

PyTorch's dispatcher calls the functions here directly. `torch.library.custom_op` would put a Python layer for autograd
in between, which takes 7 us a call; only a call that autograd would record has one, `WithoutGradient`. These operators
have no gradient: a backward pass through them is an error, so that no gradient is lost in silence.

What a call costs the host is kept down in two steps. What was checked and prepared once is looked up by the facts of
the arguments (`facts_of`): the same facts pass the same check, and need the same launch. And the name in a kernel's
module is not the dispatcher's overload but a function (`direct`) that goes around the dispatcher where this changes
nothing: neither tracing nor a mode nor a gradient is on, and the call is recognized. `torch.ops.lowbit.<name>` always
goes through the dispatcher, which knows no gradient either and says so in a warning of its own.
"""

import inspect
import operator as operator_module
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards
from torch.autograd import forward_ad

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
HALVES = (torch.float16, torch.bfloat16)
VECTOR = 16  # bytes of one load in CUDA C++, and what Triton compiles an aligned address for
PLAIN = (Tensor, torch.nn.Parameter)  # whose data is theirs, unlike a subclass'
MOST_KNOWN = 4096  # calls that an operator remembers, by their facts
MOST_ALIKE = 4  # of one set of sizes and numbers
LIBRARY = torch.library.Library("lowbit", "FRAGMENT")  # its registrations live as long as it does


def _ordinary() -> tuple[int, int]:
    """A thread's dispatch keys where no mode, tracing or transform is on: outside of inference mode and in it."""
    keys = []
    for inference in (False, True):
        with torch.inference_mode(inference):
            keys.append(torch._C._dispatch_tls_local_include_set().raw_repr())
    return tuple(keys)


ORDINARY = _ordinary()
NO_FORWARD_MODE = -1  # the level of forward-mode differentiation outside of it


def _no_gradient(gradient: Tensor, tensor: Tensor, name: str) -> Tensor:
    raise RuntimeError(f"{name} has no gradient; call it under torch.no_grad(), or detach its result")


# An operator, so that a backward pass that is compiled raises where it runs, and a forward pass alone never does: a
# compiler would run what needs no gradient of a result in the forward pass.
LIBRARY.define("no_gradient(Tensor gradient, Tensor tensor, str name) -> Tensor")
LIBRARY.impl("no_gradient", _no_gradient, "CompositeExplicitAutograd")
torch.library.register_fake("lowbit::no_gradient", lambda gradient, tensor, name: torch.empty_like(tensor), lib=LIBRARY)


class WithoutGradient(torch.autograd.Function):
    """A call of an operator that autograd follows: its derivatives, backward and forward, are errors."""

    @staticmethod
    def forward(name: str, overload: Callable[..., Any], names: tuple[str, ...], *values: Any) -> Any:  # noqa: ANN401
        """The operator's results; `names` are those of the last values, which it takes by name."""
        count = len(values) - len(names)
        return overload(*values[:count], **dict(zip(names, values[count:], strict=True)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:  # noqa: ANN401
        """Keep the operator's name, and the tensors that gradients are asked of."""
        ctx.name = inputs[0]
        pairs = zip(inputs, ctx.needs_input_grad, strict=True)
        ctx.save_for_backward(*[value if needed else None for value, needed in pairs])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: ANN401
        """Raise RuntimeError."""
        of_inputs = []
        gradient = next(one for one in gradients if one is not None)
        for tensor, needed in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=True):
            of_inputs.append(torch.ops.lowbit.no_gradient(gradient, tensor, ctx.name) if needed else None)
        return tuple(of_inputs)


def is_recorded(values: Iterable[Any]) -> bool:
    """Whether autograd follows a call with these arguments."""
    if forward_ad._current_level != NO_FORWARD_MODE:
        return True
    if not torch.is_grad_enabled():
        return False
    for value in values:
        if isinstance(value, Tensor) and value.requires_grad:
            return True
    return False


@dataclass(frozen=True)
class Argument:
    """A tensor that an operator takes; it is contiguous and not empty.

    Attributes:
        dtypes: those that it may have, or the name of an argument before it whose dtype it shares.
        sizes: the names of its sizes, with blanks between; equal names are equal sizes, digits are that size, and `...`
            leaves them to `limit`.
        aligned: what its address is a multiple of, in bytes. Triton loads from any address, CUDA C++ by `VECTOR`.
    """

    dtypes: tuple[torch.dtype, ...] | str
    sizes: str
    aligned: int = 1


def operator(
    name: str,
    reference: Callable,
    launch: Callable,
    arguments: Mapping[str, Argument],
    empty: Callable,
    limit: Callable[..., str | None] | None = None,
    mutates: Sequence[str] = (),
    prepare: Callable[..., Callable] | None = None,
) -> Callable[..., Any]:
    """Register `lowbit::<name>` and return a function that calls it, as `direct` says.

    Args:
        name: of the operator, which begins every message.
        reference: computes it on a CPU; its annotated signature is the operator's.
        launch: computes it on a GPU; takes what `reference` takes.
        arguments: its tensors by name; it takes no others.
        empty: results of the right shape and dtype, for tracing; takes what `reference` takes.
        limit: takes what `reference` takes, already checked by `arguments`; says what is wrong in a sentence, or None.
        mutates: names of the arguments that it writes to.
        prepare: takes what `reference` takes and gives the `launch` for calls with these facts (`facts_of`).

    Raises (the operator, at a call):
        ValueError: a tensor or number that does not fit; the sentence names operator, argument, and what was given.
        RuntimeError: a kernel that is launched for the first time inside a CUDA graph capture.
    """
    signature = inspect.signature(reference)
    check = checker(name, signature, arguments, limit)
    positions = [list(signature.parameters).index(argument) for argument in arguments]
    facts = facts_of(positions)
    known: dict[tuple | None, Callable] = {}

    def on_cpu(*values: Any) -> Any:  # noqa: ANN401
        check(values)
        with torch.autocast("cpu", enabled=False):  # a reference rounds where its formula does
            return reference(*values)

    def traced(*values: Any, **more: Any) -> Any:  # noqa: ANN401
        check(values, traced=True)
        return empty(*values, **more)

    LIBRARY.define(name + torch.library.infer_schema(reference, mutates_args=tuple(mutates)))
    LIBRARY.impl(name, on_cpu, "CPU")
    LIBRARY.impl(name, remembering(name, check, prepare or (lambda *values: launch), facts, known), "CUDA")
    torch.library.register_fake(f"lowbit::{name}", traced, lib=LIBRARY)
    overload = getattr(torch.ops.lowbit, name).default
    defaults = [parameter.default for parameter in signature.parameters.values()]
    function = direct(name, overload, positions, defaults, facts, known)
    function.check = check  # of a tuple of all arguments, for callers that launch nothing
    function.prepare = prepare
    return function


def remembering(
    name: str, check: Callable[..., None], prepare: Callable[..., Callable], facts: Callable, known: dict
) -> Callable[..., Any]:
    """The operator on a GPU: checks and prepares a call unless its facts are known, then launches it."""

    def on_cuda(*values: Any) -> Any:  # noqa: ANN401
        key = facts(values)
        ready = known.get(key)
        if ready is not None:
            return ready(*values)
        check(values)
        try:
            ready = prepare(*values)
            result = ready(*values)
        except Exception as error:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(first_in_capture(name)) from error
            raise
        remember(known, key, ready)
        return result

    return on_cuda


def direct(
    name: str,
    overload: Callable[..., Any],
    positions: Sequence[int],
    defaults: Sequence[Any],
    facts: Callable,
    known: Mapping,
) -> Callable[..., Any]:
    """A function that launches what is known of a call, and calls the dispatcher's overload otherwise.

    `positions` are those of tensors among the arguments, of which `defaults` are `inspect.Parameter.empty` for those
    that have none. The dispatcher takes 3 us for an operator in Python where all else of a call of `linear.wna16` takes
    6 (launches emulated on a CPU).
    """
    first = min(positions)
    numbers_of = [numbers(positions, given) for given in range(len(defaults) + 1)]  # by how many arguments there are
    seen: dict[tuple, tuple[tuple[Callable, Callable], ...]] = {}  # what recognizes a call's tensors, and its launch

    def learn(key: tuple, values: Sequence[Any]) -> None:
        if torch._C._dispatch_tls_local_include_set().raw_repr() not in ORDINARY:
            return
        ready, alike = known.get(facts(without_defaults(values, defaults))), seen.get(key, ())
        if ready is None or len(alike) >= MOST_ALIKE:
            return
        recognizes = recognizer(values, positions)
        if recognizes(values):  # not where an address is no multiple of `VECTOR`
            remember(seen, key, (*alike, (recognizes, ready)))

    def dispatched(*values: Any, **named: Any) -> Any:  # noqa: ANN401
        if is_recorded((*values, *named.values())):
            return WithoutGradient.apply(name, overload, tuple(named), *values, *named.values())
        return overload(*values, **named)

    def call(*values: Any, **named: Any) -> Any:  # noqa: ANN401
        unusual = torch.compiler.is_compiling() or forward_ad._current_level != NO_FORWARD_MODE
        if named or unusual or torch._C._is_torch_function_mode_enabled():
            return dispatched(*values, **named)
        try:
            count = len(values)
            key = count, values[first].shape, numbers_of[count](values)
            alike = seen.get(key, ())
        except (AttributeError, IndexError, TypeError):  # no tensor, too many arguments, symbols
            return dispatched(*values)
        for recognizes, ready in alike:
            if recognizes(values):
                return ready(*values)
        result = dispatched(*values)
        learn(key, values)
        return result

    return call


def numbers(positions: Sequence[int], given: int) -> Callable[[Sequence[Any]], Any]:
    """What takes those of a call's arguments, of which so many are given, that are no tensors."""
    others = [position for position in range(given) if position not in positions]
    return operator_module.itemgetter(*others) if others else len


def without_defaults(values: Sequence[Any], defaults: Sequence[Any]) -> Sequence[Any]:
    """Arguments as the dispatcher hands them on: it leaves out those at the end that have their default."""
    given = len(values)
    while given and is_default(values[given - 1], defaults[given - 1]):
        given -= 1
    return values[:given]


def is_default(value: Any, default: Any) -> bool:  # noqa: ANN401
    """Whether an argument is its parameter's default, which is no tensor."""
    return type(value) is type(default) and value == default


def recognizer(values: Sequence[Any], positions: Sequence[int]) -> Callable[[Sequence[Any]], bool]:
    """Whether tensors are like those of a call: all that `facts_of` compares, and the thread's dispatch keys.

    The comparison is that of `torch.compile`'s guards, 0.3 us for three tensors. Addresses are multiples of `VECTOR`.
    """
    there = [position for position in positions if position < len(values)]
    present = [position for position in there if values[position] is not None]
    absent = [position for position in there if values[position] is None]
    first = operator_module.itemgetter(*present)
    take = first if len(present) > 1 else lambda values: (first(values),)
    tensors = take(values)
    if any(tensor.is_neg() for tensor in tensors):  # whose memory has the other sign, which the dispatcher turns
        return lambda values: False
    alike = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    learning = any(tensor.requires_grad for tensor in tensors)

    def recognizes(values: Sequence[Any]) -> bool:
        for position in absent:
            if values[position] is not None:
                return False
        tensors = take(values)
        if not alike(*tensors) or (learning and torch.is_grad_enabled()):
            return False
        address = 0
        for tensor in tensors:
            address |= tensor.data_ptr()
        return not address % VECTOR

    return recognizes


def facts_of(positions: Sequence[int]) -> Callable[[Sequence[Any]], tuple | None]:
    """What decides whether arguments are right, and how they are launched: of tensors what is compared, numbers whole.

    `positions` are those of the tensors. A call with a gradient or with a subclass of Tensor has no facts: None.
    """

    def facts(values: Sequence[Any]) -> tuple | None:
        key, gradients = list(values), torch.is_grad_enabled()
        for position in positions:
            if position >= len(key):
                break
            tensor = key[position]
            if tensor is None:
                continue
            if type(tensor) not in PLAIN or (gradients and tensor.requires_grad):
                return None
            address = tensor.data_ptr() % VECTOR
            key[position] = tensor.dtype, tensor.shape, tensor.get_device(), tensor.is_contiguous(), address
        return tuple(key)

    return facts


def remember(known: dict[tuple | None, Any], key: tuple | None, ready: Any) -> None:  # noqa: ANN401
    """Keep a checked call's launch by its facts, if it has some; the oldest half goes where there are too many."""
    if key is None:
        return
    if len(known) >= MOST_KNOWN:
        for old in list(known)[: MOST_KNOWN // 2]:
            known.pop(old, None)  # another thread may have taken it out
    known[key] = ready


def first_in_capture(name: str) -> str:
    """What to do where a kernel would be compiled or loaded while a CUDA graph is captured, which CUDA forbids."""
    return (
        f"{name}: its first launch is inside a CUDA graph capture, where no kernel can be loaded; "
        f"call it once before, or repro.kernels.warm.warm(model) for products"
    )


@dataclass(frozen=True)
class Slot:
    """An argument at its position, with what its check compares.

    Attributes:
        shares: the position of the argument whose dtype it shares, or -1.
        equal: (its dimension, position, dimension of the argument before it whose size is the same).
        fixed: (its dimension, the size that it must have).
        rank: its number of dimensions, or -1 for any from `least` on.
        optional: whether it may be None.
    """

    position: int
    name: str
    dtypes: tuple[torch.dtype, ...]
    shares: int
    rank: int
    least: int
    optional: bool
    equal: tuple[tuple[int, int, int], ...]
    fixed: tuple[tuple[int, int], ...]
    aligned: int


def checker(
    name: str,
    signature: inspect.Signature,
    arguments: Mapping[str, Argument],
    limit: Callable[..., str | None] | None,
) -> Callable[..., None]:
    """The check of an operator's arguments, given as a tuple in order; it raises ValueError.

    The dispatcher leaves out arguments at the end that have their default, so a tuple may be short.
    """
    slots = slots_of(signature, arguments)
    first = slots[0].position

    def check(values: Sequence[Any], traced: bool = False) -> None:
        count = len(values)
        for slot in slots:
            if slot.position >= count:
                break
            tensor = values[slot.position]
            if tensor is None and slot.optional:
                continue
            right = tensor is not None and fits(tensor, slot, values, values[first].device)
            if not right or (not traced and tensor.data_ptr() % slot.aligned):
                raise ValueError(f"{name}: {wrong(tensor, slot, arguments, slots, values)}")
        if limit is not None and (sentence := limit(*values)):
            raise ValueError(f"{name}: {sentence}")

    return check


def fits(tensor: Tensor, slot: Slot, values: Sequence[Any], device: torch.device) -> bool:
    """Whether a tensor is of the dtype, sizes, device and layout that its slot says, and not empty."""
    dtype, shape = tensor.dtype, tensor.shape
    if not (dtype in slot.dtypes if slot.shares < 0 else dtype is values[slot.shares].dtype):
        return False
    if len(shape) != slot.rank and (slot.rank >= 0 or len(shape) < slot.least):
        return False
    for dimension, other, there in slot.equal:
        if shape[dimension] != values[other].shape[there]:
            return False
    for dimension, size in slot.fixed:
        if shape[dimension] != size:
            return False
    return tensor.device == device and tensor.is_contiguous() and 0 not in shape


def tensor_check(
    name: str,
    arguments: Mapping[str, Argument],
    limit: Callable[..., str | None] | None = None,
    optional: Sequence[str] = (),
) -> Callable[..., None]:
    """The check of an operator for a function that is none, such as one that takes addresses of other devices.

    Args:
        name: of the function, which begins every message.
        arguments: its tensors by name, in the order in which the check takes them.
        limit: takes these tensors, already checked by `arguments`; says what is wrong in a sentence, or None.
        optional: names of those that may be None; no other's size is compared with theirs.

    Returns:
        What raises ValueError as an operator does.
    """
    parameters = []
    for argument in arguments:
        default = None if argument in optional else inspect.Parameter.empty
        parameters.append(inspect.Parameter(argument, inspect.Parameter.KEYWORD_ONLY, default=default))
    signature = inspect.Signature(parameters)
    check = checker(name, signature, arguments, limit)
    return lambda *tensors: check(tensors)


def checked_once(check: Callable[[tuple, tuple], None]) -> Callable[[tuple, tuple], None]:
    """A check of numbers and tensors that passes calls like ones before: then it compares tensors alone, in 1 us.

    Args:
        check: raises ValueError; of tensors, some of which may be None, it looks at dtypes, devices, sizes, layouts
            and whether addresses are multiples of `VECTOR`.
    """
    seen: dict[tuple | None, tuple[Callable, ...]] = {}

    def checked(numbers: tuple, tensors: tuple) -> None:
        key = len(tensors), numbers
        alike = seen.get(key, ())
        for recognizes in alike:
            if recognizes(tensors):
                return
        check(numbers, tensors)
        if len(alike) < MOST_ALIKE:
            recognizes = recognizer(tensors, range(len(tensors)))
            if recognizes(tensors):  # not where an address is no multiple of `VECTOR`
                remember(seen, key, (*alike, recognizes))

    return checked


def not_on_gpu(tensor: Tensor, name: str) -> str | None:
    """Why a GPU does not compute with a float32 tensor where a reference does, or None where it need not."""
    if tensor.dtype == torch.float32 and tensor.device.type == "cuda":
        return f"{name} is float32; on a GPU it is float16 or bfloat16"
    return None


def slots_of(signature: inspect.Signature, arguments: Mapping[str, Argument]) -> list[Slot]:
    """Arguments in the order of a signature, each with where its sizes appeared before."""
    slots: list[Slot] = []
    parameters = list(signature.parameters)
    seen: dict[str, tuple[int, int]] = {}  # the position and dimension where a size is named first
    for name in sorted(arguments, key=parameters.index):
        argument, position = arguments[name], parameters.index(name)
        equal, fixed, names = [], [], argument.sizes.split()
        for dimension, size in enumerate(names):
            if size == "...":
                continue
            if size.isdecimal():
                fixed.append((dimension, int(size)))
            elif size in seen and seen[size][0] != position:
                equal.append((dimension, *seen[size]))
            else:
                seen.setdefault(size, (position, dimension))
        shared = isinstance(argument.dtypes, str)
        slot = Slot(
            position=position,
            name=name,
            dtypes=() if shared else argument.dtypes,
            shares=parameters.index(argument.dtypes) if shared else -1,
            rank=-1 if "..." in names else len(names),
            least=len(names) - names.count("..."),
            optional=signature.parameters[name].default is None,
            equal=tuple(equal),
            fixed=tuple(fixed),
            aligned=argument.aligned,
        )
        slots.append(slot)
    return slots


def wrong(
    tensor: Tensor | None,
    slot: Slot,
    arguments: Mapping[str, Argument],
    slots: Sequence[Slot],
    values: Sequence[Any],
) -> str:
    """The sentence about a tensor that does not fit."""
    if tensor is None:
        return f"{slot.name} is None, not a tensor"
    shape, device = list(tensor.shape), values[slots[0].position].device
    if tensor.numel() == 0:
        return f"{slot.name} of shape {shape} is empty"
    allowed = slot.dtypes or (values[slot.shares].dtype,)
    types = " or ".join(map(plain, allowed))
    required = {dimension: size for dimension, size in slot.fixed}
    required |= {dimension: values[other].shape[there] for dimension, other, there in slot.equal}
    names = [
        name if name.isdecimal() or dimension not in required else f"{name} = {required[dimension]}"
        for dimension, name in enumerate(arguments[slot.name].sizes.split())
    ]
    layout = "" if tensor.is_contiguous() else "strided "
    wanted = f"{slot.name} must be a contiguous {types} tensor [{', '.join(names)}] on {device}"
    given = f"a {layout}{plain(tensor.dtype)} tensor {shape} on {tensor.device}"
    if slot.aligned > 1 and tensor.device.type != "meta" and tensor.data_ptr() % slot.aligned:
        return f"{wanted} at a multiple of {slot.aligned} bytes, not {given} {tensor.data_ptr() % slot.aligned} off"
    return f"{wanted}, not {given}"


def plain(dtype: torch.dtype) -> str:
    """`float16` for `torch.float16`."""
    return str(dtype).removeprefix("torch.")
