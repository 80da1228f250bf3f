"""FlexQuant's settings: sections 4.4 to 5.1, and a field with its reason for each thing that the paper leaves open."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from repro.core.errors import UserError

WIDTHS = (16, 8, 4, 3, 2)  # bits of a weight; 16 is full precision


@dataclass(frozen=True)
class Config:
    """When layers are switched, which ones, and to how many bits.

    A decision is made one token behind: the signal of a token is read while the next one is computed, so that decoding
    never waits for it. A switch therefore holds from the second token after the one whose signal asked for it, and the
    token in between belongs to no window.

    Attributes:
        path: the widths that every layer goes through (section 5.1: the half-precision model is the start for the 8B
            model of Table 2; the models of Table 1 go from 4 to 3, or from 3 to 2 bits).
        window: tokens of the moving mean (section 4.4). 0 is no window: the rule is asked once, after the prefill.
        threshold: the mean below which layers are switched (Table 2: 1.3 to 2.5); null takes `multiple`.
        multiple: times the mean PPLE of the last prompt positions, as a threshold. Algorithm 1 has that mean itself,
            Table 2 fixed numbers; whether these are multiples is not said, so both can be asked for.
        prompt_tokens: the "last few" positions of the prompt in that mean. Not given; as many as in the window, so
            that both means vary alike.
        layers: layers that one switch takes. Not given; 1 is Algorithm 1's reading that the fewest tokens see at once.
            An 8B model then needs 4,704 tokens for its 224 layers from 16 to 8 bits, so tables sweep it.
        order: "kl" switches the layers with the smallest divergence first (section 4.3); "reversed", "random" and
            "model" (first block first) are controls. So is "oracle": by the divergence from full precision that each
            move causes alone in what the model predicts along the very texts that are judged, which no rule can know.
        advance: "stage" takes all layers to one width before any goes to the next, as Figure 7 shows 16, then 8, then
            4 bits; "layer" takes a layer all the way before the next one begins. Not said.
        direction: of the divergence; the text has "the quantized in comparison to the original" weights, hence
            KL(quantized ‖ full). "full" is KL(full ‖ quantized).
        bins: of equal width over the range of both weights in a layer's histograms. Not given; 2,048 is what TensorRT
            calibrates with, and resolves 8 bits.
        pseudocount: weights added to each bin, so that an empty bin gives no infinite divergence. Not given; one.
        prefill: the prompt runs in the precision that `path` begins with, "high" (section 5.1, for the 8B model), or
            with 8-bit weights and activations, "w8a8" (section 4.3).
        interval: switch every so many tokens whatever the signal is (Figure 3, and the uniform control); 0 is off.
        seed: of a random order.
        copies: where the weights at all widths are: on the "device", or on the "host" with those of the next moves
            prefetched while decoding goes on (which the paper leaves for later: Limitations). It changes no token.
    """

    path: list[int] = field(default_factory=lambda: [16, 8, 4])
    window: int = 20
    threshold: float | None = None
    multiple: float = 1.0
    prompt_tokens: int = 20
    layers: int = 1
    order: Literal["kl", "reversed", "random", "model", "oracle"] = "kl"
    advance: Literal["stage", "layer"] = "stage"
    direction: Literal["quantized", "full"] = "quantized"
    bins: int = 2048
    pseudocount: float = 1.0
    prefill: Literal["high", "w8a8"] = "high"
    interval: int = 0
    seed: int = 0
    copies: Literal["device", "host"] = "device"

    def __post_init__(self) -> None:
        if len(self.path) < 2 or any(low >= high for high, low in pairwise(self.path)):
            problem = f"path is {self.path}; it goes down only, through two widths or more, such as [16, 8, 4]"
            raise UserError(f"flexquant: {problem}")
        if odd := [bits for bits in self.path if bits not in WIDTHS]:
            raise UserError(f"flexquant: path has {odd[0]} bits; choose from {', '.join(map(str, WIDTHS))}")
        if self.threshold is not None and not self.threshold >= 1:
            problem = f"threshold is {self.threshold}; PPLE is never below 1, so that nothing would ever switch"
            raise UserError(f"flexquant: {problem}; give 1 or more")
        if self.threshold is not None and self.multiple != 1:
            raise UserError(
                "flexquant: threshold and multiple: give one of them, a fixed mean or a share of the prompt's"
            )
        for name in ("prompt_tokens", "layers", "bins"):
            if getattr(self, name) < 1:
                raise UserError(f"flexquant: {name} is {getattr(self, name)}; it must be 1 or more")
        for name in ("multiple", "pseudocount"):
            if not getattr(self, name) > 0:
                raise UserError(f"flexquant: {name} is {getattr(self, name)}; it must be above 0")
        if self.copies == "host" and self.prefill == "w8a8":
            problem = "prefill=w8a8 needs 8-bit weights on the device beside those of 16 bits"
            raise UserError(f"flexquant: {problem}, copies=host has no memory for them; give one of the two")
        for name in ("window", "interval", "seed"):
            if getattr(self, name) < 0:
                raise UserError(f"flexquant: {name} is {getattr(self, name)}; it must be 0 or more")
