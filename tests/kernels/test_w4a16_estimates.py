"""What the estimate of a configuration knows of a device; what it chooses is in `test_heuristic.py`."""

import pytest

from repro.kernels import w4a16_estimates, w4a16_tiles


def test_small_thread_blocks_share_an_sm():
    small = dict(zip(w4a16_tiles.MMA, (8, 1, 1, 8, 512, 3, 1, 0, 2)))  # 40 KB, 256 threads
    large = dict(zip(w4a16_tiles.MMA, (16, 1, 2, 8, 1024, 4, 1, 0, 1)))  # 197 KB
    tiny = dict(zip(w4a16_tiles.MMA, (8, 1, 1, 2, 256, 2, 1, 0, 1)))  # 20 KB, 64 threads
    rooms = [w4a16_estimates.blocks_with_room(config, 4) for config in (small, large, tiny)]
    assert rooms == [2, 1, 10]  # by registers, by shared memory, by registers
    assert w4a16_estimates.blocks_with_room(large | {"BLOCKS": 3}, 4) == 3


def test_unrolled_loops_over_several_tiles_are_faster_with_three_warpgroups():
    """Up to 256 tokens with any number of them."""
    for warpgroups, one_tile, several in ((2, 0.91, 1.0), (3, 0.91, 0.94), (4, 0.93, 1.05)):
        config = {"WGS": warpgroups, "MT": 128, "STAGES": 4, "RING": 2, "SPLIT": 1, "PAIR": 1}
        for tokens, share in ((128, one_tile), (256, one_tile), (384, several)):
            times = [
                w4a16_estimates.estimate(each, tokens, 4096, 4096, 4, 132) for each in (config, config | {"KNOWN": 1})
            ]
            assert times[1] / times[0] == pytest.approx(share)
