"""Settings of SubSpec's draft and its tree; the defaults are the paper's (sections 4.1, 4.2 and 5.1)."""

from dataclasses import dataclass
from typing import ClassVar

from repro.core.errors import UserError


@dataclass(frozen=True)
class Config:
    """A draft of the offloaded blocks, and the tree that it proposes.

    Attributes:
        bits: of the substitutes' codes (HQQ); 3-bit codes lie in 4-bit slots on a GPU.
        group: input columns that share a scale and a zero point.
        top_k: leaves that a level keeps, the k of section 5.1.
        depth: draft passes in an iteration, the D of section 5.1.
        temperature: of the draft's distribution in greedy decoding (sharpening, section 4.2).
        sampled_temperature: the same where tokens are drawn. The paper says only that sharpening is for greedy
            decoding; ours is 1, no sharpening.

    EVERY: whether a block that stays on the device has a substitute, too.
    """

    EVERY: ClassVar[bool] = False

    bits: int = 4
    group: int = 64
    top_k: int = 6
    depth: int = 48
    temperature: float = 0.2
    sampled_temperature: float = 1.0

    def __post_init__(self) -> None:
        for name in ("top_k", "depth"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        for name in ("temperature", "sampled_temperature"):
            if not getattr(self, name) > 0:
                raise UserError(f"{name} is {getattr(self, name)}; a draft's temperature is above 0")

    @property
    def nodes(self) -> int:
        """Nodes of the tree, the root among them: 289 with the defaults."""
        return 1 + self.top_k * self.depth

    @property
    def room(self) -> int:
        """Slots that the cache needs behind the text."""
        return self.nodes
