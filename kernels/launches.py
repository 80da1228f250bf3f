"""Kernels that are launched one after the other, with all their arguments put into memory at once.

    launches = Launches(driver, index, ("x", "y"), (Step(first, ...), Step(second, ...)))
    launches(x, y)                                   # on torch's current stream

A launch costs the host what the driver takes and what Python takes around it: the device, the stream, and every
argument's place. Here each tensor is asked for its address once, what is the same at every call lies where it is from
the first one on, and device and stream are looked up once for all launches.
"""

import ctypes
import itertools
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

MOST_MAPS = 1024  # that a parameter keeps
TENSOR_MAP = 128  # bytes
NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT


class Behind(NamedTuple):
    """A parameter: the address of a tensor's bytes from one on."""

    name: str
    nbytes: int


def behind(name: str, nbytes: int) -> "str | Behind":
    """The parameter of a tensor's bytes from one on: its name where that is the first."""
    return Behind(name, nbytes) if nbytes else name


class Mapped(NamedTuple):
    """A parameter: what a tensor is copied by, passed by value; it is made once for each address of the tensor.

    Attributes:
        encode: makes it.
    """

    name: str
    encode: Callable[[Tensor], "TensorMap"]


class TensorMap:
    """The 128 bytes of a driver's tensor map, at an address that it may be passed from, a multiple of 64."""

    def __init__(self, encoded: bytes) -> None:
        self._words = (ctypes.c_uint64 * 24)()
        self._address = -(-ctypes.addressof(self._words) // 64) * 64
        ctypes.memmove(self._address, encoded, TENSOR_MAP)

    def data_ptr(self) -> int:
        """The address."""
        return self._address


Parameter = str | int | Behind | Mapped | Tensor  # a tensor's name for its address, a C int, ..., one for all calls


class Step(NamedTuple):
    """One launch.

    Attributes:
        function: the driver's.
        grid: thread blocks in three dimensions.
        block: threads of one.
        shared: bytes of its dynamic shared memory.
        parameters: of the kernel, in order. Tensors among them are kept, and where they are at every call.
        beside: it may run beside the launch before it, as `nvrtc.Function.beside` says.
        together: all of its thread blocks are on the device at once, because they wait for one another, or it fails.
        digest: of its machine code.
    """

    function: Any
    grid: tuple[int, int, int]
    block: int
    shared: int
    parameters: tuple[Parameter, ...]
    beside: bool = False
    together: bool = False
    digest: str = ""


class Launches:
    """Launches of a device, one after the other. Call them with the tensors that `names` says, in that order.

    The caller answers for all that kernels expect of tensors: dtypes, sizes, alignment, the device.
    """

    def __init__(self, driver: Any, index: int, names: Sequence[str], steps: Sequence[Step]) -> None:  # noqa: ANN401
        """`driver` is `cuda.bindings.driver`, `index` the number of the device."""
        self._driver, self._index, self._steps = driver, index, tuple(steps)
        self.digests = {step.digest for step in steps}
        self._places: dict[Any, int] = {name: place for place, name in enumerate(names)}  # of words, by parameter
        parameters = list(itertools.chain.from_iterable(step.parameters for step in steps))
        self._behind: list[tuple[int, int]] = []  # the place of a tensor's address, and how many bytes are added
        for parameter in parameters:
            if isinstance(parameter, Behind) and parameter not in self._places:
                self._places[parameter] = len(self._places)
                self._behind.append((self._places[parameter.name], parameter.nbytes))
        self._pack = struct.Struct(f"{len(self._places)}q").pack_into
        self._numbers = sorted({number(parameter) for parameter in parameters if isinstance(parameter, int | Tensor)})
        self._kept: dict[Mapped, dict[int, tuple[int, TensorMap]]] = {}  # by address: a map's own address, and the map
        for parameter in parameters:
            if isinstance(parameter, Mapped):
                self._kept[parameter] = {}
        self._rooms: list[Room] = []  # that no call is using; a list takes and gives one at a time, whatever thread

    def __call__(self, *tensors: Tensor) -> None:
        """Launch all on torch's current stream of the device."""
        if torch._C._cuda_getDevice() != self._index:
            with torch.cuda.device(self._index):
                return self(*tensors)
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        words = [*map(Tensor.data_ptr, tensors)]
        for place, nbytes in self._behind:
            words.append(words[place] + nbytes)
        try:
            room = self._rooms.pop()
        except IndexError:
            room = Room(self)
        self._pack(room.words, 0, *words)
        for number, (place, kept, parameter, pointers, position) in enumerate(room.maps):
            known = kept.get(words[place]) or self._encoded(parameter, tensors[place])
            pointers[position], room.held[number] = known
        if room.stream != stream:
            room.use(stream)
        launch = self._driver.cuLaunchKernelEx
        for config, function, arguments in room.launches:
            (failed,) = launch(config, function, arguments, 0)
            if failed:
                self._again(failed, config, function, arguments)
        self._rooms.append(room)  # the driver has copied the arguments

    def _encoded(self, parameter: Mapped, tensor: Tensor) -> tuple[int, TensorMap]:
        kept = self._kept[parameter]
        if len(kept) >= MOST_MAPS:
            kept.clear()
        made = parameter.encode(tensor)
        known = kept[tensor.data_ptr()] = made.data_ptr(), made
        return known

    def _again(self, failed: int, config: Any, function: Any, arguments: int) -> None:  # noqa: ANN401
        """Launch once more where the thread had no context, which is made; RuntimeError for all else."""
        if int(failed) == NO_CONTEXT:
            torch.cuda.current_stream(self._index).synchronize()
            (failed,) = self._driver.cuLaunchKernelEx(config, function, arguments, 0)
        if failed:
            raise RuntimeError(f"CUDA driver: {failed!r}")

    def place(self, parameter: Parameter) -> int:
        """Which word holds a parameter."""
        if isinstance(parameter, int | Tensor):
            return len(self._places) + self._numbers.index(number(parameter))
        return self._places[parameter.name if isinstance(parameter, Mapped) else parameter]


def number(parameter: int | Tensor) -> int:
    """What a parameter is at every call: an int itself, or a tensor's address."""
    return parameter if isinstance(parameter, int) else parameter.data_ptr()


class Room:
    """Memory for the arguments of one call of `Launches` at a time.

    Attributes:
        words: 64 bits each: addresses of a call's tensors, then what is the same at every call. A C int is read from
            the first half of its word, devices and hosts being little-endian.
        maps: of each parameter that is `Mapped`: the word of its tensor's address, the maps that are kept, the
            parameter, and where its own address goes.
        held: the maps of the last call, which another thread's call may no longer keep.
        stream: of the last call; None before.
        launches: the driver's configuration, the function, and the address of its arguments' addresses.
    """

    def __init__(self, of: Launches) -> None:
        count = len(of._places) + len(of._numbers)
        self.words = (ctypes.c_int64 * count)()
        struct.pack_into(f"{len(of._numbers)}q", self.words, 8 * len(of._places), *of._numbers)
        first, self.stream = ctypes.addressof(self.words), None
        self.maps, self.launches, self._pointers = [], [], []
        for step in of._steps:
            places = [of.place(parameter) for parameter in step.parameters]
            pointers = (ctypes.c_void_p * len(places))(*(first + 8 * place for place in places))
            for position, parameter in enumerate(step.parameters):
                if isinstance(parameter, Mapped):
                    self.maps.append((places[position], of._kept[parameter], parameter, pointers, position))
            self._pointers.append(pointers)
            self.launches.append((configuration(of._driver, step), step.function, ctypes.addressof(pointers)))
        self.held: list[TensorMap | None] = [None] * len(self.maps)

    def use(self, stream: int) -> None:
        """Launch on a stream from now on."""
        self.stream = stream
        for config, *_ in self.launches:
            config.hStream = stream


def configuration(driver: Any, step: Step) -> Any:  # noqa: ANN401
    """The driver's configuration of a launch, without its stream."""
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = step.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = step.block, 1, 1
    config.sharedMemBytes = step.shared
    wanted = []  # attributes, and the members of their values
    if step.beside:
        wanted.append(("PROGRAMMATIC_STREAM_SERIALIZATION", "programmaticStreamSerializationAllowed"))
    if step.together:
        wanted.append(("COOPERATIVE", "cooperative"))
    if wanted:
        config.attrs = [attribute(driver, name, member) for name, member in wanted]
        config.numAttrs = len(wanted)
    return config


def attribute(driver: Any, name: str, member: str) -> Any:  # noqa: ANN401
    """The driver's attribute of a launch, with the member of its value that switches it on."""
    made, value = driver.CUlaunchAttribute(), driver.CUlaunchAttributeValue()
    setattr(value, member, 1)
    made.id = getattr(driver.CUlaunchAttributeID, f"CU_LAUNCH_ATTRIBUTE_{name}")
    made.value = value
    return made
