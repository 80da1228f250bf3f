"""Products with Q4_K in the engine by their operators, whose references run on a CPU, against dequantized ones."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from repro.baselines import q4_k as quantizer
from repro.core.errors import UserError
from repro.engine import q4_k, weights
from repro.engine.core import Core
from repro.engine.weights import LAYERS, Dense, Joined, SparseInputs
from repro.generation import Engine
from repro.generation import engine as engines
from repro.methods.spqt import sparse_inputs
from repro.models.attachments import Attachment
from repro.models.lowbit import LowBitModel

CPU, HALF = torch.device("cpu"), 8
TINY = dict(
    model_type="llama", hidden_size=256, intermediate_size=768, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=300, max_position_embeddings=128,
)  # fmt: skip
SPARSE = {"tokens": 512, "search": 128, "step": 0.25}


@pytest.fixture(scope="module")
def ids():
    return torch.randint(300, (512,), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def made(ids):
    """Of a layout and of thresholds, a random model whose k and v have 128 rows; once."""
    kept = {}

    def of(layout, **options):
        key = (layout, *options.items())
        if key not in kept:
            torch.manual_seed(0)
            lm = LowBitModel(LlamaForCausalLM(LlamaConfig(**TINY, initializer_range=0.08)).eval())
            quantizer.apply(lm, None, quantizer.Config(layout=layout))
            if options:
                sparse_inputs.apply(lm, ids.view(8, 64), sparse_inputs.Config(**SPARSE, **options))
            kept[key] = lm
        return kept[key]

    return of


@pytest.fixture
def by_kernels(monkeypatch):
    """The engine takes its path of a GPU, on which operators run their references here."""
    monkeypatch.setattr(weights, "runs_q4_k", lambda device, dtype: True)


def products(lm, of_block=1):
    """Of one block, by name."""
    by_name = {}
    for name, layers in LAYERS.items():
        paths = [f"model.layers.{of_block}.{layer}" for layer in layers]
        by_name[name] = weights.product(lm, paths, CPU, torch.float32)
    return by_name


def weight_of(lm, name, of_block=1):
    """`[N, K]` of a product as the harness has it."""
    layers = [lm.model.get_submodule(f"model.layers.{of_block}.{layer}") for layer in LAYERS[name]]
    return torch.cat([getattr(layer, "linear", layer).weight for layer in layers]).detach()


@pytest.mark.parametrize("layout", ["row", "zigzag", "zigzag-planes"])
def test_products_of_both_layouts_are_the_dequantized_ones(made, by_kernels, layout):
    """q, k and v of pocket-3m are one stack in zigzag, gate and up are not; of one token and of several."""
    lm = made(layout)
    for name, product in products(lm).items():
        assert isinstance(product, q4_k.Q4K) and product.zigzag == (layout != "row")
        weight = weight_of(lm, name)
        x = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(0))
        for some in (x[:1], x):
            torch.testing.assert_close(product(some), some @ weight.T, rtol=1e-4, atol=1e-4)
        assert product.expanded(1, torch.float32) is product
        dense = product.expanded(7, torch.float32)
        assert isinstance(dense, Dense)
        torch.testing.assert_close(dense(x), x @ weight.T, rtol=1e-4, atol=1e-4)


def test_without_kernels_the_weight_is_dequantized(made):
    assert all(isinstance(product, Dense) for product in products(made("zigzag")).values())


def test_a_product_of_layers_with_thresholds_of_their_own_is_a_part_of_the_stack(made, by_kernels):
    """As TEAL itself may have them: k begins within the bands of the stack."""
    lm = copy.deepcopy(made("zigzag"))
    x, wanted = torch.randn(1, 256, generator=torch.Generator().manual_seed(1)), []
    for kind, threshold in zip(LAYERS["qkv"], (0.2, 0.6, 1.0)):
        name = f"model.layers.1.{kind}"
        wanted.append(lm.model.get_submodule(name)(x * (x.abs() > threshold)))
        lm.attach(name, Attachment("spqt", {"threshold": torch.tensor(threshold)}, {"columns": 256, "half": False}))
    joined = products(lm)["qkv"]
    assert isinstance(joined, Joined) and [one.dense.start for one in joined] == [0, 0, 128]
    torch.testing.assert_close(joined(x), torch.cat(wanted, 1).detach(), rtol=1e-4, atol=1e-4)


def test_one_token_is_computed_from_its_listed_inputs_alone(made, by_kernels, monkeypatch):
    """And a batch, or Q4_K in rows, on inputs with zeros."""
    used = []
    for module, name in ((weights, "active_inputs"), (q4_k, "zigzag_sparse"), (q4_k, "q4_k_gemv")):
        real = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *arguments, name=name, real=real: used.append(name) or real(*arguments)
        )
    for layout, once in (("zigzag", ["active_inputs", "zigzag_sparse"]), ("row", ["q4_k_gemv"])):
        lm = made(layout, thresholds="unified", sparsity=0.5)
        product = products(lm)["down"]
        assert isinstance(product, SparseInputs)
        weight = weight_of(lm, "down")
        x = 0.3 * torch.randn(2, weight.shape[1], generator=torch.Generator().manual_seed(2))
        kept = x * (x.abs() > product.threshold)
        torch.testing.assert_close(product(x[:1]), kept[:1] @ weight.T, rtol=1e-4, atol=1e-4)
        assert used == once and 0.1 < (kept != 0).float().mean() < 0.9
        torch.testing.assert_close(product(x), kept @ weight.T, rtol=1e-4, atol=1e-4)
        assert used == once
        used.clear()


def test_a_step_lists_inputs_where_they_are_made(made, by_kernels, ids):
    """Norms and gated product list theirs, a launch that of attention's output; two tokens have no list."""
    lm = made("zigzag", thresholds="unified", sparsity=0.5)
    core = Core("tiny", weights.decoder(lm, 64, CPU, torch.float32))
    want = core.tree(0, 0, ids[:1], [-1])
    used = []

    def noted(name, operator):
        return lambda *arguments: used.append(name) or operator(*arguments)

    for number, block in enumerate(core.model.blocks):
        names = ("norm", "product", "norm_list", "product_list")
        core.replace(number, **{name: noted(name, getattr(block, name)) for name in names})
    torch.testing.assert_close(core.tree(0, 0, ids[:1], [-1]), want)
    assert used == ["norm_list", "norm_list", "product_list"] * 2 + ["norm"]
    used.clear()
    core.tree(0, 0, ids[:2], [-1, 0])
    assert used == ["norm", "norm", "product"] * 2 + ["norm"]


def test_a_text_is_prefilled_densely_and_decoded_on_listed_inputs(made, ids, monkeypatch):
    """The same logits as by the dequantized weights, of a dense prefill and of sparse tokens one by one."""
    lm = made("zigzag", thresholds="unified", sparsity=0.5)
    runs = []
    for kernels in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(weights, "runs_q4_k", lambda device, dtype, kernels=kernels: kernels)
            one = Core("tiny", weights.decoder(lm, 64, CPU, torch.float32))
            logits = [one.logits(ids[:HALF])]
            for position in range(HALF, HALF + 2):
                logits.append(one.tree(0, position, ids[position : position + 1], [-1]))
            runs.append(torch.cat(logits))
    torch.testing.assert_close(runs[1], runs[0], rtol=1e-4, atol=2e-4)


# --- shapes -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def shape(monkeypatch):
    monkeypatch.setitem(engines.SHAPES, "tiny", TINY)
    return "shape/tiny"


@pytest.mark.parametrize("recipe", ["q4_k", "q4_k(layout=zigzag)", "q4_k(layout=zigzag) + spqt(sparsity=0.4)"])
def test_a_shape_runs_with_random_planes(shape, by_kernels, recipe):
    engine = Engine.load(shape, recipe, device="cpu", dtype="float32")
    stats = engine.time(4, 3)
    layers = 2 * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 768 * 256)  # of two blocks: attention, then MLP
    others = 2 * 300 * 256 + 5 * 256
    assert stats.new_tokens == 3 and engine.model.stored_bytes == layers * 144 // 256 + 4 * others
    product = engine.model.blocks[0].gate_up
    assert isinstance(product, SparseInputs if "spqt" in recipe else q4_k.Q4K)


def test_thresholds_of_a_shape_skip_the_asked_share(shape, by_kernels):
    engine = Engine.load(shape, "q4_k(layout=zigzag) + spqt(sparsity=0.4)", device="cpu", dtype="float32")
    product = engine.model.blocks[1].qkv
    x = torch.randn(1, 4096, generator=torch.Generator().manual_seed(0))  # a norm's output, of unit variance
    assert 0.35 < (x.abs() <= product.threshold).float().mean() < 0.45


@pytest.mark.parametrize("recipe", ["rtn-w4-g128 + spqt(sparsity=0.5)", "q4_k(layout=zigzag) + qera"])
def test_a_shape_takes_no_other_recipe(shape, recipe):
    with pytest.raises(UserError, match="q4_k with spqt behind it"):
        Engine.load(shape, recipe, device="cpu", dtype="float32")
