"""Which recorded configuration a number of tokens takes; what is chosen without one is in `test_heuristic.py`."""

import torch

from repro.kernels import w4a16_choice, w4a16_gemm


def test_recorded_number_of_tokens(monkeypatch):
    """The configuration of the next recorded number of tokens, where as many make the same tiles."""
    monkeypatch.setattr(w4a16_choice, "launch_config", lambda kernel, key, device: {"key": key})
    configs = {m: w4a16_choice.configuration(m, 8, 64, 4, "cpu") for m in (1, 16, 25, 33, 49, 57, 81, 97, 128, 250)}
    wanted = (8, 16, 32, 40, 56, 64, 96, 112, 128, 256)
    assert [config["key"] for config in configs.values()] == [f"w4 m{t} 8x64" for t in wanted]


def test_a_number_of_tokens_that_is_not_recorded_is_served_by_the_next_up_to_64(monkeypatch):
    """1 to 8 tokens by 8, 12 or 16, 9 to 12 by 12 or 16, 33 to 64 by 40, 48, 56 or 64; 65 by 72 or 80, or estimate."""
    assert [w4a16_choice.serving(m) for m in (1, 9, 33, 41, 64, 65, 81, 113, 128, 129, 200, 256, 300)] == [
        [8, 12, 16], [12, 16], [40, 48, 56, 64], [48, 56, 64], [64], [72, 80], [96], [128], [128], [160], [224], [256],
        [312, 320],
    ]  # fmt: skip
    assert [w4a16_choice.serving(m) for m in (321, 353, 361, 400, 449, 500, 641)] == [
        [352, 360, 376, 384], [360, 376, 384], [376, 384], [448], [456, 512], [512], [],
    ]  # fmt: skip
    recorded = {f"w4 m{t} 4096x4096": {"key": t} for t in (16, 48, 64)}
    monkeypatch.setattr(w4a16_choice, "launch_config", lambda kernel, key, device: recorded.get(key))
    assert [w4a16_choice.configuration(m, 4096, 4096, 4, "cpu") for m in (5, 33, 48, 49)] == [
        {"key": 16}, {"key": 48}, {"key": 48}, {"key": 64},
    ]  # fmt: skip
    assert w4a16_choice.configuration(65, 4096, 4096, 4, "cpu") in w4a16_gemm.SPACE
    recorded |= {f"w4 m{t} 4096x4096": {"key": t} for t in (256, 320)}
    nearest = [w4a16_choice.next_recorded(m, 4096, 4096, 4, torch.device("cpu")) for m in (17, 65, 300, 400)]
    assert nearest == [{"key": 48}, {"key": 256}, {"key": 320}, {"key": 320}]
    del recorded["w4 m256 4096x4096"], recorded["w4 m320 4096x4096"]
    assert w4a16_choice.next_recorded(65, 4096, 4096, 4, torch.device("cpu")) is None
    assert w4a16_choice.next_recorded(400, 4096, 4096, 4, torch.device("cpu")) is None
