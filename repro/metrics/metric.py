"""The interface of a metric: a dataclass whose fields a spec sets, and whose methods define how it is measured."""

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
    """A metric with its parameters; subclasses are frozen dataclasses whose fields a spec sets.

    Attributes:
        unit: a field of every subclass, the unit of the value.
        VERSION: to be raised whenever a change alters what is computed.
        PROTOCOL: the dataclass of a scale's settings for it, under a key named like the metric; None if it has none.
        DEFAULT: these settings if a scale does not give them; None means that the scale does not measure it.
        OUTPUTS: the files of its own job.
        run: `run(job, folders, folder, origin)` executes its own job: it reads the folders of the job's needs by role
            and writes into `folder`. None if it has no job of its own and reads what shared jobs wrote.
        LATER: parameters that were added after results had been accepted, with the value that changes nothing; a
            parameter with this value is not declared.
        TIMES: its job measures times, so nothing else may run on the GPU meanwhile.
        FULL_FIRST: a recipe is run only if the status of full precision is not `at_chance`.
        JOBLESS: it needs no job, and is fresh everywhere.
        SEEDED: it draws random numbers itself by the seed of a cell, such as arrivals, whatever the recipe.
        SHAPED: it times the public shape that its parameter `shape` names (`timed_shape`).
        PUBLIC: its value is always `exact`, even if the model has a stand-in.
        status: returns `at_chance` or `ok` from the series of full precision; None if these decide nothing.
        fewest_bits: `fewest_bits(cell, peers)` returns the cell among the other rows that full precision must beat by
            more than its interval; otherwise the cell is at chance. None if no other row decides it.
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
        """The protocol of a build's own measurement, shortened to the first windows or items.

        Args:
            protocol: of the scale.
            least: the scale's `Replicate`, which says how many.
        """
        return protocol

    def only(self, protocol: Any) -> Any:
        """The protocol where nothing but this metric is measured: without what it has no use for."""
        return protocol

    def jobs(self, target: Any) -> dict[str, Any] | None:
        """The jobs of a target by role; None if its scale does not measure the metric."""
        return {}

    def series(self, observed: Mapping[str, Any], target: Any) -> dict[str, Any]:
        """The series that decide the value, from observations by role; an accepted result stores these."""
        return {}

    def value(self, mean: Mapping[str, Any]) -> Any:
        """The value from the means of the series, which are numbers or arrays."""
        return None

    @property
    def timed_shape(self) -> str:
        """The public shape with random weights on which it is measured; empty if it is measured on a model.

        A cell with such a shape needs no stand-in, and its evidence is of grade B.
        """
        return self.shape if self.SHAPED else ""

    @property
    def reference(self) -> bool | None:
        """Whether the value is itself a comparison with full precision on the same units; None leaves that open."""
        return None

    @property
    def itself(self) -> float | None:
        """The value of full precision in such a comparison; None if it is none."""
        return None

    @property
    def against(self) -> str:
        """The expression that compares it (q) with full precision (f), such as `q / f`; empty if none does."""
        return ""

    @property
    def limits(self) -> tuple[float, float]:
        """The least and the greatest possible value, at which intervals are cut off."""
        return Quantity.limits

    def exact(self, steps: Sequence[Any], shape: Any) -> float | None:
        """The value by arithmetic on a model's public shape; None if it cannot be calculated.

        Args:
            steps: of the recipe.
            shape: the `PublicShape`.
        """
        return None

    def operands(self) -> dict[str, tuple[str | None, dict[str, Any]]]:
        """The operands of a derived metric: name to recipe (None is the cell's own) and measure; empty for all others.

        A metric with operands also has a `quantity`, the expression over their names.
        """
        return {}

    def lacking(self) -> str:
        """Why it cannot be measured on this machine, such as a missing package; empty if it can."""
        return ""


class External(Metric, ABC):
    """A metric that is read from files of its own, such as kernel times, without a job or a model."""

    def jobs(self, target: Any) -> None:
        """None: it has no jobs."""

    @abstractmethod
    def read(self) -> Quantity | None:
        """The quantity in its files; None if they lack it."""

    @staticmethod
    @abstractmethod
    def origin(all_params: Sequence[Any]) -> dict[str, str]:
        """Where its files' results come from, as fields of a measurement.

        Args:
            all_params: metrics of this class, of one cell or of its operands.
        """

    def absent(self) -> str:
        """Why its files have no number; empty if it cannot say."""
        return ""

    def several(self) -> bool:
        """Whether it is several numbers; a cell then shows their geometric mean."""
        return False
