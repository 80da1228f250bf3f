"""A compressed model on disk: what is read is bit for bit what was written, or an error that says so."""

from dataclasses import fields

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from repro.baselines import gptq, rtn
from repro.errors import UserError
from repro.lowbit import LowBitModel, QuantizedWeight, block_linears, blocks

META = {"recipe": "gptq-w4-g32", "note": "ü"}


def compressed(module=rtn, **options) -> LowBitModel:
    lm = LowBitModel(tiny.model("llama"))
    module.apply(lm, tiny.tokens(), module.Config(**options))
    return lm


def assert_same(one: LowBitModel, other: LowBitModel) -> None:
    assert one.weights.keys() == other.weights.keys() and one.extra_bits == other.extra_bits
    for name, weight in one.weights.items():
        for field in fields(QuantizedWeight):
            a, b = getattr(weight, field.name), getattr(other.weights[name], field.name)
            assert (a.dtype == b.dtype and torch.equal(a, b)) if isinstance(a, torch.Tensor) else a == b, field.name
    for (name, a), b in zip(one.model.state_dict().items(), other.model.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize(
    "module, options",
    [
        (rtn, {"bits": 2, "symmetric": True}),
        (rtn, {"bits": 8, "group": 16, "scale_dtype": "float32"}),
        (gptq, {"group": 32, "act_order": True}),
        (gptq, {"group": 32, "clip": "mse", "static_groups": True}),
    ],
)
def test_round_trip_is_bit_equal(tmp_path, module, options):
    lm, path = compressed(module, **options), tmp_path / "model.safetensors"
    lm.extra_bits = {"compensators": 12}
    lm.save(path, META)
    back = LowBitModel(tiny.model("llama"))
    assert back.load(path) == META
    assert_same(lm, back)
    again = tmp_path / "again.safetensors"
    back.save(again, META)
    assert path.read_bytes() == again.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again.safetensors", "model.safetensors"]


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A path, the bytes of a good file of two small layers, and a model to load it into."""
    linears = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)])})
    lm = LowBitModel(linears)
    rtn.apply(lm, None, rtn.Config(group=4))
    path = tmp_path_factory.mktemp("damaged") / "model.safetensors"
    lm.save(path, META)
    return path, path.read_bytes(), linears


def assert_refused(stored, content: bytes) -> None:
    path, _, model = stored
    path.write_bytes(content)
    before, lm = {name: t.clone() for name, t in model.state_dict().items()}, LowBitModel(model)
    with pytest.raises(UserError, match="model.safetensors"):
        lm.load(path)
    assert not lm.weights and all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_flipped_bit_is_noticed(stored, data):
    content = bytearray(stored[1])
    position = data.draw(st.integers(0, 8 * len(content) - 1))
    content[position // 8] ^= 1 << position % 8
    assert_refused(stored, bytes(content))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_cut_or_lengthened_file_is_noticed(stored, data):
    good = stored[1]
    length = data.draw(st.integers(0, len(good) - 1))
    assert_refused(stored, good[:length])
    assert_refused(stored, good + bytes(1 + length))


def test_the_undamaged_file_loads(stored):
    path, good, model = stored
    path.write_bytes(good)
    assert LowBitModel(model).load(path) == META


def test_files_of_another_kind(tmp_path):
    lm, path = LowBitModel(tiny.model("llama")), tmp_path / "other.safetensors"
    with pytest.raises(UserError, match="other.safetensors"):
        lm.load(path)
    save_file({"weight": torch.zeros(3)}, path)
    with pytest.raises(UserError, match="no compressed model"):
        lm.load(path)
    wide = LowBitModel(torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(8, 4)])}))
    rtn.apply(wide, None, rtn.Config())
    wide.save(path, {})
    with pytest.raises(UserError, match="no compressed model"):
        lm.load(path)
    narrow = LowBitModel(torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(8, 1)])}))
    with pytest.raises(UserError, match=r"layers\.0: \[4, 8\] codes for a layer of \[1, 8\]"):
        narrow.load(path)


def test_a_weight_that_is_not_finite_is_refused():
    lm = LowBitModel(tiny.model("llama"))
    name = "model.layers.0.self_attn.q_proj"
    codes, one = torch.zeros(64, 64, dtype=torch.uint8), torch.ones(64, 1)
    with pytest.raises(UserError, match=f"{name}: .*not finite"):
        lm.set_weight(name, QuantizedWeight(codes, one * torch.inf, one, bits=4))
    assert not lm.weights


def test_shapes_are_checked():
    codes = torch.zeros(4, 6, dtype=torch.uint8)
    with pytest.raises(UserError, match="6 input columns do not divide into groups of 4"):
        QuantizedWeight(codes, torch.ones(4, 1), torch.ones(4, 1), bits=4, group=4)
    with pytest.raises(ValueError, match="scales"):
        QuantizedWeight(codes, torch.ones(4, 1), torch.ones(4, 2), bits=4, group=3)


def test_dequantize_by_hand():
    codes = torch.tensor([[0, 1, 2, 3]], dtype=torch.uint8)
    scales, zeros = torch.tensor([[0.5, 2.0]]), torch.tensor([[1.0, 2.0]])
    q = QuantizedWeight(codes, scales, zeros, bits=2, group=2, zero_bits=2)
    assert q.dequantize().tolist() == [[-0.5, 0.0, 0.0, 2.0]]
    assert q.stored_bits() == {"codes": 8, "scales": 32, "zeros": 4, "indices": 0}
    index = torch.tensor([1, 0, 1, 0], dtype=torch.int32)
    q = QuantizedWeight(codes, scales, zeros, bits=2, group=2, group_index=index)
    assert q.dequantize().tolist() == [[-4.0, 0.0, 0.0, 1.0]]
    assert q.stored_bits()["indices"] == 128


@pytest.mark.parametrize("layout", sorted(tiny.MODELS))
def test_blocks_hold_the_block_linears(layout):
    model = tiny.model(layout)
    named = {
        f"{prefix}.{name}"
        for prefix, block in blocks(model).items()
        for name, module in block.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    assert named == set(block_linears(model)) and len(blocks(model)) == 2
    assert not any("lm_head" in name or "embed" in name for name in named)


def test_a_model_without_blocks():
    with pytest.raises(UserError, match="no transformer blocks"):
        blocks(torch.nn.Linear(2, 2))
