"""Q4_K: bytes as ggml's quantizer makes them, values as its decoder reads them, zigzag, and what a file holds."""

import ctypes
import hashlib
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import q4_k_reference
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from known import W, X, errors, uniform
from safetensors import safe_open

from repro.baselines import aser, loftq, qera, rtn
from repro.baselines import q4_k as step
from repro.core.errors import NotMeasurable, UserError
from repro.methods.spqt import layout, q4_k
from repro.methods.spqt.q4_k_weight import Q4KWeight, pack
from repro.models import bits
from repro.models.activations import statistics
from repro.models.lowbit import LowBitModel, block_linears
from repro.recipes import recipe
from repro.specs import scale
from repro.studies import quantize

IMPORTANCE = X.square().mean(0, dtype=torch.float64).float()
SQUARE = torch.from_numpy(0.1 * ((u := uniform(256, 256, seed=1)) + 4 * u**3)).float()  # W is its first 64 rows
FEW = settings(max_examples=40, deadline=None, derandomize=True)
MANY = settings(max_examples=200, deadline=None, derandomize=True)


def sha256(blocks: torch.Tensor) -> str:
    return hashlib.sha256(blocks.numpy().tobytes()).hexdigest()


# --- known answers ----------------------------------------------------------------------------------------------------


def test_a_known_weight_has_its_known_bytes():
    blocks = q4_k.quantize(W)
    assert blocks.dtype == torch.uint8 and blocks.shape == (64, 144)
    begins = "440b8816f7f8f7f9fbf9fabd96c8ff93 65f7688a71f7cb98"
    assert blocks[0, :24].numpy().tobytes() == bytes.fromhex(begins)
    assert sha256(blocks).startswith("e2711be1438dd72e")
    assert torch.equal(q4_k.quantize(W.view(-1, 512)), blocks.view(-1, 288)), "rows of two super-blocks"


@pytest.mark.parametrize(
    "importance, weight_error, output_error",
    [(None, 9.0508518e-06, 0.0040040586), (IMPORTANCE, 1.0320617e-05, 0.0015386755)],
)
def test_a_known_weight_has_its_known_errors(importance, weight_error, output_error):
    measured = errors(q4_k.dequantize(q4_k.quantize(W, importance), 256))
    assert measured == pytest.approx((weight_error, output_error), rel=1e-6)


def test_a_ramp_zeros_and_the_vector_of_ggmls_own_test():
    ramp = q4_k.quantize(torch.arange(256.0)[None])
    assert ramp[0, :8].numpy().tobytes() == bytes.fromhex("34340000 88D0D8DF")
    for zero in (0.0, -0.0):
        assert not q4_k.quantize(torch.full((2, 256), zero)).any()
    wave = torch.from_numpy(0.1 + 2 * np.cos(np.arange(4096))).float()[None]
    error = (q4_k.dequantize(q4_k.quantize(wave), 4096) - wave).double()
    assert error.square().sum().sqrt().item() / 4096 == pytest.approx(0.00098192, abs=5e-9)


def test_zigzag_known_answer():
    weight = pack({"": SQUARE}, "zigzag")[""]
    assert weight.blocks.numel() == 36864 and sha256(weight.blocks).startswith("aaf29c5f040d0d74")

    def output_error(dequantized):
        return ((SQUARE.double() - dequantized.double()) @ X.double().T).square().mean().item()

    rows = q4_k.dequantize(q4_k.quantize(SQUARE), 256)
    assert output_error(weight.dequantize()) == pytest.approx(0.0038201567, rel=1e-6)
    assert output_error(rows) == pytest.approx(0.0036952888, rel=1e-6)


# --- against ggml, the gguf package, and a slow reference -------------------------------------------------------------

KINDS = {
    "normal": lambda r: r.standard_normal(32),
    "zero": lambda r: np.zeros(32),
    "negative zero": lambda r: -np.zeros(32),
    "constant": lambda r: np.full(32, r.standard_normal()),
    "ramp": lambda r: np.linspace(*r.standard_normal(2), 32),
    "outlier": lambda r: np.where(np.arange(32) == r.integers(32), r.choice([-1e3, 1e3]), 0.01 * r.standard_normal(32)),
    "negative": lambda r: -np.abs(r.standard_normal(32)) - 9,
    "positive": lambda r: np.abs(r.standard_normal(32)) + 9,
    "denormal": lambda r: 1.4e-45 * r.integers(-9, 9, 32),
    "integer": lambda r: r.integers(-8, 8, 32),
    "huge": lambda r: r.choice([-3.4e38, 3.4e38, 0.0, -0.0], 32),
    "sparse": lambda r: r.standard_normal(32) * (r.random(32) < 0.1),
}
IMPORTANCES = {
    "none": lambda r: None,
    "alike": lambda r: np.ones(256),
    "wide": lambda r: 10.0 ** r.uniform(-30, 20, 256),
    "few": lambda r: (r.random(256) < 0.1).astype(float),
    "zeros": lambda r: np.zeros(256),
    "tiny": lambda r: np.full(256, 1e-40),
    "large": lambda r: np.full(256, 1e37),
}


def superblock(r: np.random.Generator, kinds: list[str], size: float) -> np.ndarray:
    """float32 `[256]` of 8 blocks."""
    x = np.concatenate([KINDS[kind](r) * (1 if kind in ("huge", "denormal") else size) for kind in kinds])
    return np.clip(x, -3.4e38, 3.4e38).astype(np.float32)


def adversarial(seed: int) -> np.ndarray:
    """float32 `[B, 256]`: every kind alone, and mixtures of different sizes."""
    r = np.random.default_rng(seed)
    sizes = (1e-43, 1e-38, 1e-12, 0.02, 1.0, 1e6, 1e30)
    alone = [superblock(r, [kind] * 8, size) for kind, size in product(KINDS, sizes)]
    mixed = [superblock(r, list(r.choice(list(KINDS), 8)), 10.0 ** r.uniform(-20, 10)) for _ in range(300)]
    return np.stack(alone + mixed + [0.02 * r.standard_normal(256) for _ in range(700)]).astype(np.float32)


@FEW
@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.sampled_from(sorted(KINDS)), min_size=8, max_size=8),
    st.integers(-45, 38),
    st.sampled_from(sorted(IMPORTANCES)),
)
def test_bytes_are_those_of_a_slow_reference(seed, kinds, power, importance):
    r = np.random.default_rng(seed)
    x, weights = superblock(r, kinds, 10.0**power), IMPORTANCES[importance](r)
    tensor = None if weights is None else torch.from_numpy(weights).float()
    encoded = q4_k.quantize(torch.from_numpy(x)[None], tensor)[0].numpy().tobytes()
    assert encoded == q4_k_reference.quantize(x, weights)


@pytest.mark.parametrize(
    "importance, rows",
    [
        ("alike", [91, 436, 472]),  # codes of scales that move more than once
        ("wide", [89, 165, 175]),
        ("few", [281, 403, 407, 420]),
        ("large", [4, 25, 46, 90, 400]),  # sums that overflow: d is NaN
        ("none", [0, 20, 40, 60, 80, 200]),
    ],
)
def test_bytes_of_hard_super_blocks_are_those_of_the_slow_reference(importance, rows):
    weights, r = adversarial(0), IMPORTANCES[importance](np.random.default_rng(0))
    tensor = None if r is None else torch.from_numpy(r).float()
    for row in rows:
        encoded = q4_k.quantize(torch.from_numpy(weights[row : row + 1]), tensor)[0].numpy().tobytes()
        assert encoded == q4_k_reference.quantize(weights[row], r), row


@pytest.fixture(scope="module")
def ggml():
    """ggml's quantizer of the library inside llama-cpp-python: uint8 `[N, K / 256 * 144]` of float32 `[N, K]`."""
    package = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (an extra, built from source)")
    (path,) = (Path(package.__file__).parent / "lib").glob("libggml-base.so")
    library = ctypes.CDLL(str(path))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t

    def quantize(weight: np.ndarray, importance: np.ndarray | None = None) -> np.ndarray:
        rows, columns = weight.shape
        weight, made = np.ascontiguousarray(weight), np.empty((rows, columns // 256 * 144), np.uint8)
        importance = None if importance is None else np.ascontiguousarray(importance, np.float32)
        pointers = [None if a is None else a.ctypes.data_as(ctypes.c_void_p) for a in (weight, made, importance)]
        numbers = [ctypes.c_int64(n) for n in (0, rows, columns)]
        assert library.ggml_quantize_chunk(12, *pointers[:2], *numbers, pointers[2]) == made.size
        return made

    return quantize


@pytest.mark.parametrize("importance", IMPORTANCES)
@pytest.mark.parametrize("seed", range(3))
def test_bytes_are_ggmls(ggml, seed, importance):
    weight, weights = adversarial(seed), IMPORTANCES[importance](np.random.default_rng(seed))
    tensor = None if weights is None else torch.from_numpy(weights).float()
    encoded, want = q4_k.quantize(torch.from_numpy(weight), tensor).numpy(), ggml(weight, weights)
    assert np.flatnonzero((encoded != want).any(1)).tolist() == []


def test_bytes_are_ggmls_in_rows_of_several_super_blocks_and_on_a_whole_layer(ggml):
    assert hashlib.sha256(ggml(W.numpy()).tobytes()).hexdigest().startswith("e2711be1438dd72e"), "a build without FMA"
    r = np.random.default_rng(7)
    weight, importance = r.standard_normal((768, 1024), np.float32), r.random(1024, np.float32) ** 4
    assert np.array_equal(q4_k.quantize(torch.from_numpy(weight)).numpy(), ggml(weight))
    of_columns = torch.from_numpy(importance)
    assert np.array_equal(q4_k.quantize(torch.from_numpy(weight), of_columns).numpy(), ggml(weight, importance))


def random_bytes(rows: int, columns: int) -> torch.Tensor:
    """Blocks of any bytes, d and dmin infinite or NaN too."""
    return torch.from_numpy(np.random.default_rng(3).integers(0, 256, (rows, columns // 256 * 144), dtype=np.uint8))


def test_values_are_those_of_the_formula():
    blocks = random_bytes(60, 256)
    with np.errstate(all="ignore"):
        want = np.stack([q4_k_reference.dequantize(block.numpy().tobytes()) for block in blocks])
    assert np.array_equal(q4_k.dequantize(blocks, 256).numpy(), want, equal_nan=True)


def test_values_are_bit_for_bit_those_of_the_gguf_package():
    gguf = pytest.importorskip("gguf", reason="gguf is not installed (an extra of the tests)")
    for blocks in (random_bytes(500, 1024), q4_k.quantize(W), q4_k.quantize(torch.from_numpy(adversarial(0)))):
        columns = blocks.shape[1] // 144 * 256
        with np.errstate(all="ignore"):
            want = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType.Q4_K)
        values = q4_k.dequantize(blocks, columns).numpy()
        same = (values.view(np.int32) == want.view(np.int32)) | (np.isnan(values) & np.isnan(want))
        assert values.dtype == want.dtype and same.all()


def test_blocks_do_not_depend_on_the_chunk_that_they_are_in(monkeypatch):
    weight = torch.from_numpy(adversarial(5))[::13]
    for importance in (None, IMPORTANCE):
        whole = q4_k.quantize(weight, importance)
        monkeypatch.setitem(q4_k.CHUNK, "cpu", 7)
        assert torch.equal(q4_k.quantize(weight, importance), whole)
        monkeypatch.undo()
    assert torch.equal(q4_k.quantize(W.double().half()), q4_k.quantize(W.half().float())), "computed in float32"
    assert q4_k.quantize(torch.empty(0, 512)).shape == (0, 288)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("importance", [None, IMPORTANCE])
def test_bytes_on_cuda_are_those_on_the_cpu(importance):
    weight = torch.from_numpy(adversarial(1))
    weight = weight[q4_k.dequantize(q4_k.quantize(weight), 256).isfinite().all(1)]  # bits of a NaN are a device's own
    encoded = q4_k.quantize(weight.cuda(), importance)
    assert encoded.is_cuda and torch.equal(encoded.cpu(), q4_k.quantize(weight, importance))


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns, nearest", [(64, 256), (300, 256), (500, 512), (640, 768), (11009, 11008)])
def test_columns_that_256_does_not_divide(columns, nearest):
    message = f"^{columns} columns do not divide into Q4_K's super-blocks of 256; {nearest} would$"
    with pytest.raises(UserError, match=message):
        q4_k.quantize(torch.zeros(2, columns))
    with pytest.raises(UserError, match=message):
        q4_k.dequantize(torch.zeros(2, 144, dtype=torch.uint8), columns)


def test_other_bad_input():
    with pytest.raises(UserError, match="144 bytes a row; 512 columns of Q4_K take 288"):
        q4_k.dequantize(torch.zeros(2, 144, dtype=torch.uint8), 512)
    with pytest.raises(UserError, match=r"\[255\] importances for 256 input columns"):
        q4_k.quantize(W, IMPORTANCE[1:])
    for bad in (-1.0, float("nan"), float("inf")):
        importance = IMPORTANCE.clone()
        importance[9] = bad
        with pytest.raises(UserError, match="an importance is negative, NaN or Inf"):
            q4_k.quantize(W, importance)
        if bad != -1:
            with pytest.raises(UserError, match="a weight is NaN or Inf"):
                q4_k.quantize(torch.where(W == W.max(), bad, W))


# --- layouts ----------------------------------------------------------------------------------------------------------

shapes = st.tuples(st.integers(1, 4), st.integers(1, 40))


@MANY
@given(shapes, st.data())
def test_zigzag_there_and_back(shape, data):
    bands, columns = shape
    weight = torch.arange(256 * bands * columns, dtype=torch.int32).view(256 * bands, columns)
    zigzag = layout.to_zigzag(weight)
    assert zigzag.is_contiguous() and torch.equal(layout.from_zigzag(zigzag), weight)
    row, column = data.draw(st.integers(0, 256 * bands - 1)), data.draw(st.integers(0, columns - 1))
    address = (row // 256 * columns + column) * 256 + row % 256  # super-block (R, c) at R n + c
    assert zigzag.flatten()[address] == weight[row, column]
    assert torch.equal(layout.to_zigzag(layout.from_zigzag(zigzag)), zigzag)


@MANY
@given(shapes, st.integers(0, 2**32 - 1))
def test_planes_there_and_back(shape, seed):
    blocks = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (*shape, 144), dtype=np.uint8))
    codes, scales = layout.to_planes(blocks)
    assert codes.shape == (*shape, 128) and scales.shape == (*shape, 16)
    assert codes.is_contiguous() and scales.is_contiguous()
    assert torch.equal(layout.from_planes(codes, scales), blocks)
    assert torch.equal(codes, blocks[..., 16:])


@MANY
@given(st.lists(st.integers(1, 600), min_size=1, max_size=4), st.integers(1, 9))
def test_stacks_are_padded_with_zero_rows_and_no_more(heights, columns):
    weights = [torch.randn(rows, columns) for rows in heights]
    tall = layout.stacked(weights)
    assert len(tall) % 256 == 0 and len(tall) - sum(heights) < 256
    assert torch.equal(tall[: sum(heights)], torch.cat(weights)) and not tall[sum(heights) :].any()


def test_what_is_stacked():
    q, k, v, o = ("a.q_proj", 256), ("a.k_proj", 128), ("a.v_proj", 128), ("a.o_proj", 256)
    gate, up, down = ("m.gate_proj", 768), ("m.up_proj", 768), ("m.down_proj", 256)
    pocket = dict([q, k, v, o, gate, up, down])
    assert layout.stacks(pocket) == [
        ("a.q_proj", "a.k_proj", "a.v_proj"),
        *((name,) for name in ("a.o_proj", "m.gate_proj", "m.up_proj", "m.down_proj")),
    ]
    odd = layout.stacks({"a.q_proj": 256, "b.q_proj": 64, "a.k_proj": 256, "m.up_proj": 100, "m.gate_proj": 100})
    assert odd == [("a.q_proj",), ("b.q_proj",), ("a.k_proj",), ("m.gate_proj", "m.up_proj")]
    assert layout.stacks({"q_proj": 1, "v_proj": 2, "k_proj": 1}) == [("q_proj", "k_proj", "v_proj")]


@pytest.mark.parametrize("form", ["zigzag", "zigzag-planes"])
def test_stacked_layers_read_their_own_rows_and_super_blocks_are_those_of_one_column(form):
    parts = {name: torch.randn(rows, 5) for name, rows in (("q", 256), ("k", 100), ("v", 130))}
    packed, tall = pack(parts, form), layout.stacked(parts.values())
    assert sum(map(len, parts.values())) == 486 and len(tall) == 512
    want = torch.stack([q4_k.dequantize(q4_k.quantize(c.view(-1, 256)), 256).flatten() for c in tall.T], 1)
    end = 0
    for name, weight in packed.items():
        start, end = end, end + len(parts[name])
        assert weight.shape == parts[name].shape and torch.equal(weight.dequantize(), want[start:end]), name
    for start, end in ((0, 100), (3, 50), (99, 100)):
        part = packed["k"].rows(start, end)
        assert torch.equal(part.dequantize(), packed["k"].dequantize()[start:end]) and not part.first
        assert sum(part.stored_bits().values()) == 5 * 1152, "one band of five columns"
    whole = packed["q"].rows(0, 256)
    assert whole.stack[0].data_ptr() != packed["q"].stack[0].data_ptr(), "a copy"
    rows = pack({"w": W}, "row")["w"]
    assert torch.equal(rows.rows(3, 9).dequantize(), rows.dequantize()[3:9])


def test_an_importance_of_zigzag_is_the_same_for_all_weights_of_a_super_block():
    blocks = pack({"": SQUARE}, "zigzag", IMPORTANCE)[""].blocks.view(-1, 144)
    columns = SQUARE.T.contiguous()
    assert torch.equal(blocks, q4_k.encode(columns, torch.ones(256, 256)))
    assert not torch.equal(blocks, q4_k.encode(columns))


# --- what is stored ---------------------------------------------------------------------------------------------------


def wide(seed: int = 0, hidden: int = 256, ffn: int = 512) -> torch.nn.Module:
    """A tiny Llama whose columns divide into super-blocks: q and o 256, k and v 128 rows of 256 columns, FFN 512."""
    torch.manual_seed(seed)
    config = tiny.LlamaConfig(**tiny.SHAPE | {"hidden_size": hidden, "intermediate_size": ffn})
    return tiny.LlamaForCausalLM(config).eval()


def quantized(text: str, model=None) -> LowBitModel:
    lm = LowBitModel(model or wide())
    for one in recipe.parse(text).steps:
        one.module.apply(lm, tiny.tokens() if one.calibrated else None, one.config)
    return lm


LAYOUTS = ["q4_k", "q4_k(layout=zigzag)", "q4_k(layout=zigzag-planes)"]


@pytest.mark.parametrize("text", [*LAYOUTS, "q4_k-importance=mean_square"])
def test_stored_bits_are_those_of_the_packed_blocks_and_of_the_file(tmp_path, text):
    lm, path = quantized(text), tmp_path / "model.safetensors"
    layer = lm.weights["model.layers.1.mlp.down_proj"]  # 256 x 512: 512 super-blocks in every layout
    assert layer.stored_bits() == {"codes": 512 * 1024, "scales": 512 * 64, "zeros": 512 * 64}
    packed = [getattr(layer, key) for key in layer.TENSORS if getattr(layer, key) is not None]
    assert 8 * sum(tensor.numpy().nbytes for tensor in packed) == sum(layer.stored_bits().values()) == 512 * 144 * 8
    report = bits.report(lm)
    assert report["bpw"] == 4.5 and report["block_weights"] == 2 * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 256 * 512)
    lm.save(path, {})
    with safe_open(path, "pt") as file:
        assert 8 * sum(file.get_tensor(key).numpy().nbytes for key in file.keys()) == sum(report["block"].values())


@pytest.mark.parametrize("text, hidden", [*((text, 256) for text in LAYOUTS), *((text, 64) for text in LAYOUTS[1:])])
def test_saved_and_loaded_it_gives_the_same_weights_and_bytes(tmp_path, text, hidden):
    lm, path = quantized(text, wide(hidden=hidden)), tmp_path / "model.safetensors"
    lm.save(path, {"recipe": text})
    back = LowBitModel(wide(hidden=hidden))
    assert back.load(path) == {"recipe": text}
    for name in block_linears(lm.model):
        assert isinstance(back.weights[name], Q4KWeight)
        assert torch.equal(lm.model.get_submodule(name).weight, back.model.get_submodule(name).weight), name
    assert bits.report(back) == bits.report(lm)
    again = tmp_path / "again.safetensors"
    back.save(again, {"recipe": text})
    assert path.read_bytes() == again.read_bytes()


def test_padding_is_counted():
    lm = quantized("q4_k(layout=zigzag)", tiny.model("llama"))  # 64 wide: 512 rows a block, stacked to 5 bands
    bands = {"q_proj": 1, "k_proj": 0, "v_proj": 0, "o_proj": 1, "gate_proj": 1, "up_proj": 0, "down_proj": 1}
    for name, weight in lm.weights.items():
        stored = bands[name.rpartition(".")[2]] * weight.shape[1] * 1152
        assert sum(weight.stored_bits().values()) == stored, name
    assert bits.report(lm)["bits"] - bits.report(lm)["other"] == 2 * (3 * 64 + 128) * 1152


# --- the step ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", sorted(tiny.MODELS))
def test_every_block_linear_changes_and_nothing_else(form):
    lm = LowBitModel(tiny.model(form))
    before = {name: tensor.clone() for name, tensor in lm.model.state_dict().items()}
    step.apply(lm, None, step.Config(layout="zigzag"))
    changed = {name for name, tensor in lm.model.state_dict().items() if not torch.equal(before[name], tensor)}
    assert changed == {f"{name}.weight" for name in block_linears(lm.model)}
    for name, weight in lm.weights.items():
        assert torch.equal(lm.model.get_submodule(name).weight, weight.dequantize())
        assert (weight.dequantize() - before[f"{name}.weight"]).abs().max() < 0.1
    full = lm.full_precision().state_dict()
    assert all(torch.equal(tensor, full[name]) for name, tensor in before.items())


def test_importances_are_mean_squares_of_the_inputs():
    lm = quantized("q4_k(importance=mean_square)")
    result = statistics(wide(), list(block_linears(wide())), tiny.tokens())
    for name, linear in block_linears(wide()).items():
        importance = result[name].mean_square.mean(0).float()
        assert torch.equal(lm.weights[name].blocks, q4_k.quantize(linear.weight.data, importance)), name


@pytest.mark.parametrize("calibration", [None, torch.empty(0, 16, dtype=torch.int64)])
def test_importances_need_tokens_in_rows_only(calibration):
    with pytest.raises(UserError, match="q4_k with importance=mean_square needs calibration tokens"):
        step.apply(LowBitModel(wide()), calibration, step.Config(importance="mean_square"))
    step.apply(LowBitModel(wide()), calibration, step.Config(importance="mean_square", layout="zigzag"))


@pytest.mark.parametrize(
    "text, name, calibrated",
    [
        ("q4_k", "q4_k", False),
        ("q4_k(layout=zigzag)", "q4_k-layout=zigzag", False),
        ("q4_k(layout=zigzag-planes)", "q4_k(layout=zigzag-planes)", False),
        ("q4_k-importance=mean_square", "q4_k-importance=mean_square", True),
        ("q4_k(layout=zigzag, importance=mean_square)", "q4_k-layout=zigzag-importance=mean_square", False),
    ],
)
def test_names_of_the_recipe_and_whether_it_is_calibrated(text, name, calibrated):
    parsed = recipe.parse(text)
    assert parsed.name == name and parsed.calibrated == parsed.seeded == calibrated
    assert recipe.parse(parsed.name) == parsed


def test_a_recipe_that_the_step_refuses():
    for text, message in {
        "q4_k(layout=column)": "layout: unknown value 'column'; choose from: row, zigzag, zigzag-planes",
        "q4_k-w4": "q4_k has no option 'w4'; options: importance, layout",
    }.items():
        with pytest.raises(UserError, match=message):
            recipe.parse(text)
    with pytest.raises(UserError, match=r"layers\.0\.self_attn\.q_proj: 64 columns do not divide .*; 256 would$"):
        quantized("q4_k", tiny.model("llama"))


@pytest.mark.parametrize("text", ["q4_k", "q4_k-layout=zigzag"])
@pytest.mark.parametrize("damage", [float("nan"), float("inf")])
def test_a_damaged_layer_is_named(text, damage):
    model = wide()
    model.model.layers[1].self_attn.k_proj.weight.data[3, 5] = damage  # in zigzag stacked below q_proj
    with pytest.raises(UserError, match=r"^model\.layers\.1\.self_attn\.k_proj: .*NaN or Inf"):
        quantized(text, model)


def test_a_weight_too_large_for_half_precision_factors_is_refused():
    model = wide()
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = 1e30
    with pytest.raises(UserError, match=r"^model\.layers\.1\.mlp\.up_proj: the quantized weight is not finite"):
        quantized("q4_k", model)


@pytest.mark.parametrize("text", [*LAYOUTS[:2], pytest.param(LAYOUTS[2], marks=pytest.mark.slow)])
def test_compensators_that_need_no_grid_run_behind_it_and_others_say_so(text):
    ids, lm = tiny.tokens(16, 48), quantized(text)  # more tokens than the 512 channels of down_proj
    with torch.no_grad():
        full, before = wide()(ids).logits, lm.model(ids).logits
        qera.apply(lm, ids, qera.Config(rank=8))
        assert (lm.model(ids).logits - full).norm() < (before - full).norm()
    for module, options in ((loftq, {"iterations": 2}), (aser, {})):
        with pytest.raises(
            NotMeasurable, match=r"q_proj: .* would undo any quantizer but rtn; put rtn before it, or give"
        ):
            module.apply(quantized(text), ids, module.Config(rank=2, **options))


def test_a_later_quantizer_replaces_it(tmp_path):
    lm = quantized("q4_k(layout=zigzag)")
    rtn.apply(lm, None, rtn.Config())
    lm.save(tmp_path / "model", {})
    back = LowBitModel(wide())
    back.load(tmp_path / "model")
    assert not any(isinstance(weight, Q4KWeight) for weight in back.weights.values())


# --- the time of a large model ----------------------------------------------------------------------------------------


def test_one_block_is_timed_and_the_whole_extrapolated(monkeypatch, capsys):
    monkeypatch.setattr(
        quantize.scale, "shape", lambda name: scale.PublicShape(layers=5, hidden=256, ffn=512, kv=128, vocab=96)
    )
    seen = []
    monkeypatch.setattr(quantize, "pack", lambda weights, layout: seen.append((layout, tuple(weights[""].shape))))
    clock = iter(range(1000))
    monkeypatch.setattr(quantize.time, "perf_counter", lambda: next(clock))
    assert quantize.main(["--device", "cpu", "--repeats", "2"]) == 0
    block = [(256, 256), (128, 256), (128, 256), (256, 256), (512, 256), (512, 256), (256, 512)]
    turns = [block[0], *block, *block]
    assert seen == list(product(("row", "zigzag"), turns))
    one = "Llama-2-70B q4_k {} on one CPU core: one block of 589,824 weights 7.00 s (7.00 to 7.00)"
    whole = "    5 blocks, extrapolated (grade D): 35 s"  # the clock ticks once a matrix: seven seconds
    assert capsys.readouterr().out.splitlines() == [one.format("row"), whole, one.format("zigzag"), whole]


def test_the_shapes_of_a_70b_block():
    shapes, blocks = quantize.block_shapes("Llama-2-70B")
    square, narrow, wide = (8192, 8192), (1024, 8192), (28672, 8192)
    assert shapes == [square, narrow, narrow, square, wide, wide, wide[::-1]] and blocks == 80


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model", "Llama-2-70"], "unknown shape 'Llama-2-70'"),
        (["--repeats", "0", "--device", "cpu"], "repeats is 0; it must be 1 or more"),
    ],
)
def test_arguments_of_the_timing_that_mean_nothing_are_refused(arguments, message, capsys):
    assert quantize.main(arguments) == 2
    assert message in capsys.readouterr().err
