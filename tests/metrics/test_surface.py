"""Loss surfaces: filter-normalized directions, second differences with known answers, a slow reference, bad input."""

import numpy as np
import pytest
import tiny
import torch
from torch.nn import functional as F

from repro.core.errors import UserError
from repro.jobs.target import Target
from repro.metrics import surface
from repro.models.groups.quantizer import GroupGrid, fake_quantize
from repro.models.lowbit import block_linears
from repro.specs import scale as scales
from repro.specs.templates import params_of
from repro.store.observations import Observations, Series


def needs(losses: np.ndarray) -> dict[str, Observations]:
    series = {"loss": Series(losses.mean(2).ravel(), "points")}
    series |= {f"at {i} {j}": Series(one, "sequences", "g") for (i, j), one in surface.cells_of(losses)}
    return {"surface": Observations(series, {})}


@pytest.mark.parametrize("points", [3, 11])
@pytest.mark.parametrize(("a", "b"), [(1.0, 1.0), (3.0, -1.0), (0.0, 0.5)])
def test_a_quadratic_loss_has_a_constant_second_difference(points, a, b):
    """L = a α² + b β² + αβ + α + 7: 2a h² along one axis, 2b h² along the other; the roughness is their mean."""
    x = surface.steps(points, 0.5)
    alpha, beta = np.meshgrid(x, x, indexing="ij")
    losses = a * alpha**2 + b * beta**2 + alpha * beta + alpha + 7
    h = x[1] - x[0]
    assert np.diff(losses, 2, axis=0) == pytest.approx(np.full((points - 2, points), 2 * a * h**2))
    assert surface.roughness(losses) == pytest.approx((abs(a) + abs(b)) * h**2)


def test_a_plane_is_smooth_and_a_chessboard_is_not():
    x = np.arange(5)
    plane = 3.0 * x[:, None] - 2.0 * x[None]
    assert surface.roughness(plane) == pytest.approx(0, abs=1e-12)
    assert surface.roughness(plane + (x[:, None] + x[None]) % 2) == pytest.approx(2.0)


def test_a_step_is_as_rough_as_it_is_high():
    """One step of height 1 between two columns of five: two of three second differences along one axis are 1."""
    assert surface.roughness(np.repeat([[0.0, 0, 1, 1, 1]], 5, 0)) == pytest.approx(2 * 5 / 30)


@pytest.mark.parametrize("points", [3, 11, 21])
def test_the_model_itself_is_in_the_middle(points):
    x = surface.steps(points, 0.1)
    assert len(x) == points and x[points // 2] == 0 and x[0] == -x[-1] == pytest.approx(-0.1)
    assert np.diff(x) == pytest.approx(np.full(points - 1, 0.2 / (points - 1)))


def test_directions_have_the_norm_of_each_row_and_are_drawn_once():
    model = tiny.model("llama")
    block_linears(model)["model.layers.0.mlp.up_proj"].weight.data[3] = 0
    first, again, other = (surface.directions(model, seed) for seed in (0, 0, 1))
    for name, linear in block_linears(model).items():
        norms = linear.weight.detach().norm(dim=1)
        for direction in first:
            assert direction[name].norm(dim=1) == pytest.approx(norms, rel=1e-5)
        assert torch.equal(first[0][name], again[0][name]) and torch.equal(first[1][name], again[1][name])
        assert not torch.equal(first[0][name], other[0][name]) and not torch.equal(first[0][name], first[1][name])
        cosines = F.cosine_similarity(first[0][name], first[1][name], dim=1)
        assert cosines.abs().mean() < 0.3, "two directions are nearly orthogonal"
    assert set(first[0]) == set(block_linears(model)), "embedding, head and norms stay"


@pytest.mark.parametrize("bits", [16, 4, 2])
def test_every_point_is_the_loss_of_the_moved_and_rounded_model(bits):
    model, ids = tiny.model("llama"), tiny.tokens(3, 9)
    grid = None if bits == 16 else GroupGrid(bits, 16)
    pair, sides = surface.directions(model, 5), surface.steps(3, 0.2)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    result = surface.surface(model, pair, ids, grid, sides)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert result.shape == (3, 3, 3)
    for i, j in ((0, 0), (1, 1), (0, 2)):
        moved = tiny.model("llama")
        for name, linear in block_linears(moved).items():
            weight = linear.weight.data + sides[i] * pair[0][name] + sides[j] * pair[1][name]
            linear.weight.data = weight if grid is None else fake_quantize(weight, grid)
        with torch.no_grad():
            logits = moved(ids).logits[:, :-1].double().log_softmax(-1)
        want = -logits.gather(2, ids[:, 1:, None])[..., 0].mean(1)
        assert result[i, j] == pytest.approx(want.numpy(), rel=1e-5)


def test_fewer_bits_are_rougher():
    model, ids = tiny.model("llama"), tiny.tokens(4, 16)
    pair, sides = surface.directions(model, 0), surface.steps(5, 0.02)
    rough = [
        surface.roughness(surface.surface(model, pair, ids, grid, sides).mean(2))
        for grid in (None, GroupGrid(4, 32), GroupGrid(2, 32))
    ]
    assert rough[0] < rough[1] < rough[2]


def test_a_table_shows_the_roughness_of_mean_losses_and_a_figure_the_losses():
    losses = np.random.default_rng(0).normal(size=(3, 3, 4))
    rough, drawn = surface.Surface(4), surface.Surface(4, "surface")
    result = rough.series(needs(losses), None)
    means = {name: one.values.mean() for name, one in result.items()}
    assert rough.value(means) == pytest.approx(surface.roughness(losses.mean(2)))
    several = {name: np.asarray([mean, 2 * mean]) for name, mean in means.items()}
    assert rough.value(several) == pytest.approx(surface.roughness(losses.mean(2)) * np.asarray([1, 2]))
    (only,) = drawn.series(needs(losses), None).values()
    assert only.values == pytest.approx(losses.mean(2).ravel())


def test_one_pair_of_directions_and_a_job_for_each_width():
    at = Target(scales.load(name="pocket"), "pocket-3m", "fp16")
    jobs = {bits: surface.Surface(bits).jobs(at)["surface"] for bits in (16, 8, 2)}
    assert len({job.id for job in jobs.values()}) == 3
    assert {job.parsed_options()["directions"] for job in jobs.values()} == {0}
    assert {(job.parsed_options()["points"], job.parsed_options()["reach"]) for job in jobs.values()} == {(11, 0.1)}
    other = surface.Surface(8, group=64).jobs(at)["surface"].id
    assert other != jobs[8].id and surface.Surface(16, group=64).jobs(at)["surface"].id == jobs[16].id
    assert surface.Surface(2, "surface").jobs(at)["surface"].id == jobs[2].id, "both shows share it"
    off = scales.load({"surface": None}, "pocket")
    assert surface.Surface(2).jobs(Target(off, "pocket-3m", "fp16")) is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: surface.Surface(1), "bits is 1; a group quantizer has 2 to 8"),
        (lambda: surface.Surface(4, group=0), "group is 0; it must be 1 or more"),
        (lambda: params_of({"kind": "surface", "bits": 4, "show": "height"}, {}, "a spec"), "show"),
        (lambda: surface.Protocol(points=10), "points is 10; an odd number, 3 or more"),
        (lambda: surface.Protocol(reach=0.0), "reach is 0.0; it must be above 0"),
        (lambda: surface.Protocol(sequences=1), "sequences is 1; it must be 2 or more"),
        (lambda: surface.surface(tiny.model("llama"), surface.directions(tiny.model("llama"), 0), tiny.tokens(1, 4),
                                 GroupGrid(4, 48), surface.steps(3, 0.1)),
         "layers.0.self_attn.q_proj: 64 input channels do not divide into groups of 48"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(make, message):
    with pytest.raises(UserError) as error:
        make()
    assert message in str(error.value) and "\n" not in str(error.value)
