"""Engines by name whose layers switch to fewer bits while they decode (FlexQuant).

engine = SwitchingEngine.load("pocket-10m", precision="flexquant(threshold=4.0, layers=4)")
for piece in engine.generate("Once upon", 200):
    print(piece, end="")
print(engine.switching)
"""

from functools import partial
from itertools import chain
from pathlib import Path

from repro.core.errors import UserError
from repro.engine import order_file as orders
from repro.engine import weights
from repro.engine.core import SHAPE
from repro.engine.hosted import SHARE
from repro.engine.precision import BY_WEIGHTS, SwitchingCore, assembled, divergences, layer_names
from repro.generation.engine import (
    activations,
    check_memory,
    compressed,
    configuration,
    device_of,
    packed_bytes,
    random_decoder,
)
from repro.jobs import compress, compressed_folder
from repro.jobs.target import Target
from repro.methods.flexquant import order
from repro.methods.flexquant.config import Config
from repro.methods.flexquant.schedule import Rule
from repro.recipes import precision_schedules as named
from repro.specs import scale as scales

FULL = 16  # bits of full precision, which every divergence is from
NO_SPEED = "flexquant: 3 bits have no kernel and lie in slots of 4, so that no speed is theirs"


class SwitchingEngine(SwitchingCore):
    """A model by name with copies of its layers at several widths; `SwitchingCore` says what it can be asked."""

    @classmethod
    def load(
        cls,
        model: str,
        recipe: str = named.DEFAULT,
        context: int | None = None,
        *,
        precision: str | Config = "flexquant",
        rule: Rule | None = None,
        device: str | None = None,
        dtype: str | None = None,
        scale: str | None = None,
        seed: int = 0,
        build: bool = True,
        order_file: Path | None = None,
    ) -> "SwitchingEngine":
        """A model with copies of its layers at every width of a schedule's path.

        Args:
            model, context, device, dtype, scale, seed, build: as `Engine.load`.
            recipe: the quantizer of the copies, at any width.
            precision: the schedule, such as `flexquant(threshold=2.0, layers=4)`.
            rule: which layers are switched after a token: `(pple, step, state) -> layers`.
            order_file: keeps the divergences of the layers' weights, which order them (`order_file.py`).

        UserError, `NotMeasurable`: as `Engine.load`, and for a schedule or recipe that means nothing.
        """
        config = named.read(precision) if isinstance(precision, str) else precision
        if order_file is not None and config.order not in BY_WEIGHTS:
            problem = f"an order file keeps divergences of weights, which order={config.order} does not read"
            raise UserError(f"{problem}; leave it out")
        if config.order == "oracle":
            raise UserError("flexquant: order=oracle sees the texts that are judged; it is a control of tables alone")
        model, recipe = compressed_folder.opened(model, recipe)
        recipe = named.DEFAULT if recipe == "fp16" else recipe
        at = device_of(device)
        targets = {
            bits: Target(scales.load(name=scale).here(), model, named.recipe_at(recipe, bits), seed)
            for bits in config.path
        }
        first = targets[config.path[0]]
        shape = configuration(first)
        slots = weights.check(model, shape, context)
        kind = activations(shape, at, dtype)
        for bits in config.path[1:]:
            weights.slot(bits)
        if model.startswith(SHAPE):
            if 3 in config.path:
                raise UserError(f"{NO_SPEED}; {model} has speed alone: choose a path of 16, 8, 4 and 2 bits")
            make = {}
            for bits, target in targets.items():
                make[bits] = partial(random_decoder, target.recipe, shape, slots, at, kind)
            layers = list(chain.from_iterable(map(layer_names, range(shape.num_hidden_layers))))
            if config.order in BY_WEIGHTS:
                raise UserError(f"{model} has random weights, and so no order by divergence; say order=model or random")
            ahead = order.moves({}, layers, config)
            return cls(model, assembled(make, config), config, ahead, rule=rule)
        by_weights = None
        if order_file is not None:
            ids = {bits: compress.job(target).id for bits, target in targets.items()}
            ids[FULL] = compress.job(first.under("fp16")).id
            by_weights = orders.read(order_file, model, ids, config)
        models = {bits: compressed(target, kind, build) for bits, target in targets.items()}
        if at.type == "cuda":
            copy_bytes = [packed_bytes(lm, kind) for lm in models.values()]
            needed = int((1 + SHARE) * max(copy_bytes)) if config.copies == "host" else sum(copy_bytes)
            check_memory(model, needed, shape, slots, at, kind)
        if by_weights is None and config.order in BY_WEIGHTS:
            original = models[FULL] if FULL in models else compressed(first.under("fp16"), kind, build)
            by_weights = divergences(models, config, original)
            if order_file is not None:
                orders.write(order_file, model, ids, config, by_weights)
        return cls.of(model, models, config, slots, at, kind, rule, first.scale.hub, by_weights=by_weights)
