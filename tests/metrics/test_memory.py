"""Memory of a paper's own model by arithmetic: equal to what a packed layer counts, shown where a stand-in is, too."""

import pytest
import torch

from repro.methods.bitbybit import branches, splitting
from repro.methods.bitbybit.branches import Rounding
from repro.metrics import memory
from repro.models.groups.columns import paired
from repro.models.groups.quantizer import GroupGrid
from repro.models.groups.weight import pack
from repro.recipes import recipe
from repro.results import measure
from repro.specs import scale, tables
from repro.specs.scale import PublicShape
from repro.workflow.workflow import Workflow


@pytest.mark.parametrize(("columns", "split", "group"), [(64, 0, 32), (64, 7, 32), (96, 10, 16), (128, 32, 64)])
@pytest.mark.parametrize("scale_dtype", ["e4m3", "float16", "float32"])
@pytest.mark.parametrize("levels", ["asymmetric", "seq"])
def test_a_layer_counts_what_is_stored(columns, split, group, scale_dtype, levels):
    grid = GroupGrid(2, group, levels, levels == "asymmetric", scale_dtype)
    weight = torch.randn(8, columns, generator=torch.Generator().manual_seed(1))
    if split:
        twice = torch.zeros(columns, dtype=torch.bool)
        twice[torch.randperm(columns, generator=torch.Generator().manual_seed(2))[:split]] = True
        packed = branches.pack(weight, paired(twice, group), Rounding(grid, "rounding_aware"), "centred")
    else:
        packed = pack(weight, grid)
    assert memory.layer_bits(8, columns, split, grid) == sum(packed.stored_bits().values())


def gigabytes(text, shape=None):
    return memory.Memory().exact(recipe.parse(text).steps, shape or scale.shape("LLaMA-3.2-1B"))


def test_llama_1b_by_hand():
    """973,078,528 weights at 2 bits, 10 bits a group, a factor a layer; other spellings of the model are the same."""
    weights, layers = 16 * (2 * 2048**2 + 2 * 512 * 2048 + 3 * 8192 * 2048), 16 * 7
    assert gigabytes("bitbybit(split=none)") == (weights * (2 + 10 / 32) + 32 * layers) / 8e9 == gigabytes("group_qat")
    assert gigabytes("bitbybit(split=none, g=128, scale=float16)") == weights * (2 + 18 / 128) / 8e9
    assert gigabytes("bitbybit(split=none, any_precision)") > 3.5 * gigabytes("bitbybit(split=none)")
    assert 1.10 < gigabytes("bitbybit") / gigabytes("bitbybit(split=none)") < 1.12
    assert gigabytes("rtn-w4-pc") is None and gigabytes("fp16") is None
    assert scale.shape("Llama-3.2-1B") == scale.shape("LLaMA-3.2-1B") and scale.shape("LLaMA-9") is None


def test_later_blocks_split_more():
    one = PublicShape(layers=1, hidden=64, ffn=128, kv=64, vocab=10)
    two = PublicShape(layers=2, hidden=64, ffn=128, kv=64, vocab=10)
    text = "bitbybit(split_first=0.25, split_last=0.75)"
    parts = [gigabytes(f"bitbybit(split_first={r}, split_last={r})", one) for r in (0.25, 0.75)]
    assert gigabytes(text, two) == pytest.approx(sum(parts)) and parts[0] < parts[1]
    assert splitting.ratio(0, 1, 0.25, 0.75) == 0.5


@pytest.mark.parametrize("name", ["pocket", "pocket", "gpu"])
def test_table_3s_memory_is_grade_d_at_every_scale(name):
    flow = Workflow(scale.load(name=name), stored=True)
    cells = [cell for cell in flow.cells("bitbybit", "3") if cell.metric == "memory_gb"]
    result = [measure.measurement_of(flow, cell) for cell in cells]
    assert len([cell for cell in cells if cell.printed]) == 9
    if not all(cell.recipe for cell in cells):  # recipes wait for the rates that are chosen
        assert {m.status for m in result} == {"not_run"} and not tables.table("bitbybit", "rates").selected
        return
    arithmetic = {m.row: (m.status, m.grade, m.source, m.stand_in, m.unit) for m in result}
    learned = [row for row in arithmetic if "learned steps" in row]  # Block-AP stores other groups; two rows of ours
    assert {arithmetic.pop(row)[0] for row in learned} == {"not_run"} and len(learned) == 2
    assert set(arithmetic.values()) == {("ok", "D", "arithmetic", "", "GB")}
    for cell in cells:
        assert all(jobs == {} for jobs in flow.jobs(cell))
