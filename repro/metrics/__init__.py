"""The metrics: one file each, and one line in the dict here. `metric.Metric` documents the interface.

A metric defines what a spec may ask for, which jobs it needs, how its job runs, and how observations give the value.
"""

from typing import Any

from repro.metrics.acceptance import Acceptance
from repro.metrics.agreement import Agreement
from repro.metrics.bench import Bench
from repro.metrics.bertscore import BertScore
from repro.metrics.block_error import BlockError
from repro.metrics.by_error import ByError
from repro.metrics.curve import Curve
from repro.metrics.decode import Decode
from repro.metrics.derived import Derived
from repro.metrics.exam import Exam
from repro.metrics.histogram import Histogram
from repro.metrics.kernel_time import KernelTime
from repro.metrics.likelihood import Likelihood
from repro.metrics.llamacpp import LlamaCpp
from repro.metrics.memory import Memory
from repro.metrics.metric import Metric
from repro.metrics.offload_time import OffloadTime
from repro.metrics.parallel_decode import ParallelDecode
from repro.metrics.perplexity import Perplexity
from repro.metrics.placement import Placement
from repro.metrics.sensitivity import Sensitivity
from repro.metrics.serving import Serving
from repro.metrics.setting import Setting
from repro.metrics.shape_decode import ShapeDecode
from repro.metrics.similarity import Similarity
from repro.metrics.sparsity import Sparsity
from repro.metrics.storage import Storage
from repro.metrics.surface import Surface
from repro.metrics.switching import Switching
from repro.metrics.timeline import Timeline
from repro.metrics.token_class import TokenClass
from repro.metrics.tpot import TimePerToken
from repro.metrics.training import Training
from repro.metrics.weight_divergence import WeightDivergence
from repro.metrics.zeroshot import ZeroShot

KINDS: dict[str, type[Metric]] = {
    "perplexity": Perplexity,
    "llamacpp": LlamaCpp,
    "zeroshot": ZeroShot,
    "likelihood": Likelihood,
    "exam": Exam,
    "storage": Storage,
    "memory": Memory,
    "placement": Placement,
    "sensitivity": Sensitivity,
    "agreement": Agreement,
    "similarity": Similarity,
    "sparsity": Sparsity,
    "by_error": ByError,
    "token_class": TokenClass,
    "training": Training,
    "curve": Curve,
    "block_error": BlockError,
    "histogram": Histogram,
    "surface": Surface,
    "setting": Setting,
    "derived": Derived,
    "kernel_time": KernelTime,
    "decode": Decode,
    "acceptance": Acceptance,
    "offload_time": OffloadTime,
    "timeline": Timeline,
    "shape_decode": ShapeDecode,
    "serving": Serving,
    "parallel_decode": ParallelDecode,
    "switching": Switching,
    "bertscore": BertScore,
    "weight_divergence": WeightDivergence,
    "tpot": TimePerToken,
    "bench": Bench,
}
NONE = Metric()


def metric_of(cell: Any) -> Metric:
    """The metric of a cell with its parameters; `NONE`, without jobs or values, if nothing measures the cell."""
    return NONE if cell.params is None else cell.params
