"""A compressed model on disk: what is read is bit for bit what was written, or an error that says so."""

import copy
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from repro.baselines import BASELINES, gptq, rtn
from repro.core.errors import UserError
from repro.methods import METHODS
from repro.models import attachments, bits, lowbit
from repro.models.attachments import Attachment, SummedLinear
from repro.models.lowbit import LowBitModel, block_linears, blocks
from repro.models.quantized import QuantizedWeight
from repro.recipes import recipe

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
    with pytest.raises(UserError, match="not a compressed model"):
        lm.load(path)
    wide = LowBitModel(torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(8, 4)])}))
    rtn.apply(wide, None, rtn.Config())
    wide.save(path, {})
    with pytest.raises(UserError, match="not a compressed model"):
        lm.load(path)
    narrow = LowBitModel(torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(8, 1)])}))
    with pytest.raises(UserError, match=r"layers\.0: \[4, 8\] codes for a layer of \[1, 8\]"):
        narrow.load(path)


@dataclass(frozen=True)
class Signs:
    """Signs of a tall weight times 0.01; only the first of the layers that share it stores the tall one."""

    FORMAT = "signs"
    TENSORS = ("signs",)
    NUMBERS = ("start", "end", "first")

    tall: torch.Tensor
    start: int
    end: int
    first: str = ""

    @property
    def shape(self) -> torch.Size:
        return self.tall[self.start : self.end].shape

    @property
    def signs(self) -> torch.Tensor | None:
        return None if self.first else self.tall

    def dequantize(self) -> torch.Tensor:
        return 0.01 * self.tall[self.start : self.end].float()

    def stored_bits(self) -> dict[str, int]:
        return {"codes": self.shape.numel()}

    @classmethod
    def restored(cls, tensors, numbers, earlier):
        return cls(earlier[numbers["first"]].tall if numbers["first"] else tensors["signs"], **numbers)


def test_a_format_of_another_kind_is_stored_under_its_name(tmp_path, monkeypatch):
    first, second = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"
    monkeypatch.setitem(lowbit.FORMATS, "signs", Signs)
    lm, path = LowBitModel(tiny.model("llama")), tmp_path / "signs.safetensors"
    tall = torch.cat([lm.model.get_submodule(name).weight.data.sign().to(torch.int8) for name in (first, second)])
    rows = len(tall) // 2
    rtn.apply(lm, None, rtn.Config())
    lm.set_weight(first, Signs(tall, 0, rows))
    lm.set_weight(second, Signs(tall, rows, 2 * rows, first))
    lm.save(path, META)
    back = LowBitModel(tiny.model("llama"))
    assert back.load(path) == META
    for name in block_linears(lm.model):
        assert torch.equal(lm.model.get_submodule(name).weight, back.model.get_submodule(name).weight), name
    assert back.weights[second].tall is back.weights[first].tall
    assert bits.report(back)["block"]["codes"] == bits.report(lm)["block"]["codes"]
    assert isinstance(back.weights["model.layers.0.self_attn.k_proj"], QuantizedWeight)
    monkeypatch.delitem(lowbit.FORMATS, "signs")
    with pytest.raises(UserError, match="signs.safetensors: not a compressed model that this version reads"):
        LowBitModel(tiny.model("llama")).load(path)


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
    named = set()
    for prefix, block in blocks(model).items():
        linears = [name for name, module in block.named_modules() if isinstance(module, torch.nn.Linear)]
        named |= {f"{prefix}.{name}" for name in linears}
    assert named == set(block_linears(model)) and len(blocks(model)) == 2
    assert not any("lm_head" in name or "embed" in name for name in named)


def test_a_model_without_blocks():
    with pytest.raises(UserError, match="no transformer blocks"):
        blocks(torch.nn.Linear(2, 2))


# --- attachments ------------------------------------------------------------------------------------------------------

NAME = "model.layers.1.mlp.up_proj"


class Shift(torch.nn.Module):
    """Adds a constant, whatever the input."""

    def __init__(self, by):
        super().__init__()
        self.register_buffer("by", by)

    def forward(self, x):
        return self.by.expand(*x.shape[:-1], -1)


class Doubled(torch.nn.Linear):
    """The layer's output times a factor: its place in the order shows."""

    def __init__(self, linear, factor):
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias, self.linear, self.factor = linear.weight, linear.bias, linear, factor

    def forward(self, x):
        return self.factor * self.linear(x)


@pytest.fixture
def steps(monkeypatch):
    """Two steps that attach something: `shift`, a baseline, and `double`, a method."""
    for registry, name, kind, attached in (
        (BASELINES, "shift", "bias", lambda linear, tensors, numbers: SummedLinear(linear, Shift(tensors["by"]))),
        (METHODS, "double", "scale", lambda linear, tensors, numbers: Doubled(linear, numbers["factor"])),
        (METHODS, "other_shift", "bias", lambda linear, tensors, numbers: SummedLinear(linear, Shift(tensors["by"]))),
        (BASELINES, "unnamed", None, lambda linear, tensors, numbers: linear),
    ):
        module = ModuleType(name)
        module.attached = attached
        if kind:
            module.KIND = kind
        monkeypatch.setitem(registry, name, module)


def shift(step="shift", seed=0):
    return Attachment(step, {"by": torch.randn(128, generator=torch.Generator().manual_seed(seed))}, {})


DOUBLE = Attachment("double", {}, {"factor": 2.0})


def spear_on(lm, name=NAME, seed=0):
    """A compensator as spear stores it."""
    generator = torch.Generator().manual_seed(seed)
    out, into = lm.weights[name].shape
    tensors = {
        "A": torch.randint(-9, 9, (2, into), generator=generator, dtype=torch.int8),
        "A_scale": torch.full((2,), 0.01),
        "B": torch.randint(-9, 9, (out, 2), generator=generator, dtype=torch.int8),
        "B_scale": torch.full((2,), 0.01),
    }
    return Attachment("spear", tensors, {"alpha": 1.0})


@pytest.mark.parametrize("order", [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]])
def test_attachments_of_different_kinds_stack_in_order_and_survive_the_disk(tmp_path, steps, order):
    lm, path = compressed(bits=3), tmp_path / "model.safetensors"
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    chosen = [[shift(), DOUBLE, spear_on(lm)][i] for i in order]
    y = want = lm.model.get_submodule(NAME)(x)
    correction = METHODS["spear"].attached(
        torch.nn.Linear(64, 128, bias=False), chosen[order.index(2)].tensors, {"alpha": 1.0}
    )
    for attachment in chosen:
        step = attachment.step
        want = 2 * want if step == "double" else want + (shift().tensors["by"] if step == "shift" else correction.ec(x))
        lm.attach(NAME, attachment)
        y = lm.model.get_submodule(NAME)(x)
        torch.testing.assert_close(y, want)
    assert [a.step for a in lm.attachments[NAME]] == [a.step for a in chosen]
    assert lm.extra_bits == {"shift": 128 * 32, "double": 0, "spear": 8 * 2 * (64 + 128) + 4 * 32}
    lm.attach("model.layers.0.mlp.up_proj", DOUBLE)
    lm.save(path, META)
    back = LowBitModel(tiny.model("llama"))
    assert back.load(path) == META
    assert torch.equal(back.model.get_submodule(NAME)(x), y) and back.extra_bits == lm.extra_bits
    assert back.attachments.keys() == {NAME, "model.layers.0.mlp.up_proj"}
    assert [attachment.step for attachment in back.attachments[NAME]] == [attachment.step for attachment in chosen]
    assert [attachment.step for attachment in back.attachments["model.layers.0.mlp.up_proj"]] == ["double"]
    assert_same(lm, back)
    back.save(tmp_path / "again.safetensors", META)
    assert path.read_bytes() == (tmp_path / "again.safetensors").read_bytes()


def test_two_of_one_kind_are_refused_and_change_nothing(steps):
    lm = compressed(bits=3)
    lm.attach(NAME, spear_on(lm))
    lm.attach(NAME, shift())
    before, layer = copy.deepcopy(lm.extra_bits), lm.model.get_submodule(NAME)
    with pytest.raises(UserError, match=rf"^{NAME}: a second compensator is refused \(spear after spear\); [^;]*$"):
        lm.attach(NAME, spear_on(lm, seed=1))
    with pytest.raises(UserError, match=rf"^{NAME}: a second bias is refused \(other_shift after shift\)"):
        lm.attach(NAME, shift("other_shift"))
    assert lm.model.get_submodule(NAME) is layer and lm.extra_bits == before and len(lm.attachments[NAME]) == 2
    lm.attach("model.layers.0.mlp.up_proj", spear_on(lm))
    lm.attach("model.layers.0.mlp.up_proj", shift("other_shift"))


def test_a_step_without_a_kind_is_a_kind_of_its_own(steps):
    lm = compressed()
    lm.attach(NAME, Attachment("unnamed", {}, {}))
    lm.attach(NAME, shift())
    with pytest.raises(UserError, match="a second unnamed is refused"):
        lm.attach(NAME, Attachment("unnamed", {}, {}))


@pytest.mark.parametrize("step", ["nosuch", "rtn"])
def test_a_step_that_attaches_nothing(step):
    lm = compressed()
    with pytest.raises(UserError, match=f"{NAME}: no method '{step}' or baseline of that name attaches anything"):
        lm.attach(NAME, Attachment(step, {}, {}))
    assert not lm.attachments and not lm.extra_bits


def test_a_file_of_a_step_that_is_gone(tmp_path, steps, monkeypatch):
    lm = compressed()
    lm.attach(NAME, shift())
    lm.save(tmp_path / "model", {})
    monkeypatch.delitem(BASELINES, "shift")
    with pytest.raises(UserError, match=f"model: {NAME}: no method 'shift'"):
        LowBitModel(tiny.model("llama")).load(tmp_path / "model")


def test_full_precision_is_refused_behind_an_attachment(steps):
    lm = compressed()
    assert torch.equal(lm.full_precision().get_submodule(NAME).weight, tiny.model("llama").get_submodule(NAME).weight)
    lm.attach(NAME, shift())
    with pytest.raises(UserError, match="right after the quantizing step"):
        lm.full_precision()


def test_every_step_of_the_registry_is_known_to_attach(steps):
    """`lowbit` knows the registries without importing them, so a step of any folder can attach."""
    assert {"shift", "double"} <= set(recipe.STEPS)
    for module in (lowbit, attachments):
        source = Path(module.__file__).read_text(encoding="utf-8")
        assert "repro.methods" not in source and "repro.baselines" not in source
