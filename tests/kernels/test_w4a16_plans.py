"""How a configuration runs a shape: tiles, thread blocks, shared memory, and where columns are a constant."""

from repro.kernels import w4a16_estimates, w4a16_gemm, w4a16_plans, w4a16_tiles


def test_tiles_have_no_more_tokens_than_there_are():
    """Each as many, a multiple of 8, or of 16 where two copies bring it; 16 at least, or all of a smaller tile."""
    for small in (8, 12, 16):
        tile = dict(zip(w4a16_tiles.MMA, (small, 1, 2, 4, 512, 4, 1, 0, 1)))
        assert {w4a16_plans.trimmed(tile, m) for m in (1, 8, 9, 12, 13, 40)} == {small}
        assert w4a16_plans.grid_of(tile, 25, 32, 4096).clusters == -(-25 // small)
    tile = dict(zip(w4a16_tiles.MMA, (64, 1, 4, 1, 128, 4, 2, 0, 1)))
    assert [w4a16_plans.trimmed(tile, m) for m in (1, 16, 17, 40, 41, 64, 65, 129)] == [16, 16, 24, 40, 48, 64, 40, 48]
    tile = {"WGS": 1, "MB": 2}
    assert [w4a16_plans.trimmed(tile, m) for m in (1, 33, 65, 113, 128, 129, 300)] == [16, 40, 72, 120, 128, 72, 104]
    for pair, want in ((1, [72, 136, 256, 272, 320, 168]), (2, [80, 144, 256, 272, 320, 176])):
        tile = {"MB": 5, "PAIR": pair}
        assert [w4a16_plans.trimmed(tile, m) for m in (65, 129, 256, 257, 320, 321)] == want
        assert [w4a16_plans.box_rows({"MT": mt, "PAIR": pair}) for mt in (256, 272)] == [256 // pair, 136]
    for config in w4a16_gemm.SPACE[::7]:
        tokens = w4a16_tiles.tokens_of(config)
        whole = w4a16_estimates.estimate(config, -(-129 // tokens) * tokens, 4096, 4096, 4, 132)
        assert w4a16_estimates.estimate(config, 129, 4096, 4096, 4, 132) <= whole


def test_thread_blocks_of_a_launch():
    """Tiles of tokens and rows in clusters that share columns, and with PAIR tokens; a stage each at least."""
    mma = dict(zip(w4a16_tiles.MMA, (64, 1, 4, 1, 128, 4, 2, 0, 4)))
    wgmma = dict(zip(w4a16_tiles.WGMMA, (3, 64, 128, 3, 3, 4)))
    pair = {"WGS": 4, "MT": 128, "STAGES": 4, "RING": 3, "SPLIT": 4, "PAIR": 2}
    for config, want in (
        (mma, w4a16_plans.Grid(40, 3, 3, 2 * 5)),  # 80 tokens, 300 rows in tiles of 64, 384 columns in three stages
        (wgmma, w4a16_plans.Grid(40, 3, 3, 2 * 2)),
        (pair, w4a16_plans.Grid(80, 3, 6, 1)),  # 512 rows a pair, each with 256
        ({name: pair[name] for name in pair if name != "WGS"}, w4a16_plans.Grid(80, 3, 6, 2)),
    ):
        grid = w4a16_plans.grid_of(config, 80, 300, 384)
        assert grid == want and grid.blocks == want.clusters * want.together
        _, plan = w4a16_plans.plan_of(config, 80, 300, 384, (4, 128, False), (9, 0))
        assert (plan.grid, plan.macros["SPLIT"], plan.macros["MT"]) == (grid.blocks, grid.split, grid.tokens)


def test_shared_memory_of_sums():
    """Behind three stages a sum of each unit from either block; 48 units of four warps are more than two stages."""
    config = dict(zip(w4a16_tiles.MMA, (16, 4, 1, 8, 1024, 3, 1, 0, 2)))
    stages = 3 * 8 * (16 * 128 * 2 + 4 * (128 * 16 // 2 + 16 * 4))
    assert w4a16_plans.shared_bytes(config, 4, 128, False) == stages + 2 * 4 * 512 + 8
    twelve = config | {"MT": 12}  # a unit of eight and one of four tokens
    stages = 3 * 8 * (12 * 128 * 2 + 4 * (128 * 16 // 2 + 16 * 4))
    assert w4a16_plans.shared_bytes(twelve, 4, 128, False) == stages + 2 * 4 * 512 + 8
    many = dict(zip(w4a16_tiles.MMA, (64, 3, 2, 4, 256, 2, 1, 1, 2)))
    assert w4a16_plans.shared_bytes(many, 4, 128, False) == 4 * 48 * 512 + 2 * 24 * 512 + 8
    assert w4a16_plans.shared_bytes(many | {"SPLIT": 1}, 4, 128, False) == 4 * 48 * 512


def test_where_nothing_else_fits_fewer_warps_share_columns():
    """8 bits of seven row tiles a warp: eight tokens and half the warps, as many columns each."""
    config = dict(zip(w4a16_tiles.MMA, (16, 7, 1, 8, 1024, 2, 1, 0, 1)))
    fitted = w4a16_plans.fitted(config, 8, 128, False)
    assert fitted == config | {"MT": 8, "WK": 4, "KS": 512}
    assert w4a16_plans.fitted(config, 4, 32, False) == config


def test_where_two_stages_of_wgmma_do_not_fit_they_have_half_as_many_columns():
    config = dict(zip(w4a16_tiles.WGMMA, (4, 96, 256, 3, 4, 2)))
    two_of_each = config | {"STAGES": 2, "RING": 2, "OVERLAID": 1}
    assert w4a16_plans.wgmma_fitted(config, 4, 128, False) == two_of_each | {"STAGES": 3}
    assert w4a16_plans.wgmma_fitted(config, 8, 128, False) == two_of_each | {"KS": 128}


def test_sums_lie_where_stages_did_unless_they_fit_beside_them():
    config = dict(zip(w4a16_tiles.WGMMA, (4, 96, 128, 3, 3, 2)))
    x, words, sums = 96 * 256, 16 * (1024 + 64), 16 * 12 * 512
    beside = w4a16_plans.wgmma_fitted(config, 4, 128, False)
    assert beside == config | {"OVERLAID": 0}
    assert w4a16_plans.wgmma_shared_bytes(beside, 96, 4, 128, False) == 3 * x + 3 * words + sums + 8 * 7
    more = config | {"STAGES": 6}
    over = w4a16_plans.wgmma_fitted(more, 4, 128, False)
    assert over == more | {"OVERLAID": 1}
    assert w4a16_plans.wgmma_shared_bytes(over, 96, 4, 128, False) == 6 * x + 3 * words + 8 * 13
    few = config | {"STAGES": 2, "RING": 2, "KS": 64, "OVERLAID": 1}
    assert w4a16_plans.wgmma_shared_bytes(few, 96, 4, 128, False) == sums + 8 * 5
    _, plan = w4a16_plans.plan_of(more, 96, 512, 1024, (4, 128, False), (9, 0))
    assert plan.macros["OVERLAID"] == 1


def test_columns_are_a_constant_where_stages_and_groups_divide_them():
    """Rows may end within a tile of `wgmma`, not of `mma`, whose thread blocks copy whole tiles."""
    wgmma = dict(zip(w4a16_tiles.WGMMA, (2, 32, 128, 3, 3, 2))) | {"KNOWN": 1}
    narrow = wgmma | {"KS": 64}
    multicast = dict(zip(w4a16_tiles.MULTICAST_OF_64S, (2, 6, 3, 2))) | {"PAIR": 1, "KNOWN": 1}
    cases = (
        (wgmma, 130, 640, 128, True), (wgmma, 128, 640 + 64, 64, False), (wgmma, 128, 640, 0, True),
        (wgmma, 128, 640, 32, False),
        (narrow, 128, 640, 64, True), (narrow, 128, 640, 128, False), (narrow, 128, 768, 128, True),
        (multicast, 130, 640, 128, True), (multicast, 128, 640 + 64, 64, False),
    )  # fmt: skip
    for config, rows, columns, group, want in cases:
        assert w4a16_plans.known(config, rows, columns, group) is want
        _, plan = w4a16_plans.plan_of(config, 32, rows, columns, (4, group, False), (9, 0))
        assert ("COLUMNS" in plan.macros) is want
        without = {name: value for name, value in config.items() if name != "KNOWN"}
        assert not w4a16_plans.known(without, rows, columns, group)


def test_all_stages_are_copied_at_once_where_each_has_a_place():
    config = dict(zip(w4a16_tiles.MMA, (16, 1, 2, 4, 512, 4, 1, 0, 2))) | {"KNOWN": 1}
    assert w4a16_plans.copies_all_at_once(config, 64, 4096)  # two thread blocks of four stages
    assert w4a16_plans.copies_all_at_once(config, 64, 2048)
    assert not w4a16_plans.copies_all_at_once(config, 64, 5120)  # of five
    assert not w4a16_plans.copies_all_at_once(config, 64, 1536)  # of one and of two
    assert not w4a16_plans.copies_all_at_once(config, 48, 4096)  # rows end within a tile
    assert not w4a16_plans.copies_all_at_once({"WGS": 1, "MT": 64, "KS": 256, "STAGES": 8, "KNOWN": 1}, 64, 1024)
    unknown_columns = {name: value for name, value in config.items() if name != "KNOWN"}
    assert not w4a16_plans.copies_all_at_once(unknown_columns, 64, 4096)
    once = w4a16_estimates.estimate(config, 16, 4096, 4096, 4, 132)
    assert once < 0.95 * w4a16_estimates.estimate(unknown_columns, 16, 4096, 4096, 4, 132)
