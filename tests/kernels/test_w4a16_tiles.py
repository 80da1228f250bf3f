"""Every configuration that can be chosen or is recorded can run."""

import pytest

from repro.kernels import packing, w4a16_choice, w4a16_gemm, w4a16_plans, w4a16_tiles
from repro.kernels.launch_config import configurations


@pytest.mark.parametrize("m, n, k", [(1, 512, 2048), (16, 4096, 4096), (64, 28672, 8192), (2048, 127, 96)])
def test_every_configuration_divides(m, n, k):
    recorded = configurations("nvidia-h200").get("w4a16_gemm", {}).values()
    for config in [w4a16_choice.cheapest(m, n, k), *w4a16_gemm.SPACE, *recorded]:
        if "PAIR" in config:
            assert w4a16_plans.box_rows(config | {"MT": w4a16_tiles.tokens_of(config)}) <= w4a16_plans.MOST_BOX
            most = {"MT"} if config.get("MT") == w4a16_tiles.MOST_TOKENS else {"MB"}
            if "WGS" in config:
                most = {"MT", "WGS"}
            assert set(config) - {"KNOWN", "PRODUCER"} == {"STAGES", "RING", "SPLIT", "PAIR"} | most
            assert config["SPLIT"] * config["PAIR"] <= 8
            for bits in packing.BITS:
                _, plan = w4a16_plans.plan_of(config, m, n, k, (bits, 32, False), (9, 0))
                assert plan.macros["MT"] % (8 * config["PAIR"]) == 0 and plan.shared <= 232448
            continue
        if "WGS" in config:
            names = w4a16_tiles.WGMMA_OF_64S if "MB" in config else w4a16_tiles.WGMMA
            assert set(config) - {"KNOWN", "SCALED"} == set(names)
            fits = w4a16_plans.wgmma_fitted(config, 4, 128, False)
            assert fits | config == fits and 1 <= config["SPLIT"] <= 8
            for bits in packing.BITS:
                fitted = w4a16_plans.wgmma_fitted(config, bits, 32, False)
                assert fitted["KS"] % packing.block_columns(bits) == 0 and min(fitted["STAGES"], fitted["RING"]) > 1
                assert w4a16_plans.wgmma_shared_bytes(fitted, w4a16_tiles.tokens_of(fitted), bits, 32, False) <= 232448
            continue
        assert set(config) - {"KNOWN"} == set(w4a16_tiles.MMA)
        for bits in packing.BITS:
            fitted = w4a16_plans.fitted(config, bits, 32, False)
            columns = fitted["KS"] // fitted["WK"]
            assert columns % packing.block_columns(bits) == 0 and columns % 64 == 0
            assert columns in (64, 128) or columns % 128 == 0  # of one group, or whole groups
            assert 32 * fitted["WR"] % (columns // 8) == 0  # the warps that share a stage copy whole rows of it
            assert w4a16_plans.shared_bytes(fitted, bits, 32, False) <= 232448 and 1 <= config["SPLIT"] <= 8
