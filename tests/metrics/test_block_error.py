"""Error of blocks: a slow reference on four layouts, errors that add up or stay alone, halves, bad input."""

import numpy as np
import pytest
import tiny
import torch

from repro.baselines import rtn
from repro.core.errors import UserError
from repro.jobs.target import Target
from repro.metrics import block_error
from repro.models.lowbit import LowBitModel, blocks
from repro.specs import scale as scales
from repro.store.observations import Observations, Series


def quantized(name: str, **grid):
    lm = LowBitModel(tiny.model(name))
    rtn.apply(lm, None, rtn.Config(**({"bits": 3, "group": 16} | grid)))
    return lm.model


def outputs(model, ids, start=None):
    """Hidden states after every block of one window, and the inputs of each; slow: a forward pass a block."""
    result = []
    for index in range(len(blocks(model))):
        block, kept = list(blocks(model).values())[index], {}

        def keep(_, args, out, kept=kept):
            kept["in"], kept["out"] = args[0], out[0] if isinstance(out, tuple) else out

        def replaced(_, args, index=index):
            return (start[index], *args[1:]) if start else None

        hooks = [block.register_forward_pre_hook(replaced), block.register_forward_hook(keep)]
        with torch.no_grad():
            model.base_model(ids[None], use_cache=False)
        for hook in hooks:
            hook.remove()
        result.append((kept["in"], kept["out"]))
    return result


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("name", tiny.MODELS)
def test_errors_are_those_of_a_slow_reference(name, alone):
    full, other, ids = tiny.model(name), quantized(name), tiny.tokens(2, 12)
    result = block_error.errors(full, other, ids, alone)
    assert result.shape == (2, 2)
    for row, window in enumerate(ids):
        want = outputs(full, window)
        of_other = outputs(other, window, [x for x, _ in want] if alone else None)
        for block, ((_, y), (_, z)) in enumerate(zip(want, of_other)):
            expected = ((y - z).double().square().sum() / y.double().square().sum()).item()
            assert result[row, block] == pytest.approx(expected, rel=1e-4) and expected > 1e-6
    if alone:
        assert not np.allclose(result[:, 1], block_error.errors(full, other, ids, False)[:, 1]), "inputs differ"


def test_the_first_block_has_the_same_inputs_and_hooks_are_gone():
    full, other, ids = tiny.model("llama"), quantized("llama"), tiny.tokens(3, 12)
    both = [block_error.errors(full, other, ids, alone) for alone in (False, True)]
    assert np.array_equal(both[0][:, 0], both[1][:, 0])
    for model in (full, other):
        for block in blocks(model).values():
            assert not block._forward_hooks and not block._forward_pre_hooks
    assert np.array_equal(block_error.errors(full, tiny.model("llama"), ids, False), np.zeros((3, 2)))


def shown(params: block_error.BlockError, values) -> float | np.ndarray:
    values = np.asarray(values, float)
    series = {"quantized/blocks": Series(values.mean(0), "layers")}
    series |= {f"quantized/{n}": Series(one, "windows", "g") for n, one in enumerate(values.T)}
    series |= {name.replace("quantized", "full"): Series(one.values * 10, one.axis) for name, one in series.items()}
    result = params.series({"errors": Observations(series, {})}, None)
    return params.value({name: one.values.mean() for name, one in result.items()})


@pytest.mark.parametrize(
    ("values", "mean", "later"),
    [
        ([[1, 3], [1, 5]], 2.5, 4.0),
        ([[1, 99, 3]], 103 / 3, 3.0),  # the middle one is in no half
        ([[1, 3, 4, 4, 5]], 3.4, 2.25),
        ([[7.0]], 7.0, 7.0),  # a single block has no halves
    ],
)
def test_means_and_halves(values, mean, later):
    assert shown(block_error.BlockError(), values) == pytest.approx(mean)
    assert shown(block_error.BlockError(show="later"), values) == pytest.approx(later)
    assert shown(block_error.BlockError(inputs="full"), values) == pytest.approx(10 * mean)


def test_a_figure_gets_the_blocks_in_order():
    series = {
        "quantized/blocks": Series(np.asarray([3.0, 1.0]), "layers"),
        "quantized/0": Series(np.ones(2), "windows"),
    }
    (only,) = block_error.BlockError(show="blocks").series({"errors": Observations(series, {})}, None).values()
    assert only.values.tolist() == [3.0, 1.0]


def test_one_job_for_all_that_is_shown_and_none_without_windows():
    at = Target(scales.load(name="pocket"), "pocket-3m", "rtn-w4-pc")
    all_params = [
        block_error.BlockError(),
        block_error.BlockError(show="later"),
        block_error.BlockError(inputs="full", show="blocks"),
    ]
    assert len({params.jobs(at)["errors"].id for params in all_params}) == 1
    bare = scales.load({"perplexity": {"kl_windows": 0}}, "pocket")
    assert block_error.BlockError().jobs(Target(bare, "pocket-3m", "rtn-w4-pc")) is None


def test_bad_input_is_one_sentence():
    full, ids = tiny.model("llama"), tiny.tokens(1, 6)
    broken, short = tiny.model("llama"), tiny.model("llama")
    list(blocks(broken).values())[1].mlp.down_proj.weight.data[0, 0] = float("nan")
    del short.model.layers[1]
    for model, message in ((broken, "layers.1: its output holds NaN or Inf"), (short, "2 blocks in full precision, 1")):
        with pytest.raises(UserError, match=message):
            block_error.errors(full, model, ids, False)
