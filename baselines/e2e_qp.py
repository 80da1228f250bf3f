"""EfficientQAT's second phase, E2E-QP (Chen et al. 2024, arXiv 2407.11062): train only the scales, end to end.

Runs after a step that quantizes to a uniform grid, as in `efficientqat + e2e_qp`. Codes and zero points stay; the
scales of all layers are trained to predict the next token of the training text, and rounded as they are stored at the
end. Unlike in the authors' scripts AdamW's moments are float32 and not paged.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from repro.core.errors import UserError
from repro.models.lowbit import LowBitModel, in_layer
from repro.models.quantized import QuantizedWeight
from repro.train import training_cost
from repro.train.blocks import checkpoint_folder, training_ids
from repro.train.end_to_end import EndToEndSettings, fitting, logits, next_token_loss, train, trained_tokens
from repro.train.streams import Dtype, computing

VERSION = 1
CALIBRATED = True
work = training_cost.end_to_end  # what its training takes
READS_FIRST_TOKENS = True  # of the calibration text its first `tokens` tokens and no others
COST = 50.0  # relative to RTN, for scheduling alone


@dataclass(frozen=True)
class Config:
    """The authors' settings: 4096 sequences of 4096 tokens, an effective batch of 32.

    Attributes:
        lr: learning rate of the scales; the scripts of 3 and 4 bits have 1e-5.
        epochs: passes over the text.
        batch: sequences in a step.
        tokens: of an epoch.
        warmup: share of the steps in which the rate rises; its cosine ends at 0.
        clip: largest norm of the gradient.
        compute: dtype of the decoder; what is trained is float32 (the authors' scripts: bfloat16).
        seed: of the order of sequences.
    """

    lr: float = 2e-5
    epochs: int = 1
    batch: int = 32
    tokens: int = 4096 * 4096
    warmup: float = 0.03
    clip: float = 0.3
    compute: Dtype = "bfloat16"
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.lr, self.epochs, self.clip, self.seed) < 0 or min(self.batch, self.tokens) < 1:
            raise UserError("e2e_qp: lr, epochs, clip and seed are 0 or more, batch and tokens 1 or more")
        if not 0 <= self.warmup < 1:
            raise UserError(f"e2e_qp: warmup is {self.warmup}; it must be a share, 0 or more and below 1")


def apply(lm: LowBitModel, calibration: Tensor | None, config: Config) -> None:
    """Train the scales of every quantized layer of `lm`; `calibration` int64 `[sequences, length]` is the text.

    Raises:
        UserError: no uniform quantizer came before, or fewer tokens than asked for.
        NotMeasurable: the training diverged.
    """
    if not lm.weights or not all(isinstance(weight, QuantizedWeight) for weight in lm.weights.values()):
        raise UserError("e2e_qp trains the scales of a uniform grid; put one before it: efficientqat + e2e_qp")
    model = computing(lm.model, config.compute)
    ids = training_ids(calibration, config.tokens, "e2e_qp").to(model.device)
    scales = {name: weight.scales.float().to(model.device) for name, weight in lm.weights.items()}
    steps = {}  # code - zero: a scale times it is the weight
    for name, weight in lm.weights.items():
        zeros = weight.zeros.float()[:, weight.column_group()]
        steps[name] = (weight.codes.float() - zeros).to(model.device, model.get_submodule(name).weight.dtype)
    groups = {name: weight.column_group().to(model.device) for name, weight in lm.weights.items()}

    def loss(rows: Tensor) -> Tensor:
        rounded = {
            f"{name}.weight": (steps[name] * s[:, groups[name]]).to(steps[name].dtype) for name, s in scales.items()
        }
        return next_token_loss(logits(model, rounded, rows), rows)

    settings = EndToEndSettings(
        config.lr, config.epochs, config.batch, config.warmup, 0.0, config.clip, 0.0, config.seed,
        fitting(model, ids.shape[1]),
    )  # fmt: skip
    folder = checkpoint_folder(model, ids, __file__, config)
    losses = train(loss, scales, ids, settings, folder, "e2e_qp")
    for name, weight in list(lm.weights.items()):
        with in_layer(name):
            lm.set_weight(name, replace(weight, scales=scales[name].to(weight.scales)))
    lm.facts |= {"training/end-to-end loss": losses, "training/tokens": [float(trained_tokens(ids, settings))]}
