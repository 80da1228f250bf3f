"""SPEAR's settings: Table 7, and one field with its reason for each thing that the paper leaves open."""

import math
from dataclasses import dataclass
from typing import Literal

from repro.core.errors import UserError
from repro.methods.spear.compensator import FACTORS, GATE


@dataclass(frozen=True)
class Phase:
    """One phase: which tensors are trained, with which learning rate, for how many epochs."""

    trained: tuple[str, ...]
    lr: float
    epochs: int


@dataclass(frozen=True)
class Config:
    """Table 7, then what the paper leaves open, then the ablations.

    Attributes:
        lr1: learning rate of phase 1, A and B (Table 7).
        lr2: learning rate of phase 2, the gate (Table 7).
        epochs1: epochs of phase 1 (Table 7).
        epochs2: epochs of phase 2 (Table 7).
        batch: sequences in a step (Table 7).
        beta1: of AdamW (Table 7).
        beta2: of AdamW (Table 7).
        weight_decay: of AdamW (Table 7).
        temperature: of the KL divergence (Table 7).
        clip: largest gradient norm (Table 7).
        samples: self-sampled sequences (Table 7).
        tokens: tokens in each, BOS included (Table 7).
        tau: coverage of damage that the chosen layers reach (Table 7).
        entropy_trigger: H_norm above which tau_eff replaces tau (Table 7).
        k_min: least share of layers, of which the count is ⌊k_min·N⌋ (Table 7, footnote of appendix B.3).
        k_max: greatest share of layers (Table 7).
        cka_samples: how many of the sequences damage is measured on (appendix C.1).

        budget: B, bytes of all compensators as a share of the 4-bit block weights. Not given; Table 2's 9.8 MB are
            2.0 % of Llama-3.2-1B, 24.9 MB 0.8 % of Llama-2-7B. Our models are small, hence the smallest's share.
        remainder: what the budget does with what one rank in all chosen layers leaves. Not given; Algorithm 1 has one
            rank. "layers" raises a layer's rank by one where that removes the most squared weight error per byte, as
            long as it fits, as the static corrections do (`baselines/low_rank.py`), so that variants are compared at
            equal bytes; "unspent" keeps one rank. A given `rank` has no remainder.
        tau_diffuse: tau_eff / tau at H_norm = 1. Not given; Tables 15 and 16 print K% ≈ tau/2 (see `tau_eff`).
        noise_floor: δ up to this is no damage, and it is subtracted. Not given; 2^-20 is what a relative change of one
            half-precision step, 2^-10, does to CKA, so that less cannot be told from computing in FP16.
        protected: p, the anchors, as a share of K rounded up. Not given; half lets damage alone decide the half that
            matters most, and cost the other.
        cost_weight: λ. Not given; at 0.1 the cheapest layer overtakes one with a tenth of the range more damage, so
            that cost only breaks near-ties. The cost t is d_in + d_out, the bytes that decoding reads per rank.
        alpha: α. Not given; A and B learn any scale, so 1.
        gate_hidden: hidden width of the gate as a multiple of r. Not given; the printed 8r² is 4.
        init: where A and B start (see `initial`). Not given. "whitened" is the best static correction on the sequences
            damage is measured on, "svd" that of the weight alone, "zero" is LoRA's, B = 0. Table 7's learning rates
            move little in its steps, so the start matters: on held-out text pocket-5m at 4 bits recovers 32 %, 13 %
            and 18 % of its KL in this order. The gate starts at exactly γ = 1 in all (W₂ = b₂ = 0).
        schedule: of both learning rates. Not given; Table 7, which calls itself complete, has none, so constant.
        sampling_temperature: of self-sampling. Not given; 1 samples the model's own distribution, which is what makes
            the expectation of equation 5 one under that distribution. No top-k, no top-p, nothing stops at EOS.

        gate: False keeps γ = 1 and leaves phase 2 out (section 5.4.2).
        placement: "random" takes as many layers as CKA would, "full" takes all (Table 4).
        k_share: a fixed share of layers instead of tau's (Table 14, where round(k_share·N) gives the printed K%); 0 is
            adaptive.
        rank: one fixed rank instead of the budget's; 0 is the budget's.
        source: "corpus" trains and measures on the recipe's calibration tokens instead (Table 17).
        effort: share of the sequences that are trained on. Learning rates are divided by it, so that steps × learning
            rate stay: a reduced-budget run for a small machine.
        teacher_cache: GiB for the teacher's logits; if they do not fit they are computed again in each step.
        seed: of sampling, of the order of sequences, of A, and of random placement.
    """

    lr1: float = 5e-5
    lr2: float = 1e-4
    epochs1: int = 3
    epochs2: int = 2
    batch: int = 4
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.0
    temperature: float = 2.0
    clip: float = 1.0
    samples: int = 500
    tokens: int = 256
    tau: float = 0.8
    entropy_trigger: float = 0.9
    k_min: float = 0.15
    k_max: float = 0.60
    cka_samples: int = 64

    budget: float = 0.02
    remainder: Literal["layers", "unspent"] = "layers"
    tau_diffuse: float = 0.5
    noise_floor: float = 2**-20
    protected: float = 0.5
    cost_weight: float = 0.1
    alpha: float = 1.0
    gate_hidden: int = 4
    init: Literal["whitened", "svd", "zero"] = "whitened"
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    sampling_temperature: float = 1.0

    gate: bool = True
    placement: Literal["cka", "random", "full"] = "cka"
    k_share: float = 0.0
    rank: int = 0
    source: Literal["self", "corpus"] = "self"
    effort: float = 1.0
    teacher_cache: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch", "samples", "cka_samples", "gate_hidden"):
            if getattr(self, name) < 1:
                raise UserError(f"spear: {name} is {getattr(self, name)}; it must be 1 or more")
        if self.tokens < 2:
            raise UserError(f"spear: tokens is {self.tokens}; a sequence has 2 or more")
        for name in ("lr1", "lr2", "temperature", "clip", "alpha", "effort", "sampling_temperature"):
            if getattr(self, name) <= 0:
                raise UserError(f"spear: {name} is {getattr(self, name)}; it must be above 0")
        for name in ("epochs1", "epochs2", "budget", "noise_floor", "cost_weight", "rank", "teacher_cache", "seed"):
            if getattr(self, name) < 0:
                raise UserError(f"spear: {name} is {getattr(self, name)}; it must be 0 or more")
        for name in ("tau", "k_min", "k_max", "k_share", "tau_diffuse", "protected"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"spear: {name} is {getattr(self, name)}; it must be a share, 0 to 1")
        if not 0 <= self.entropy_trigger < 1 or self.k_min > self.k_max:
            raise UserError("spear: entropy_trigger is 0 or more and below 1, and k_min is at most k_max")

    @property
    def hidden(self) -> int:
        """Hidden width of the gate as a multiple of r; 0 without gate."""
        return self.gate_hidden if self.gate else 0

    @property
    def sequences(self) -> int:
        """Sequences that are trained on."""
        return max(1, round(self.samples * self.effort))

    @property
    def steps(self) -> int:
        """Steps in an epoch."""
        return math.ceil(self.sequences / self.batch)

    @property
    def phases(self) -> list[Phase]:
        """Both phases, or the first without gate; steps × learning rate are those of full effort."""
        faster = math.ceil(self.samples / self.batch) / self.steps
        phases = [(self.lr1 * faster, self.epochs1), (self.lr2 * faster, self.epochs2)]
        return [Phase(trained, *rate) for trained, rate in zip((FACTORS, GATE), phases)][: 2 if self.gate else 1]
