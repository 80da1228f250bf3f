"""Where two launches beside each other are taken, and which tokens are the first one's; `test_linear.py` runs them."""

import itertools

import pytest
import torch

from repro.kernels import linear, w4a16_beside, w4a16_choice, w4a16_estimates
from repro.kernels.launch_config import configurations


def test_the_first_of_two_launches_has_whole_tiles():
    """Of 64 tokens, or the largest there is; 1 to 64 tokens are left for the second."""
    heads = {m: w4a16_beside.heads_of(m) for m in (256, 257, 320, 321, 352, 353, 384, 416, 417)}
    assert heads == {
        256: [], 257: [256], 320: [256], 321: [320], 352: [320], 353: [320, 352], 384: [320, 352], 416: [352, 384],
        417: [384],
    }  # fmt: skip


def test_a_second_launch_takes_the_tokens_that_would_be_a_wave_of_their_own(monkeypatch):
    """By the estimates for an H200: 353 tokens of a tile for 352, which 112 of its 132 SMs compute."""
    monkeypatch.setattr(w4a16_choice, "launch_config", lambda *_: None)
    w4a16_beside.tokens_of_head.cache_clear()
    device = torch.device("cpu")
    counts = (1, 64, 256, 320, 321, 352, 353, 368, 512)
    heads = {m: w4a16_beside.tokens_of_head(m, 14336, 4096, 4, device) for m in counts}
    assert heads == dict.fromkeys((1, 64, 256, 320, 321, 352, 512), 0) | {353: 352, 368: 352}
    used = w4a16_beside.waves_of(w4a16_choice.cheapest(352, 14336, 4096), 352, 14336, 4096, 132)
    assert used.count == 1 and used.free == pytest.approx(20 / 132)
    assert w4a16_beside.longer_by_decoding(50.0, 0.5, 10.0) == 0 < w4a16_beside.longer_by_decoding(50.0, 0.1, 10.0)
    x = torch.zeros(353, 4096, dtype=torch.float16)
    assert linear.tokens_of_head(x, 14336, 4096, 4) == 352
    assert linear.tokens_of_head(torch.zeros(353, 4097).half(), 14336, 4097, 4) == 0  # rows that are not aligned
    w4a16_beside.tokens_of_head.cache_clear()


def test_the_first_launch_has_as_many_tokens_as_are_recorded(monkeypatch):
    """From the next of `TOKENS` below on, if they are more; 0 where one launch is recorded; whatever is estimated."""
    heads = {288: 256, 360: 352, 456: 448, 640: 0}
    recorded = {"w4a16_gemm_head": {f"w4 m{m} 1024x4096": {"tokens": tokens} for m, tokens in heads.items()}}
    tile = {"MB": 4, "STAGES": 4, "RING": 3, "SPLIT": 1, "PAIR": 1}
    recorded["w4a16_gemm"] = {f"w4 m{m} 1024x4096": tile for m in (384, 512)}
    monkeypatch.setattr(w4a16_choice, "launch_config", lambda kernel, key, device: recorded.get(kernel, {}).get(key))
    monkeypatch.setattr(w4a16_beside, "time_of_two", lambda *_: 0.0)  # 385 tokens, of which nothing is recorded
    w4a16_beside.tokens_of_head.cache_clear()
    want = {256: 0, 257: 256, 321: 0, 352: 0, 353: 352, 360: 352, 361: 0, 385: 352, 449: 448, 456: 448, 457: 0, 513: 0}
    recorded["w4a16_gemm_head"]["w4 m384 1024x4096"] = {"tokens": 320}
    want |= {322: 0, 344: 0, 368: 0, 376: 0, 377: 320, 384: 320}  # nothing is recorded at 328 to 352 and at 376
    for m, head in want.items():
        assert w4a16_beside.tokens_of_head(m, 1024, 4096, 4, torch.device("cpu")) == head, m
    w4a16_beside.tokens_of_head.cache_clear()


def test_the_first_launch_has_fewer_tokens_than_there_are(monkeypatch):
    """At every number from one record to the next of the layers with recorded heads; the second has at most 64."""
    recorded = configurations("nvidia-h200")
    monkeypatch.setattr(w4a16_choice, "launch_config", lambda kernel, key, device: recorded[kernel].get(key))
    w4a16_beside.tokens_of_head.cache_clear()
    shapes = {key.split()[2] for key in recorded[w4a16_choice.HEAD]}
    counts = [m + 1 for m in w4a16_choice.TOKENS if m >= w4a16_beside.LEAST_HEAD]
    for shape, m in itertools.product(sorted(shapes), counts):
        head = w4a16_beside.tokens_of_head(m, *map(int, shape.split("x")), 4, torch.device("cpu"))
        assert head == 0 or 0 < m - head <= w4a16_beside.MOST_TAIL, (shape, m, head)
    w4a16_beside.tokens_of_head.cache_clear()


def test_up_to_256_tokens_are_one_launch(monkeypatch):
    """Though two are estimated to be faster: 192 of 209 tokens of 3072 x 8192."""
    monkeypatch.setattr(w4a16_choice, "launch_config", lambda *_: None)
    shapes = ((3072, 8192), (11008, 4096), (6144, 4096), (14336, 4096))
    for least, found in ((256, set()), (64, {192})):
        monkeypatch.setattr(w4a16_beside, "LEAST_HEAD", least)
        w4a16_beside.tokens_of_head.cache_clear()
        heads = {w4a16_beside.tokens_of_head(209, *shape, 4, torch.device("cpu")) for shape in shapes}
        assert heads - {0} == found
    w4a16_beside.tokens_of_head.cache_clear()


def test_two_launches_are_taken_where_they_were_faster_on_an_h200(monkeypatch):
    """Tokens of the first; 0 where one launch took as long or less: a second one by `mma`, or very small layers."""
    recorded = configurations("nvidia-h200")
    monkeypatch.setattr(w4a16_choice, "launch_config", lambda kernel, key, device: recorded[kernel].get(key))
    faster = {(11008, 4096, 480): 448, (14336, 4096, 513): 512, (14336, 4096, 544): 512}
    slower = [(6144, 4096, 288), (6144, 4096, 400), (3072, 8192, 288), (2048, 2048, 265), (2048, 2048, 288)]
    slower += [(6144, 4096, 449), (6144, 4096, 513)]  # one launch of five or six tiles of 104
    w4a16_beside.tokens_of_head.cache_clear()
    for (rows, columns, tokens), head in (faster | dict.fromkeys(slower, 0)).items():
        assert w4a16_beside.tokens_of_head(tokens, rows, columns, 4, torch.device("cpu")) == head
    assert w4a16_choice.serving_record(265, 2048, 8192, 4, "cuda")  # for one launch, though two have a lower estimate
    assert not w4a16_beside.tokens_of_head(265, 2048, 8192, 4, torch.device("cpu"))
    monkeypatch.setattr(w4a16_choice, "launch_config", lambda *_: None)
    for name, value, wrong in (("SLOWER_MMA", w4a16_beside.SLOWER, slower[0]), ("GAIN", 0.0, (1024, 3072, 404))):
        w4a16_beside.tokens_of_head.cache_clear()
        assert not w4a16_beside.tokens_of_head(wrong[2], *wrong[:2], 4, torch.device("cpu"))
        with monkeypatch.context() as patch:
            patch.setattr(w4a16_beside, name, value)
            w4a16_beside.tokens_of_head.cache_clear()
            assert w4a16_beside.tokens_of_head(wrong[2], *wrong[:2], 4, torch.device("cpu"))
    w4a16_beside.tokens_of_head.cache_clear()


def in_turns(wave, free, together=1, clusters=128, tail=10.0, count=1):
    """Of a second launch whose thread blocks take `tail` / `count` beside the first."""
    room = w4a16_estimates.at_once(together, 132)
    waves = w4a16_beside.Waves(together, clusters, room, count, 0.0)
    alone = w4a16_estimates.START + tail / w4a16_beside.SLOWER
    return w4a16_beside.longer_in_turns(wave, free, alone, waves, 132, w4a16_beside.SLOWER)


def test_a_second_launch_takes_turns_on_the_free_sms_and_then_waves_of_its_own():
    """128 thread blocks, 10 us each, on 40 free SMs, 40 at a time; clusters of more than two have no room there."""
    free, own = 40 / 132, 10 / w4a16_beside.SLOWER
    assert in_turns(45.0, free) == 0  # 160 in four turns
    assert in_turns(35.0, free) == pytest.approx(5.0)  # 120 in three, the other 8 in one that has begun
    assert in_turns(25.0, free) == pytest.approx(own)  # 80 in two, 40 have begun, 8 have a wave of their own
    assert in_turns(9.0, 0.0) == pytest.approx(own)
    assert in_turns(25.0, free, clusters=256, tail=20.0, count=2) == pytest.approx(2 * own)  # 136 are left for two
    assert in_turns(45.0, free, together=2, clusters=64) == 0
    assert in_turns(45.0, free, together=4, clusters=22) == pytest.approx(own)
