"""What a metric is: a dataclass of what a spec may ask, whose methods say how it is measured; and their defaults."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from repro.core.errors import NotMeasurable
from repro.stats.quantity import Quantity
from repro.store import observations


def check_gpu(device: str, times: str) -> None:
    """Raise unless a job's device is a GPU.

    Args:
        device: "cuda" or "cpu".
        times: what is timed, the subject of the sentence.

    Raises:
        NotMeasurable: it is not.
    """
    if device != "cuda":
        raise NotMeasurable("unsupported", f"{times} need a GPU; set the scale's device to cuda")


class Metric:
    """One metric with its parameters; subclasses are frozen dataclasses whose fields are what a spec may ask.

    Attributes:
        unit: a field of every subclass, the unit of the value.
        VERSION: raised whenever what it computes changes.
        PROTOCOL, DEFAULT: the scale's part, under a key named like the metric, and what it is when absent; None is a
            scale that does not measure it.
        OUTPUTS: the files of a job of its own.
        run: `run(job, folders, folder, origin)` executes a job of its own, which reads the folders of its needs and
            writes its own; None where it has none, and reads what shared jobs left.
        LATER: parameters that came after accepted results, with the value that changes nothing, which is not declared.
        TIMES: its job times what it runs, and nothing else runs on its GPU meanwhile.
        FULL_FIRST: a recipe is run only where the status of full precision is not `at_chance`.
        JOBLESS: it takes no job, and is fresh everywhere.
        SEEDED: it draws something itself by the seed of a cell, such as arrivals, whatever the recipe.
        SHAPED: it times the public shape that its parameter `shape` names (`timed_shape`).
        PUBLIC: its value is `exact` also where something stands in for a model.
        status: `at_chance` or `ok` from the series of full precision; None where these decide nothing.
        fewest_bits: `fewest_bits(cell, peers)`, of the cells of other rows the one that full precision has to be better
            than, by more than its interval, for the cell not to be at chance; None where no other row decides it.
    """

    unit: str
    VERSION: ClassVar[int]
    PROTOCOL: ClassVar[type | None] = None
    DEFAULT: ClassVar[Any] = None
    OUTPUTS: ClassVar[tuple[str, ...]] = (observations.FILE,)
    LATER: ClassVar[Mapping[str, Any]] = {}
    TIMES: ClassVar[bool] = False
    FULL_FIRST: ClassVar[bool] = False
    JOBLESS: ClassVar[bool] = False
    SEEDED: ClassVar[bool] = False
    SHAPED: ClassVar[bool] = False
    PUBLIC: ClassVar[bool] = False
    run: ClassVar[Callable[..., None] | None] = None
    status: ClassVar[Callable[..., str] | None] = None
    fewest_bits: ClassVar[Callable[..., Any] | None] = None

    @staticmethod
    def brief(protocol: Any, least: Any) -> Any:
        """The protocol of a build's own measurement, on the first windows or items."""
        return protocol

    def jobs(self, target: Any) -> dict[str, Any] | None:
        """Role to job; None where this scale does not measure it."""
        return {}

    def series(self, observed: Mapping[str, Any], target: Any) -> dict[str, Any]:
        """From observations by role, the series that decide the value; these are what is kept."""
        return {}

    def value(self, mean: Mapping[str, Any]) -> Any:
        """The value from the means of these series, numbers or arrays."""
        return None

    @property
    def timed_shape(self) -> str:
        """The public shape with random weights that alone decides it: no stand-in is needed, whatever the cell's model,
        and the evidence is of grade B. Empty where it is measured on a model."""  # fmt: skip
        return self.shape if self.SHAPED else ""

    @property
    def reference(self) -> bool | None:
        """Whether the value compares with full precision on the same units by itself."""
        return None

    @property
    def itself(self) -> float | None:
        """What full precision gives in that comparison, None where there is none."""
        return None

    @property
    def against(self) -> str:
        """How it is read against full precision, such as `q / f`."""
        return ""

    @property
    def limits(self) -> tuple[float, float]:
        """The least and the greatest value that there can be, where intervals end."""
        return Quantity.limits

    def exact(self, steps: Sequence[Any], shape: Any) -> float | None:
        """The value by arithmetic on the public shape of a model that nothing stands in for."""
        return None

    def operands(self) -> dict[str, tuple[str | None, dict[str, Any]]]:
        """The cells that it is arithmetic over: name to recipe, None for the cell's own, and measure.

        A metric that has some also has a `quantity`, the expression of their names.
        """
        return {}

    def lacking(self) -> str:
        """Why it cannot be measured here, such as a package that is missing; empty if it can."""
        return ""


class External(Metric, ABC):
    """A metric with results of its own, such as kernel times: no job and no model behind it."""

    def jobs(self, target: Any) -> None:
        """It has none."""

    @abstractmethod
    def read(self) -> Quantity | None:
        """The quantity in its own results; None where they lack it."""

    @staticmethod
    @abstractmethod
    def origin(all_params: Sequence[Any]) -> dict[str, str]:
        """Where the results of several of its cells come from, as fields of a measurement."""

    def absent(self) -> str:
        """Why its own results have no number."""
        return ""

    def several(self) -> bool:
        """Whether its own results are several numbers, which a cell shows as their geometric mean."""
        return False
