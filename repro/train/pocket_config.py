"""The pocket models' architecture and training settings, as config/pocket-models.yaml decides them."""

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from repro.core.files import HOME
from repro.core.strict import build, load_yaml

CONFIG = HOME / "config" / "pocket-models.yaml"


@dataclass(frozen=True)
class TokenizerArgs:
    vocab: int
    sample_bytes: int


@dataclass(frozen=True)
class Architecture:
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_size: int
    rope_theta: float
    context: int


@dataclass(frozen=True)
class ModelArgs:
    layers: int
    tokens: int
    training: dict = field(default_factory=dict)  # instead of the settings for all


@dataclass(frozen=True)
class TrainingSettings:
    learning_rate: float
    batch_tokens: int
    length: int
    long_length: int
    long_share: float
    warmup_share: float
    decay_share: float
    weight_decay: float
    beta1: float
    beta2: float
    clip: float
    seed: int
    wikitext_every: int


@dataclass(frozen=True)
class PocketConfig:
    tokenizer: TokenizerArgs
    models: dict[str, ModelArgs]
    architecture: Architecture
    training: TrainingSettings

    def of(self, name: str, **given: Any) -> "PocketConfig":
        """With the training settings of the model `name`, and those that are `given`, instead of the ones for all.

        Raises:
            UserError: a key that is no training setting, or a value of another type.
        """
        settings = asdict(self.training) | self.models[name].training | given
        return replace(self, training=build(TrainingSettings, settings, f"training settings of {name}"))


def load_config(path: Path = CONFIG) -> PocketConfig:
    """Read the pocket models' architecture and training settings.

    Raises:
        UserError: a file that is missing, or a key or value that does not fit.
    """
    return build(PocketConfig, load_yaml(path), str(path.relative_to(HOME) if path.is_relative_to(HOME) else path))
