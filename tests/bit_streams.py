"""Codes as a packed file has them: streams of whole numbers of any width."""

import numpy as np
import torch


def stream(values: torch.Tensor, width: int) -> bytes:
    """Whole numbers 0 … 2^width - 1 as a stream of bits, padded to a byte."""
    read = values.flatten().to(torch.int32).numpy().astype(">u4").view(np.uint8).reshape(-1, 4)
    return np.packbits(np.unpackbits(read, axis=1)[:, 32 - width :]).tobytes()


def numbers(packed: bytes, width: int, shape: torch.Size) -> torch.Tensor:
    """What `stream` packed."""
    read = np.unpackbits(np.frombuffer(packed, np.uint8))[: width * shape.numel()].reshape(-1, width)
    return torch.from_numpy(read @ (1 << np.arange(width)[::-1])).reshape(shape)
