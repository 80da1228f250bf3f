"""SpinQuant (Liu et al. 2024, arXiv 2405.16406): rotations learned for quantization, folded into the weights.

R1 of the hidden states and R2 of each block's values (`rotation`) start as Hadamard matrices with random signs and are
learned by Cayley SGD (`cayley`; section 3.2) so that the model with quantized activations predicts the next token. R4
is not learned: a Hadamard rotation of each down-projection's inputs, computed as the model runs.

Then weights are quantized: by GPTQ, for which rotations are learned with weights in full precision, or rounded to
nearest, for which they are learned with weights rounded as they will be; either, but not crossed. Keys and values, and
the rotation R3 of queries and keys that is for them, stay as they are.

Weights are symmetric and clipped (the scripts' w_clip) on the grid that all baselines here share. Its steps are
2m/(2^b - 1) where the authors' are m/(2^(b-1) - 1), but the clipping searches nearly the same ones: on pocket-5m the
squared error is within 0.1 % of theirs per channel and at 2 bits, and 3.7 % above it at w4 g32. Activations are
asymmetric with ranges that include 0, as in the scripts.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from repro.baselines import gptq, grid, hadamard, rotation, rtn
from repro.core.errors import UserError
from repro.models.attachments import Attachment
from repro.models.groups import inputs
from repro.models.groups.quantizer import GroupGrid, fake_quantize
from repro.models.hooks import each_input
from repro.models.lowbit import LowBitModel, block_linears, in_layer
from repro.train import training_cost
from repro.train.blocks import training_ids

VERSION = 1
CALIBRATED = True
work = training_cost.end_to_end  # what its training takes
COST = 50.0  # relative to RTN, for scheduling alone
RESCALES = True
FULL = 16  # bits of activations that are left alone


@dataclass(frozen=True)
class Config:
    """The grids, and the training, with the authors' settings: 100 steps on 800 sequences of 2048 tokens.

    Attributes:
        bits: of weights.
        group: input channels that share a scale, of weights and of activations; 0 is one for a row and for a token.
            Bit-by-Bit's Table 1 has w2a2 with 32.
        act_bits: of the inputs of all block linears; 16 leaves them alone.
        solver: how weights are quantized; rotations are learned to suit it.
        online: rotate the inputs of each down-projection (R4).
        lr: learning rate of all rotations; its cosine ends at 0.
        epochs: passes over the text; 0 leaves random Hadamard matrices. Bit-by-Bit has 2 (section 4.1).
        batch: sequences in a step; one on each of the authors' 8 GPUs.
        tokens: of an epoch.
        sequences: the first ones of the text, from which GPTQ takes its Hessians.
        seed: of the signs, the order of sequences and the steps with a QR.
    """

    bits: int = 4
    group: int = 0
    act_bits: int = 4
    solver: Literal["gptq", "rtn"] = "gptq"
    online: bool = True
    lr: float = 1.5
    epochs: int = 1
    batch: int = 8
    tokens: int = 800 * 2048
    sequences: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        self.weights()
        if self.act_bits != FULL and not 2 <= self.act_bits <= 8:
            raise UserError(f"act_bits is {self.act_bits}; it must be 16, or 2 to 8")
        if min(self.lr, self.epochs, self.seed) < 0 or min(self.batch, self.tokens, self.sequences) < 1:
            raise UserError("spinquant: lr, epochs and seed are 0 or more, batch, tokens and sequences 1 or more")
        if self.epochs and self.act_bits == FULL and self.solver == "gptq":
            raise UserError("spinquant: nothing is quantized while it trains; give act_bits, solver=rtn or epochs=0")

    @property
    def calibrated(self) -> bool:
        """Whether it needs tokens: rounding in a basis of random Hadamard matrices does not."""
        return self.epochs > 0 or self.solver == "gptq"

    def weights(self) -> gptq.Config:
        """The grid of weights, and the authors' solver: layers of a block one after the other, as they run."""
        return gptq.Config(bits=self.bits, group=self.group, symmetric=True, clip="mse", true_sequential=True)

    def inputs(self, linear: nn.Linear) -> GroupGrid:
        """The grid of a layer's inputs."""
        return GroupGrid(self.act_bits, self.group or linear.in_features, include_zero=True)


def attached(linear: nn.Linear, tensors: dict[str, Tensor], numbers: dict[str, float]) -> nn.Linear:
    """`linear` on rotated and quantized inputs, or a head with a weight of its own: what `LowBitModel` runs.

    Raises:
        UserError: the numbers belong to a layer with another number of inputs; or `linear` has no weight, as where the
            decode engine asks for what an attachment adds to a layer's output.
    """
    if "weight" in tensors:
        return rotation.Untied(linear, tensors["weight"])
    if "bits" in numbers:
        linear = inputs.attached(linear, tensors, numbers)
    return hadamard.RotatedInputs(linear, numbers["columns"]) if "online" in numbers else linear


def apply(lm: LowBitModel, calibration: Tensor | None, config: Config) -> None:
    """Learn rotations, fold them into `lm`, a Llama, Mistral or Qwen2, and quantize every block linear of it.

    `calibration`, int64 token ids `[S, L]`, is what rotations are trained on (`tokens`) and GPTQ (`sequences`).

    Raises:
        UserError: an architecture or a size that cannot be rotated, fewer tokens than asked for, or a layer that cannot
            be quantized; the message names it.
        NotMeasurable: the training diverged.
    """
    model = lm.model
    layers = block_linears(lm.model)
    solver = config.weights()
    rotation.check(model, config.online)
    if config.calibrated and (calibration is None or not calibration.numel()):
        raise UserError("spinquant needs calibration tokens, there are none; name a calibration corpus in the recipe")
    ids = training_ids(calibration, config.tokens, "spinquant").to(model.device) if config.epochs else None
    for name, linear in layers.items():
        with in_layer(name):
            grid.check(linear.weight.data, solver)
    downs = {name: layers[name] for name in layers if config.online and name.endswith(rotation.DOWN)}
    turned = {name: hadamard.RotatedInputs(linear) for name, linear in downs.items()}
    input_grids = {name: config.inputs(linear) for name, linear in layers.items()} if config.act_bits < FULL else {}
    with each_input(downs, lambda name, x: turned[name].turn(x)):
        tied = rotation.fold(model, downs)
        with each_input(
            {name: layers[name] for name in input_grids}, lambda name, x: fake_quantize(x, input_grids[name])
        ):
            R1, R2, losses = rotation.learn(model, ids, config, solver if config.solver == "rtn" else None)
        rotation.rotate(model, R1, R2)
        if config.solver == "gptq":
            gptq.apply(lm, calibration[: config.sequences], solver)  # on inputs in full precision, as the authors do
        else:
            rtn.apply(lm, None, solver)
    rotation.keep(lm, tied)
    for name, linear in layers.items():
        numbers = inputs.attachment("", linear.in_features, input_grids[name]).numbers if name in input_grids else {}
        if name in downs:
            numbers = {"columns": linear.in_features, **numbers, "online": 1}
        if numbers:
            lm.attach(name, Attachment("spinquant", {}, numbers))
    if tied:
        head = model.get_submodule(rotation.HEAD).weight.data
        lm.attach(rotation.HEAD, rotation.OwnHead("spinquant", {"weight": head}, {}))
    if config.epochs:
        lm.facts |= {"training/loss": losses, "training/tokens": [float(len(losses) * config.batch * ids.shape[1])]}
