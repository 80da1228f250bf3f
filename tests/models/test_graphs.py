"""Training steps as CUDA graphs: the same numbers as plain calls, on whatever device there is."""

from functools import partial

import pytest
import torch

from repro.models import graphs

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
]


def trained(device: str, run) -> tuple[torch.Tensor, list[float]]:  # noqa: ANN001
    """A weight after twelve steps of two batch shapes at a falling rate, and the losses."""
    x, y = (torch.randn(30, 8, generator=torch.Generator().manual_seed(seed)).to(device) for seed in (0, 1))
    weight = torch.eye(8, device=device).requires_grad_()
    optimizer = graphs.adamw([weight], 1e-2, weight_decay=0.0)

    def step(rows: torch.Tensor) -> torch.Tensor:
        loss = (x[rows] @ weight - y[rows]).square().mean()
        weight.grad = torch.autograd.grad(loss, weight)[0]
        optimizer.step()
        return loss.detach()

    replayed, losses = run(step, partial(graphs.changed, optimizer)), []
    for epoch in range(3):
        for i, rows in enumerate(torch.arange(30, device=device).split(8)):  # 8, 8, 8 and 6 rows
            graphs.set_rate(optimizer, 1e-2 / (1 + epoch + i))
            losses.append(replayed(rows).item())
    return weight.detach(), losses


@pytest.mark.parametrize("device", DEVICES)
def test_replayed_steps_are_plain_steps(device):
    weight, losses = trained(device, graphs.Replayed)
    want, wanted = trained(device, lambda step, state: step)
    assert torch.equal(weight, want) and losses == wanted
    assert sum(losses[-4:]) < sum(losses[:4]) and not torch.equal(want, torch.eye(8, device=device))


@pytest.mark.parametrize("device", DEVICES)
def test_the_rate_is_the_one_that_was_set(device):
    """Adam's first step is the rate times the sign of the gradient."""
    weight = torch.zeros(3, device=device, requires_grad=True)
    optimizer = graphs.adamw([weight], 1.0, weight_decay=0.0)
    graphs.set_rate(optimizer, 0.25)
    weight.grad = torch.tensor([1.0, -2.0, 3.0], device=device)
    optimizer.step()
    rel = 1e-6 if device == "cpu" else 1e-5  # a captured step has 1 - 0.999 in float32
    assert weight.tolist() == pytest.approx([-0.25, 0.25, -0.25], rel=rel)
    assert {id(t) for t in graphs.changed(optimizer)} >= {id(weight)}
