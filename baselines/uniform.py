"""Uniform low-rank compensation (SPEAR, arXiv 2606.11244, appendix E.2, Table 18): one trained adapter in every layer.

SPEAR's comparison for its placement: every quantized layer gets a static correction of one rank, trained as SPEAR
trains A and B (phase 1: the KL divergence to the full-precision model on self-sampled sequences), without a gate, and
stored in 16 bits. In INT8 it is `spear(placement=full, gate=false, rank=…)`.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from repro.baselines import low_rank
from repro.core.errors import NotMeasurable
from repro.methods import spear
from repro.methods.spear.calibration import calibrate
from repro.methods.spear.compensator import CompensatedLinear
from repro.methods.spear.initial import start
from repro.models.attachments import Attachment
from repro.models.lowbit import LowBitModel

VERSION = 1
CALIBRATED = False  # it samples its own sequences
COST = spear.COST
KIND = low_rank.KIND
attached = low_rank.attached


@dataclass(frozen=True)
class Config(low_rank.Config):
    """Ranks and storage, and what of SPEAR's training applies: see `methods/spear/config.py` for each.

    Attributes:
        rank: of every layer; Table 18 has 8.
        lr: SPEAR's lr1.
        epochs: SPEAR's epochs1.
        samples: self-sampled sequences.
        tokens: tokens in each, BOS included.
        cka_samples: how many of them second moments are measured on; no damage is.
        init: where A and B start. Not given; SPEAR's own, so that the two differ in layers, gate and storage only.
        effort: share of the sequences that are trained on; the learning rate is divided by it.
        seed: of sampling and of the order of sequences.
    """

    rank: int = 8
    lr: float = 5e-5
    epochs: int = 3
    samples: int = 500
    tokens: int = 256
    cka_samples: int = 64
    init: Literal["whitened", "svd", "zero"] = "whitened"
    effort: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.training()

    def training(self) -> spear.Config:
        """SPEAR's config without a gate."""
        return spear.Config(
            lr1=self.lr,
            epochs1=self.epochs,
            samples=self.samples,
            tokens=self.tokens,
            cka_samples=self.cka_samples,
            init=self.init,
            effort=self.effort,
            seed=self.seed,
            gate=False,
            placement="full",
        )


def apply(lm: LowBitModel, calibration: Tensor | None, config: Config) -> None:
    """Attach trained corrections to every quantized layer of `lm`; `calibration` is not used.

    Raises:
        UserError: no quantizer came before, or a rank above a layer's.
        NotMeasurable: the budget does not buy rank 1, or training diverged.
    """
    ranks = low_rank.ranks(lm, config, "uniform")
    training = config.training()
    teacher = lm.full_precision()
    ids = spear.sequences(teacher, None, training)
    ecs = start(lm, ranks, ids[: config.cka_samples], training)
    plain = {name: lm.model.get_submodule(name) for name in ranks}
    for name in ranks:
        lm.model.set_submodule(name, CompensatedLinear(plain[name], ecs[name]))
    calibrate(lm.model, teacher, list(ecs.values()), ids[: training.sequences], training)
    for name in ranks:
        lm.model.set_submodule(name, plain[name])  # `attach` adds the correction as stored
        A, B = ecs[name].A.double(), ecs[name].B.double()
        if not (A.isfinite().all() and B.isfinite().all()):
            raise NotMeasurable("diverged", f"{name}: uniform's training diverged; lower its learning rate")
        lm.attach(name, Attachment("uniform", low_rank.packed(A, B, config.factor_bits), {}))
    lm.facts["layers/rank"] = list(ranks.values())
