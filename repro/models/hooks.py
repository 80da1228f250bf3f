"""Watch or change the inputs of layers while a model runs."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn


@contextlib.contextmanager
def each_input(layers: Mapping[str, nn.Module], change: Callable[[str, Tensor], Any]) -> Iterator[None]:
    """Within the block, each layer reads what `change(name, input)` returns, its input where that is None."""
    with contextlib.ExitStack() as stack:
        for name, layer in layers.items():
            hook = layer.register_forward_pre_hook(lambda _, args, name=name: change(name, args[0]))
            stack.callback(hook.remove)
        yield
