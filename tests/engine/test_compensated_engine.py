"""SPEAR's models in the engine by the kernel's operator, whose reference runs on a CPU, against the harness."""

import pytest
import torch
from engines import FEW, TINY, products
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

pytest.importorskip("triton")

from repro.baselines import rtn  # noqa: E402
from repro.core.errors import UserError  # noqa: E402
from repro.engine import corrected, random_shape, weights  # noqa: E402
from repro.engine.core import Core  # noqa: E402
from repro.engine.corrected import Compensated, Corrected  # noqa: E402
from repro.engine.step import Cache, run_of, step  # noqa: E402
from repro.generation import engine  # noqa: E402
from repro.kernels import compensated_gemv  # noqa: E402
from repro.methods import spear  # noqa: E402
from repro.methods.spear.compensator import stored_bytes  # noqa: E402
from repro.metrics import shape_decode  # noqa: E402
from repro.metrics.shape_decode import ShapeDecode  # noqa: E402
from repro.models.lowbit import LowBitModel  # noqa: E402
from repro.recipes.recipe import parse  # noqa: E402
from repro.specs import figures, tables  # noqa: E402
from repro.specs import scale as scales  # noqa: E402
from repro.workflow.workflow import Workflow  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def ids():
    return torch.randint(300, (48,), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def made():
    """A tiny model, rounded and trained with compensators of two ranks, once for each choice of a gate."""
    kept = {}

    def of(gate):
        if gate not in kept:
            torch.manual_seed(0)
            lm = LowBitModel(LlamaForCausalLM(LlamaConfig(**TINY)).eval())
            rtn.apply(lm, None, rtn.Config(bits=4, group=0))
            spear.apply(lm, None, spear.Config(**FEW, budget=0.2, gate=gate, alpha=2.0))
            kept[gate] = lm
        return kept[gate]

    return of


@pytest.fixture
def by_kernel(monkeypatch):
    """The engine takes its path of a GPU, on which operators run their references here; counts the kernel's calls."""
    used = []

    def counted(*arguments):
        used.append(len(arguments[0]))
        return compensated_gemv.reference(*arguments)

    monkeypatch.setattr(corrected, "runs_kernel", lambda device: True)
    monkeypatch.setattr(
        weights, "packed_product", lambda packed, bias, dtype, order=None: weights.Packed(packed, bias, order)
    )
    monkeypatch.setattr(weights.kernel, "wna16", lambda x, packed: x @ weights.packing.dequantize(packed).T)
    monkeypatch.setattr(compensated_gemv, "compensated_gemv", counted)
    return used


@torch.inference_mode()
def decoded(model, ids, at_once):
    cache, logits = Cache(model, 1), []
    for start in range(0, len(ids), at_once):
        logits.append(model.head(step(model, cache, run_of(ids[start : start + at_once], 0, start))))
    return torch.cat(logits)


def nll(logits, ids):
    return F.cross_entropy(logits[:-1].double(), ids[1:]).item()


@pytest.mark.parametrize("gate", [True, False])
def test_perplexity_is_that_of_the_harness(made, by_kernel, ids, gate):
    """Decoded by the kernel's operator, three tokens at a time, prefilled, and without its compensators."""
    lm = made(gate)
    model = weights.decoder(lm, 64, CPU, torch.float32)
    kinds = [type(product) for product in products(model)]
    assert Compensated in kinds and weights.Packed in kinds and Corrected not in kinds
    with torch.no_grad():
        wanted = lm.model(ids[None]).logits[0]
    one = decoded(model, ids, 1)
    assert len(by_kernel) == len(ids) * kinds.count(Compensated)
    engine = Core("tiny", model)
    engine.tokenizer = None
    for logits in (one, decoded(model, ids, 3), engine.logits(ids)):
        assert torch.allclose(logits, wanted, atol=2e-3 * wanted.abs().max())
        assert torch.equal(logits.argmax(1), wanted.argmax(1))
        assert nll(logits, ids) == pytest.approx(nll(wanted, ids), abs=1e-3)
    assert len(by_kernel) == len(ids) * kinds.count(Compensated), "several tokens are launch by launch"
    separate = shape_decode.with_separate_launches(model)
    assert torch.allclose(decoded(separate, ids, 1), one, atol=1e-3 * one.abs().max())
    plain = decoded(shape_decode.with_separate_launches(model), ids[:1], 1)
    for block in separate.blocks:
        for name in weights.LAYERS:
            if isinstance(getattr(block, name), Corrected):
                getattr(block, name).layers, getattr(block, name).starts = torch.nn.ModuleList(), []
    assert not torch.allclose(decoded(separate, ids[:1], 1), plain, atol=5e-3 * plain.abs().max())


def test_what_the_kernel_does_not_take_is_launch_by_launch(made, by_kernel, monkeypatch):
    tensors = compensated_gemv.random_compensator(4, 16, 64, 4, None)
    ungated = compensated_gemv.random_compensator(4, 16, 64, 0, None)
    packed = weights.packing.pack(torch.zeros(32, 64, dtype=torch.uint8), torch.ones(32, 1), None, 4, 0)
    product, both = weights.Packed(packed, None, None), ([0, 16], [tensors, tensors], [1.0, 1.0])
    assert type(corrected.compensated(product, *both)) is Compensated
    in_order = weights.Packed(packed, None, torch.arange(64))
    wide = weights.packing.pack(torch.zeros(32, 64, dtype=torch.uint8), torch.ones(32, 1), None, 8, 0)
    for other in (in_order, weights.Packed(wide, None, None), weights.Dense(torch.zeros(32, 64))):
        assert type(corrected.compensated(other, *both)) is Corrected
    assert type(corrected.compensated(product, [0, 16], [tensors, ungated], [1.0, 1.0])) is Corrected
    large = compensated_gemv.random_compensator(113, 16, 64, 0, None)
    assert type(corrected.compensated(product, [0], [large], [1.0])) is Corrected
    monkeypatch.setattr(corrected, "runs_kernel", lambda device: False)
    assert type(corrected.compensated(product, *both)) is Corrected


# --- shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["w4", "spear", "spear-naive", "spear-launched"])
def test_figure_8_s_shapes_decode_by_their_products(by_kernel, monkeypatch, how):
    monkeypatch.setitem(engine.SHAPES, "tiny", TINY)
    monkeypatch.setitem(shape_decode.PLACED, "tiny", (0.41, 5))
    recipe, method = shape_decode.recipe_and_method("tiny", how)
    core = shape_decode.loaded("tiny", recipe, method, 9, CPU)
    compensated = [product for product in products(core.model) if isinstance(product, Compensated)]
    plain = shape_decode.loaded("tiny", *shape_decode.recipe_and_method("tiny", "w4"), 9, CPU).model.stored_bytes
    assert core.time(3, 3).new_tokens == 3 and bool(by_kernel) == bool(compensated) == (how == "spear")
    assert (core.model.stored_bytes > plain) == (how != "w4")
    if how == "spear":
        layers = [len(product.down) for product in compensated]
        assert sum(layers) == round(0.41 * 14) and {product.down.shape[1] for product in compensated} == {16}


def test_a_launched_step_is_no_graph(by_kernel, monkeypatch):
    monkeypatch.setitem(engine.SHAPES, "tiny", TINY)
    real, seen = Core.__init__, []
    monkeypatch.setattr(
        Core, "__init__", lambda self, *arguments: (real(self, *arguments), setattr(self.steps, "graphed", True))[0]
    )
    for how in ("w4", "w4-launched"):
        seen.append(shape_decode.loaded("tiny", *shape_decode.COMPENSATED[how], 9, CPU).steps.graphed)
    assert seen == [True, False]


def test_a_shape_says_where_its_compensators_are():
    chosen = random_shape.compensated_layers(
        [str(i) for i in range(112)], spear.Config(placement="random", k_share=0.41)
    )
    assert len(chosen) == 46
    assert random_shape.compensated_layers(["a", "b"], spear.Config(placement="full")) == {"a", "b"}
    for settings in ("", "(rank=8)", "(placement=random, rank=8)", "(placement=full)"):
        with pytest.raises(UserError, match="give spear a rank, and placement=full"):
            random_shape.shape_recipe(parse(f"rtn-w4-pc + spear{settings}"))
    with pytest.raises(UserError, match="unknown shape of spear"):
        ShapeDecode("Llama-2-70B", "spear")


def test_bytes_of_compensators_are_counted_without_a_device():
    from transformers import AutoConfig

    config = AutoConfig.for_model(**TINY)
    sizes = [
        random_shape.random_decoder(parse(recipe), config, 9, torch.device("meta"), torch.bfloat16)
        for recipe in ("rtn-w4-pc", "rtn-w4-pc + spear(placement=full, rank=5)")
    ]
    shapes = [(128, 128), (64, 128), (64, 128), (128, 128), (192, 128), (192, 128), (128, 192)] * 2
    assert sizes[1].stored_bytes - sizes[0].stored_bytes == stored_bytes(5, shapes, 4)


def test_figure_8_is_asked_for_once():
    flow = Workflow(scales.load(name="pocket").on("cuda"), stored=False)
    jobs = {job.id for job in flow.every_job(flow.cells("spear", "decode"))}
    drawn = {job.id for job in flow.every_job(flow.cells("spear", "8", "figure"))}
    assert len(jobs) == 18 and len(drawn) == 15 and drawn < jobs
    assert len(figures.cells("spear", "8")) == 15 and len(tables.table("spear", "decode").claims) == 6
