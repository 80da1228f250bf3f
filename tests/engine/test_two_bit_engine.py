"""Bit-by-Bit's models in the engine by the kernels' operators, whose references run on a CPU, against the harness."""

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

pytest.importorskip("triton")

from repro.core.errors import UserError  # noqa: E402
from repro.engine import two_bit, weights  # noqa: E402
from repro.engine.core import Core  # noqa: E402
from repro.engine.step import Cache, run_of, step  # noqa: E402
from repro.engine.weights import LAYERS, Dense, Joined, Packed  # noqa: E402
from repro.kernels import quantize_2bit  # noqa: E402
from repro.kernels import w2a2_format as form  # noqa: E402
from repro.methods import bitbybit  # noqa: E402
from repro.methods.bitbybit import sliced  # noqa: E402
from repro.models.groups import inputs, quantizer  # noqa: E402
from repro.models.lowbit import LowBitModel  # noqa: E402

CPU = torch.device("cpu")
TINY = dict(
    model_type="llama", hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, vocab_size=300, max_position_embeddings=128, initializer_range=0.12,
)  # fmt: skip
ROUNDED = {
    "bits": 2,
    "act_bits": 2,
    "schedule": ["w2a2"],
    "epochs": 0,
    "tokens": 256,
    "compute": "float32",
    "streams": "float32",
}
KINDS = {
    "plain": {"split": "none"},
    "split": {},
    "down at 4 bits": {"kurtosis": 0.0},
    "trained": {"epochs": 1, "lr": 1e-3},
}


@pytest.fixture(scope="module")
def ids():
    return torch.randint(300, (256,), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def made(ids):
    """A random model under settings of Bit-by-Bit, once."""
    kept = {}

    def of(**changes):
        if (key := str(changes)) not in kept:
            torch.manual_seed(0)
            lm = LowBitModel(LlamaForCausalLM(LlamaConfig(**TINY)).eval())
            bitbybit.apply(lm, ids.view(8, 32), bitbybit.Config(**ROUNDED | changes))
            kept[key] = lm
        return kept[key]

    return of


@pytest.fixture
def by_kernels(monkeypatch):
    """The engine takes its path of a GPU, on which operators run their references here."""
    monkeypatch.setattr(two_bit, "runs_kernels", lambda device, dtype: True)
    in_float32 = lambda x, packed: x @ weights.packing.dequantize(packed).T  # noqa: E731  its operator takes 16 bits
    monkeypatch.setattr(weights.kernel, "wna16", in_float32)


def every_product(model):
    """Every single product of a decoder, by block and name."""
    products = []
    for number, block in enumerate(model.blocks):
        for name in LAYERS:
            product = getattr(block, name)
            products += [(number, name, one) for one in (product if isinstance(product, Joined) else [product])]
    return products


def nll(logits, ids):
    return F.cross_entropy(logits[:-1].double(), ids[1:]).item()


@torch.inference_mode()
def decoded(model, ids, at_once):
    """Logits of tokens that are decoded so many at a time, by the kernels where that is at most four."""
    cache, logits = Cache(model, 1), []
    for start in range(0, len(ids), at_once):
        logits.append(model.head(step(model, cache, run_of(ids[start : start + at_once].to(model.device), 0, start))))
    return torch.cat(logits)


@pytest.mark.parametrize("kind", KINDS)
def test_perplexity_is_that_of_the_harness(made, by_kernels, ids, kind):
    """Decoded by the kernels, one and three tokens at a time, and prefilled on the dequantized weight."""
    lm = made(**KINDS[kind])
    model, some = weights.decoder(lm, 64, CPU, torch.float32), ids[:48]
    kinds = {type(one) for _, _, one in every_product(model)}
    assert two_bit.W2A2 in kinds and Dense not in kinds
    with torch.no_grad():
        wanted = nll(lm.model(some[None]).logits[0], some)
    engine = Core("tiny", model)
    engine.tokenizer = None
    for logits in (decoded(model, some, 1), decoded(model, some, 3), engine.logits(some)):
        # Scales of packed weights are rounded to 16 bits, which moves a few codes of the inputs behind them.
        within = 1e-2 if kind == "down at 4 bits" else 1e-3  # 0.1 % of perplexity
        assert nll(logits, some) == pytest.approx(wanted, abs=within)


@pytest.mark.parametrize("split", ["none", "rounding_aware"])
def test_codes_of_weights_and_inputs_are_the_harness_s_on_one_block(made, by_kernels, ids, split):
    lm = made(split=split) if split == "none" else made()
    model = weights.decoder(lm, 64, CPU, torch.float32)
    block = {name: getattr(model.blocks[1], name) for name in LAYERS}
    for name, layers in LAYERS.items():
        products = list(block[name]) if isinstance(block[name], Joined) else [block[name]]
        assert len(products) == (1 if split == "none" else len(layers)), "split channels are each layer's own"
        stored = [lm.weights[f"model.layers.1.{layer}"] for layer in layers]
        codes = [form.unpack(product.units, product.outputs, product.groups)[0] for product in products]
        if split == "none":
            assert torch.equal(codes[0], torch.cat([weight.codes for weight in stored]))
        else:
            assert all(torch.equal(c, weight.codes) for c, weight in zip(codes, stored, strict=True))
        layer = lm.model.get_submodule(f"model.layers.1.{layers[0]}")
        x = torch.randn(3, layer.in_features, generator=torch.Generator().manual_seed(1))
        wide = x if layer.columns is None else layer.columns.gather(x)
        groups = quantizer.split(wide, 32)
        s, _, z = quantizer.fit(groups, layer.grid)
        packed_codes, scales, zeros = quantize_2bit.quantize_2bit(wide)
        want = quantizer.encode(groups, s, z, layer.grid).flatten(1).to(torch.uint8)
        assert torch.equal(form.codes_of(packed_codes), want)
        assert torch.equal(zeros, z[..., 0].int()) and torch.equal(scales, s[..., 0])
        assert torch.equal(products[0].taken(x), inputs.quantized(x, layer.grid, layer.columns))


def test_layers_that_share_an_input_are_one_launch_with_factors_of_their_own(made, by_kernels):
    lm = made(split="none")
    qkv = weights.decoder(lm, 64, CPU, torch.float32).blocks[0].qkv
    assert isinstance(qkv, two_bit.W2A2) and qkv.outputs == 128 + 64 + 64 and qkv.index is None
    assert len(qkv.factors.unique()) == 3 and not any(name == "weight" for name, _ in qkv.named_buffers())


def test_split_layers_that_share_an_input_are_one_launch(made, by_kernels, monkeypatch):
    """Each with its columns, factors and rows of one weight, which is not stored twice."""
    block = weights.decoder(made(), 64, CPU, torch.float32).blocks[0]
    qkv, x = block.qkv, torch.randn(3, 128, generator=torch.Generator().manual_seed(1))
    assert isinstance(qkv, weights.JoinedColumns) and isinstance(block.gate_up, weights.JoinedColumns)

    def launch(x, units, factors, index, layers):
        parts = units.split([rows // 8 for rows in layers]), factors.split(layers), index.chunk(len(layers))
        return torch.cat([two_bit.w2a2_gemv.reference(x, *part) for part in zip(*parts)], 1)

    monkeypatch.setattr(two_bit.w2a2_gemv, "launch", launch)
    wanted = torch.cat([product(x) for product in qkv], 1)
    assert torch.equal(qkv.together(x), wanted) and torch.equal(qkv(x), wanted)
    assert qkv.units.nbytes == sum(product.units.nbytes for product in qkv)
    assert {product.units.untyped_storage().data_ptr() for product in qkv} == {qkv.units.untyped_storage().data_ptr()}
    assert qkv.expanded(4, torch.float32) is qkv and not isinstance(qkv.expanded(5, x.dtype), weights.JoinedColumns)


def test_layers_of_other_widths_or_beyond_three_stay_apart(made, by_kernels):
    block = weights.decoder(made(), 64, CPU, torch.float32).blocks[0]
    q, k, v = block.qkv
    assert two_bit.can_join([q, k, v]) and not two_bit.can_join([q, k, v, q])
    assert not two_bit.can_join([q, block.down]), "other groups"
    plain = weights.decoder(made(split="none"), 64, CPU, torch.float32).blocks[0]
    assert not two_bit.can_join([plain.out, plain.out]), "one list of columns for both, if any"


@pytest.mark.parametrize("levels", ["asymmetric", "seq"])
def test_real_zeros_run_as_well(made, by_kernels, ids, levels):
    """SEQ's half steps, and a group whose range is far from 0 (weights alone; inputs always include it)."""
    lm = made(split="none", levels=levels, include_zero=True if levels == "seq" else None)
    product = weights.decoder(lm, 64, CPU, torch.float32).blocks[0].down
    assert product.units.shape[2] == (form.REAL_UNIT if levels == "seq" else form.UNIT)
    x = torch.randn(2, 192, generator=torch.Generator().manual_seed(2))
    layer = lm.model.get_submodule("model.layers.0.mlp.down_proj")
    torch.testing.assert_close(product(x), layer(x), rtol=1e-4, atol=1e-4)


def test_a_master_that_is_read_at_2_bits_has_packed_weights_and_16_bit_inputs(made, by_kernels, ids):
    """Its zero points are no whole numbers: (z - 31.5) / 64."""
    lm = made(split="none", act_bits=16, any_precision=True, schedule=["w8a16", "w2a16"])
    read = LowBitModel(lm.model, dict(lm.weights))
    sliced.apply(read, None, sliced.Config(bits=2))
    product = weights.product(read, ["model.layers.0.mlp.down_proj"], CPU, torch.float32)
    assert isinstance(product, Packed) and not product.packed.symmetric
    weight = weights.packing.dequantize(product.packed)
    torch.testing.assert_close(weight, read.weights["model.layers.0.mlp.down_proj"].dequantize(), rtol=2e-3, atol=1e-5)


def test_split_channels_of_16_bit_inputs_are_gathered(made, by_kernels):
    lm = made(act_bits=16, schedule=["w2a16"])
    name = "model.layers.0.self_attn.o_proj"
    product, layer = weights.product(lm, [name], CPU, torch.float32), lm.model.get_submodule(name)
    assert isinstance(product, two_bit.Wide)
    x = torch.randn(2, 128, generator=torch.Generator().manual_seed(2))
    weight = weights.packing.dequantize(product.product.packed)
    torch.testing.assert_close(F.pad(x, (0, 1))[:, product.index] @ weight.T, layer(x), rtol=5e-3, atol=5e-3)


def test_inputs_whose_zeros_are_no_codes_are_refused_by_name(made, by_kernels):
    lm = made(split="none", include_zero=False)
    with pytest.raises(
        UserError, match="^model.layers.0.self_attn.q_proj: zero points of its 2-bit inputs are no codes"
    ):
        weights.decoder(lm, 64, CPU, torch.float32)


def test_without_kernels_inputs_are_quantized_and_the_library_multiplies(made, ids):
    lm = made()
    model, some = weights.decoder(lm, 64, CPU, torch.float32), ids[:32]
    assert {type(one) for _, _, one in every_product(model)} == {two_bit.OnQuantized}
    with torch.no_grad():
        wanted = lm.model(some[None]).logits[0]
    torch.testing.assert_close(decoded(model, some, 5), wanted, rtol=1e-3, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["plain", "split", "trained"])
def test_perplexity_on_a_gpu_is_that_of_the_harness(made, by_kernels, ids, kind):
    """By the kernels, token by token; in float32, since rounding to 16 bits moves codes of a random model."""
    lm = made(**KINDS[kind])
    model, some = weights.decoder(lm, 64, torch.device("cuda"), torch.float32), ids[:48]
    assert {type(one) for _, _, one in every_product(model)} == {two_bit.W2A2}
    with torch.no_grad():
        wanted = nll(lm.model(some[None]).logits[0], some)
    assert nll(decoded(model, some, 1).float().cpu(), some) == pytest.approx(wanted, abs=1e-3)
