"""What a metric is: the parts that every module of this folder has, and the defaults of those that it may leave out."""

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from repro.stats.quantity import Quantity


class Metric:
    """One metric, from its module: a part that the module does not name is the default here.

    Attributes:
        module: where it is written.
        VERSION: raised whenever what it computes changes.
        Params: frozen dataclass, what a spec may ask; `unit` is that of the value.
        Protocol, DEFAULT: the scale's part, under a key named like the metric, and what it is when absent.
        OUTPUTS: the files of a job of its own, and `run(job, found, folder, origin)` executes one; None where it has
            none, and reads what shared jobs left.
        LATER: options of `Params` that came after accepted results, with the value that changes nothing, which is not
            declared.
        TIMES: its job times what it runs, and nothing else runs on its GPU meanwhile.
        FULL_FIRST: a recipe is run only where the status of full precision is not `floor`.
        JOBLESS: it takes no job, and is fresh everywhere.
        PUBLIC: its value is `exact` also where something stands in for a model.
        status: `status(params, full)`, `floor` or `ok` from full precision's series; None where it decides nothing.
        fewest_bits: `fewest_bits(cell, peers)`, of the cells of other rows the one that full precision has to be better
            than, by more than its interval, for the cell not to be at chance; None where no other row decides it.
        origin: where a metric has results of its own, such as kernel times, `quantity(params)`, `several(params)` and
            `origin(all_params)` are asked instead of all else; None elsewhere.
    """

    VERSION: int
    Params: type
    Protocol: type | None = None
    DEFAULT: Any = None
    OUTPUTS: tuple[str, ...] = ()
    LATER: Mapping[str, Any] = {}
    TIMES = False
    FULL_FIRST = False
    JOBLESS = False
    PUBLIC = False
    run: Callable[..., None] | None = None
    status: Callable[[Any, Any], str] | None = None
    fewest_bits: Callable[[Any, Sequence[Any]], Any] | None = None
    origin: Callable[[Sequence[Any]], dict[str, str]] | None = None
    quantity: Callable[[Any], Quantity | None] | None = None

    def __init__(self, module: ModuleType | None = None) -> None:
        """Take from `module` what it names; None is a cell that nothing measures."""
        self.module = module
        for name in PARTS:
            if hasattr(module, name):
                setattr(self, name, getattr(module, name))

    @staticmethod
    def brief(protocol: Any, least: Any) -> Any:
        """The protocol of a build's own measurement, on the first windows or items."""
        return protocol

    @staticmethod
    def jobs(params: Any, target: Any) -> dict[str, Any] | None:
        """Role to job; None where this scale does not measure it."""
        return {}

    @staticmethod
    def series(params: Any, found: Mapping[str, Any], target: Any) -> dict[str, Any]:
        """From observations by role, the series that decide the value; these are what is kept."""
        return {}

    @staticmethod
    def value(params: Any, mean: Mapping[str, Any]) -> Any:
        """The value from the means of these series, numbers or arrays."""
        return None

    @staticmethod
    def reference(params: Any) -> bool | None:
        """Whether the value compares with full precision on the same units by itself."""
        return None

    @staticmethod
    def itself(params: Any) -> float | None:
        """What full precision gives in that comparison, None where there is none."""
        return None

    @staticmethod
    def against(params: Any) -> str:
        """How it is read against full precision, such as `q / f`."""
        return ""

    @staticmethod
    def limits(params: Any) -> tuple[float, float]:
        """The least and the greatest value that there can be, where intervals end."""
        return Quantity.limits

    @staticmethod
    def exact(params: Any, steps: Sequence[Any], shape: Any) -> float | None:
        """The value by arithmetic on the public shape of a model that nothing stands in for."""
        return None

    @staticmethod
    def parts(params: Any) -> dict[str, Any]:
        """The cells that it is arithmetic over: name to recipe and measure."""
        return {}

    @staticmethod
    def lacking(params: Any) -> str:
        """Why it cannot be measured here, such as a package that is missing; empty if it can."""
        return ""

    @staticmethod
    def absent(params: Any) -> str:
        """Why results of the metric's own have no number."""
        return ""

    @staticmethod
    def several(params: Any) -> bool:
        """Whether results of the metric's own are several numbers, which a cell shows as their geometric mean."""
        return False


PARTS = ("VERSION", "Params", *(name for name in vars(Metric) if not name.startswith("_")))
