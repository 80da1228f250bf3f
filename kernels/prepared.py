"""Launch a Triton kernel repeatedly on arguments of the same kind, without binding them each time.

Triton binds, specializes and hashes all arguments of a launch in Python, 5 to 10 us of the host; a call with the same
dtypes, alignments and numbers always finds the same compiled kernel. It is launched by Triton's launcher in C, where
this module knows that, without the one in Python around it. `blank` makes outputs as fast, and `Scratch` keeps memory
between launches from call to call.
"""

import ctypes
import functools
import hashlib
import importlib
import inspect
import itertools
import math
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from repro.kernels.launches import TENSOR_MAP, Launches, Mapped, Parameter, Step, TensorMap

INTEGERS = ("i32", "i64")  # Triton's names of parameters' types
CONSTANT, DESCRIPTOR = "constexpr", "tensordesc"
NO_SCRATCH = 0, 0  # what every kernel of Triton's takes last: addresses of memory, of which it asks for none
IN_C = "iiiKKppOOOOOO"  # grid, stream, function, two flags, memory of Triton's, metadata, hooks: what this module knows
MOST_MAPS = 1024  # that a kernel keeps
NO_DEVICE = -2  # of a PyTorch without CUDA; a tensor on a CPU is on -1
DEFAULT_STREAM = 0  # the driver's handle of it
MOST_KEPT = 32 << 20  # bytes of a device that `Scratch` keeps; cuBLAS keeps as many for itself on a Hopper


def blank(dtype: torch.dtype, *shape: int) -> Callable[[Tensor], Tensor]:
    """What makes contiguous memory that nobody has written, as `tensor.new_empty`, on the device of a tensor.

    On the current device it goes around the dispatcher and Python's arguments, as code that inductor writes.
    """
    return blank_strided(dtype, shape, contiguous(shape))


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of contiguous memory."""
    return tuple(itertools.accumulate((1, *reversed(shape[1:])), operator.mul))[::-1]


def blank_strided(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    """The same of memory with other strides, which leave no gaps."""
    on_current = torch._C._dynamo.guards._empty_strided_cuda
    current = getattr(torch._C, "_cuda_getDevice", lambda: NO_DEVICE)

    def make(like: Tensor) -> Tensor:
        if like.get_device() == current():
            return on_current(shape, strides, dtype)
        return like.new_empty_strided(shape, strides, dtype=dtype)

    return make


class Kept(NamedTuple):
    """Memory of a device that is kept from call to call.

    Attributes:
        memory: int8 `[MOST_KEPT]`.
        address: of its first byte.
        free: has one entry while no call uses the memory; a list takes and gives one at a time, whatever thread.
        views: of its first bytes, by dtype, shape and strides.
    """

    memory: Tensor
    address: int
    free: list[bool]
    views: dict[tuple, Tensor]


KEPT: dict[int, Kept] = {}  # by the device's number
_making = threading.Lock()


def release() -> None:
    """Give devices back what is kept; the next call keeps memory again."""
    KEPT.clear()


class Scratch:
    """Memory that launches of one call write and read, and nobody after them.

        memory = scratch.take(x)
        ...                             # launches on the current stream
        scratch.give_back(memory)

    On a device's default stream calls take turns with `MOST_KEPT` bytes, which are kept from the first call on. That
    stream runs the launches of one call after those of the call before, whatever threads they come from, and cannot be
    captured into a CUDA graph, whose replays would write there at any time. On another stream, where the kept memory is
    too small, and while another thread's call uses it, a call gets memory of its own. So does every later one behind a
    call that failed between the two, until `release`.
    """

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        """Of a tensor whose strides leave no gaps."""
        self._form = dtype, shape, strides
        self._nbytes = math.prod(shape) * dtype.itemsize
        self._fits = self._nbytes <= MOST_KEPT
        self._own = blank_strided(dtype, shape, strides)
        self._current = getattr(torch._C, "_cuda_getDevice", lambda: NO_DEVICE)

    def take(self, like: Tensor) -> Tensor:
        """A tensor that nobody has written, on the device of another one."""
        index = like.get_device()
        if not self._fits or index != self._current():
            return self._own(like)
        if torch._C._cuda_getCurrentRawStream(index) != DEFAULT_STREAM:
            return self._own(like)
        kept = KEPT.get(index) or self._keep(like, index)
        try:
            kept.free.pop()
        except IndexError:  # another call has it
            return self._own(like)
        view = kept.views.get(self._form)
        return self._view(kept) if view is None else view

    def give_back(self, memory: Tensor) -> None:
        """Let the next call have what `take` gave, once all launches are in the stream."""
        kept = KEPT.get(memory.get_device())
        if kept is not None and memory.data_ptr() == kept.address:
            kept.free.append(True)

    def _keep(self, like: Tensor, index: int) -> Kept:
        with _making:
            if index not in KEPT:
                memory = like.new_empty(MOST_KEPT, dtype=torch.int8)
                KEPT[index] = Kept(memory, memory.data_ptr(), [True], {})
            return KEPT[index]

    def _view(self, kept: Kept) -> Tensor:
        dtype, shape, strides = self._form
        if len(kept.views) >= MOST_MAPS:
            kept.views.clear()
        view = kept.memory[: self._nbytes].view(dtype).as_strided(shape, strides)
        kept.views[self._form] = view
        return view


def scratch(dtype: torch.dtype, *shape: int) -> Scratch:
    """Contiguous memory between the launches of a call."""
    return Scratch(dtype, shape, contiguous(shape))


Describe = Callable[[Tensor], Any]  # gives Triton's descriptor of a matrix


def addresses(arguments: Sequence[Any]) -> list[Any]:
    """Arguments of a launch with the addresses of their tensors."""
    return [argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in arguments]


class Arranged:
    """Arguments and constants as Triton's launcher in C takes them; tensors are where those of a first launch were."""

    def __init__(self, first: Sequence[Any], constants: Sequence[Any]) -> None:
        self._tensors = [position for position, argument in enumerate(first) if isinstance(argument, Tensor)]
        self._constants = constants

    def __call__(self, arguments: Sequence[Any]) -> list[Any]:
        given = [*arguments, *self._constants]
        for position in self._tensors:
            given[position] = given[position].data_ptr()
        return given


class Encoded:
    """The same with matrices by descriptor first.

    Triton encodes a descriptor at every launch, in Python, 2.5 us of the host; here each address of it is encoded once.
    """

    def __init__(
        self,
        encode: Callable[[Any, Any], list[Any]],
        forms: Sequence[Any],
        matrices: Sequence[Describe],
        first: Sequence[Any],
        constants: Sequence[Any],
    ) -> None:
        self._encode = encode  # Triton's own
        self._kept: list[dict[int, list[Any]]] = [{} for _ in matrices]  # by address: map, sizes and strides
        self._made = list(zip(matrices, forms, strict=True))  # and what Triton is told of each matrix
        self._others = Arranged(first[len(matrices) :], constants)

    def __call__(self, arguments: Sequence[Any]) -> list[Any]:
        given = []
        for number, kept in enumerate(self._kept):
            given += kept.get(arguments[number].data_ptr()) or self._encoded(arguments[number], number)
        return given + self._others(arguments[len(self._kept) :])

    def _encoded(self, matrix: Tensor, number: int) -> list[Any]:
        describe, form = self._made[number]
        kept = self._kept[number]
        if len(kept) >= MOST_MAPS:
            kept = self._kept[number] = {}
        descriptor = kept[matrix.data_ptr()] = self._encode(describe(matrix), form)
        return descriptor


class KnownLaunch(NamedTuple):
    """What a first launch left for later ones.

    Attributes:
        device: the number of the device that it ran on; -1 before.
        run: Triton's launcher, in C where this module knows it.
        arrange: makes the list that `run` takes of a launch's arguments, and of the kernel's constants.
        grid: programs in three dimensions.
        before: what `run` takes between the stream and the arguments.
    """

    device: int = -1
    run: Callable[..., Any] | None = None
    arrange: Callable[[Sequence[Any]], list[Any]] = list
    grid: tuple[int, ...] = ()
    before: tuple = ()


class Prepared:
    """A kernel with its grid and constants, for arguments that differ in their addresses alone.

    The first launch goes through Triton, which compiles what is missing; later ones pass addresses to that kernel,
    and call no hooks of profilers, for which Triton would collect facts at every launch. The caller answers for what
    Triton would have looked at: dtypes, addresses modulo 16, and every number. The kernel takes its first arguments by
    the descriptors that `matrices` make of them.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], matrices: Sequence[Describe] = (), **constants: Any) -> None:  # noqa: ANN401
        self._kernel, self._grid, self._matrices, self._constants = kernel, grid, tuple(matrices), constants
        self._known = KnownLaunch()
        self._compiled: Any = None

    def __call__(self, *arguments: Any) -> None:  # noqa: ANN401
        """Launch on torch's current stream: tensors, numbers and None for the parameters that are no constants."""
        device, run, arrange, grid, before = self._known  # at once: another thread may launch elsewhere
        if run is None or torch._C._cuda_getDevice() != device:
            self._first(arguments)
            return
        run(*grid, torch._C._cuda_getCurrentRawStream(device), *before, *arrange(arguments))

    def _first(self, arguments: tuple) -> None:
        constants = tuple(self._constants[name] for name in self._kernel.arg_names[len(arguments) :])
        compiled = self._kernel[self._grid](*self._described(arguments), **self._constants)
        if compiled is not None:  # as by Triton's interpreter
            self._compiled, grid = compiled, (*self._grid, 1, 1)[:3]
            launcher = in_c(compiled, self._matrices, arguments, constants)
            if launcher is None:  # Triton's launcher in Python: no metadata, no hooks
                before = compiled.function, compiled.packed_metadata, None, None, None
                launcher = compiled.run, lambda given: [*addresses(self._described(given)), *constants], before
            run, arrange, before = launcher
            self._known = KnownLaunch(torch.cuda.current_device(), run, arrange, grid, before)

    def step(self, arguments: Sequence[str | int | None], tensors: Mapping[str, Tensor]) -> Step | None:
        """The launch among `Launches` of tensors like these, once it was launched; None where Triton must launch it.

        `arguments` are names of tensors, numbers, None.
        """
        module, compiled = triton_driver(), self._compiled
        if compiled is None or not is_alone(module, compiled):
            return None
        matrices, forms = iter(self._matrices), iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
        parameters: list[Parameter] = []
        for argument, kind in zip(arguments, compiled.src.signature.values()):
            if kind.startswith(DESCRIPTOR):
                describe, form = next(matrices), next(forms, None)
                if form is None:  # not by TMA
                    return None
                descriptor = describe(tensors[argument])
                encode = functools.partial(tensor_map, module, describe, form)
                parameters += [Mapped(argument, encode), *descriptor.shape, *descriptor.strides]
            elif kind.startswith("*") or kind in INTEGERS:
                parameters.append(argument)
            elif kind != CONSTANT:  # which the compiler put into the code
                return None
        warps, _, shared = compiled.packed_metadata
        digest = hashlib.sha256(compiled.asm["cubin"]).hexdigest()
        grid = (*self._grid, 1, 1)[:3]
        return Step(compiled.function, grid, 32 * warps, shared, (*parameters, *NO_SCRATCH), digest=digest)

    def _described(self, arguments: Sequence[Any]) -> list[Any]:
        matrices = [describe(matrix) for describe, matrix in zip(self._matrices, arguments)]
        return [*matrices, *arguments[len(matrices) :]]


class InARow:
    """Kernels launched one after the other on torch's current stream.

    The first time each is launched by itself, through Triton; then they are `Launches` where that knows all of them.

    Attributes:
        launch: launches them; takes the tensors that `names` says, in that order.
    """

    def __init__(self, names: Sequence[str], launches: Sequence[tuple[Prepared, Sequence[str | int | None]]]) -> None:
        """`launches` are kernels with their arguments: names of tensors, numbers, None."""
        self._names, self._launches = names, launches
        self.launch: Callable[..., None] = self._first

    def _first(self, *tensors: Tensor) -> None:
        self._each(*tensors)
        self.launch = self._together(*tensors) or self._each

    def _each(self, *tensors: Tensor) -> None:
        given = dict(zip(self._names, tensors, strict=True))
        for kernel, arguments in self._launches:
            kernel(*(given[argument] if isinstance(argument, str) else argument for argument in arguments))

    def _together(self, *tensors: Tensor) -> Launches | None:
        given = dict(zip(self._names, tensors, strict=True))
        steps = [kernel.step(arguments, given) for kernel, arguments in self._launches]
        if None in steps:
            return None
        try:
            driver = importlib.import_module("cuda.bindings.driver")
        except ImportError:
            return None
        own = [step._replace(function=driver.CUfunction(step.function)) for step in steps]
        return Launches(driver, torch.cuda.current_device(), self._names, own)


def triton_driver() -> Any:  # noqa: ANN401
    """Triton's driver of this device's kind, where it launches as this module knows; None elsewhere."""
    try:
        driver = importlib.import_module("triton.backends.nvidia.driver")
    except ImportError:
        return None
    return driver if getattr(driver, "_BASE_ARGS_FORMAT", "") == IN_C else None


def is_plain(driver: Any, compiled: Any) -> bool:  # noqa: ANN401
    """Whether a compiled kernel's launcher has the form that is known here, and gives no memory of its own."""
    run = compiled.run
    if driver is None or not isinstance(run, driver.CudaLauncher):
        return False
    return not (run.global_scratch_size or run.profile_scratch_size)


def is_alone(driver: Any, compiled: Any) -> bool:  # noqa: ANN401
    """The same of one whose thread blocks share nothing, in one launch or with the launch before."""
    if not is_plain(driver, compiled):
        return False
    return compiled.packed_metadata[1] == 1 and not (compiled.run.launch_cooperative_grid or compiled.run.launch_pdl)


def tensor_map(driver: Any, describe: Describe, form: Any, matrix: Tensor) -> TensorMap:  # noqa: ANN401
    """A matrix' tensor map as Triton encodes it: what a Python object of Triton's ends with."""
    made, *_ = driver.make_tensordesc_arg(describe(matrix), form)
    return TensorMap(last_bytes(made, TENSOR_MAP))


def last_bytes(made: object, count: int) -> bytes:
    """The last `count` bytes of an object whose type is written in C and has objects of one size."""
    return ctypes.string_at(id(made) + type(made).__basicsize__ - count, count)


def in_c(
    compiled: Any,  # noqa: ANN401
    matrices: Sequence[Describe],
    first: Sequence[Any],
    constants: Sequence[Any],
) -> tuple[Callable, Callable, tuple] | None:
    """A compiled kernel's launcher in C, how it takes arguments like a first launch's, and what it is told before them.

    None where Triton's launcher has another form than is known here, or gives memory of its own.
    """
    driver = triton_driver()
    if not is_plain(driver, compiled):
        return None
    run = compiled.run
    launch, arrange = run.launch, Arranged(first, constants)
    if matrices:  # then `launch` is a function in Python that encodes them, around the one in C
        forms = getattr(compiled.metadata, "tensordesc_meta", None)
        launch = inspect.getclosurevars(launch).nonlocals.get("launcher") if inspect.isfunction(launch) else None
        if not forms or launch is None:
            return None
        arrange = Encoded(driver.make_tensordesc_arg, forms, matrices, first, constants)
    own = run.launch_cooperative_grid, run.launch_pdl, None, None  # no memory of Triton's
    return launch, arrange, (compiled.function, *own, compiled.packed_metadata, None, None, None)
