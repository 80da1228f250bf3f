"""The heuristic of `w4a16_gemm`: in its space, fitted to what is recorded, and near the best where nothing is."""

import itertools
import json
from statistics import geometric_mean

import pytest
import torch

from repro.bench import tune
from repro.core.files import ROOT
from repro.kernels import w4a16_choice, w4a16_estimates, w4a16_gemm, w4a16_plans, w4a16_tiles
from repro.kernels.launch_config import configurations
from repro.studies import space

BAR = 1.10  # times the best of the space, geometric mean over the recorded places
RECORDS = sorted((ROOT / "results").glob("*/space.json"))
UNSEEN = (5120, 13824)  # recorded for the device, but not among what the heuristic is fitted to


def places_of(recorded):
    """(configuration, tokens, rows, columns) of the recorded configurations."""
    for key, config in recorded.items():
        _, tokens, shape = key.split()
        yield config, int(tokens[1:]), *map(int, shape.split("x"))


@pytest.mark.skipif(not RECORDS, reason="not recorded: python -m repro.studies.space")
@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.parent.name)
def test_the_heuristic_is_near_the_best_of_its_space_on_layers_it_was_not_fitted_to(path):
    content = json.loads(path.read_text(encoding="utf-8"))
    assert not space.unmeasured(content)
    ratios = space.ratios(content)
    assert set(ratios) == set(map(space.key, space.cases()))
    worst = max(ratios, key=ratios.get)
    assert geometric_mean(ratios.values()) <= BAR, f"worst {worst}: {ratios[worst]}"


def test_what_is_recorded_is_all_that_a_layer_without_an_entry_can_get():
    for case in space.cases():
        for tokens in range(case[0] // 2 + 1, case[0] + 1, 31):
            assert w4a16_choice.configuration(tokens, *case[1:], 4, space.UNTUNED) in space.tried(case)


def test_a_choice_is_compared_with_the_least_estimates_of_all_the_space():
    """With configurations that are recorded alone, too, which it cannot take without a record."""
    case = 32, 6144, 4096
    compared, tried = space.compared(case), space.tried(case)
    assert compared[: len(tried)] == tried
    alone = [config for config in compared if config not in tried]
    assert alone and all(config in w4a16_gemm.SPACE for config in compared)
    swept = tune.w4a16_space({"M": 32, "N": 6144, "K": 4096, "bits": 4}, space.UNTUNED)
    assert len(swept) == 100 and all(config in compared for config in swept)
    assert all(config in swept for config in alone)


def test_each_candidate_is_of_the_source_whose_name_it_has():
    sources = {"mma": w4a16_plans.SOURCE, "wgmma": w4a16_plans.WGMMA_SOURCE, "multicast": w4a16_plans.MULTICAST_SOURCE}
    names = [space.name_of(config) for config in w4a16_gemm.SPACE]
    assert len(set(names)) == len(names) == sum(map(len, w4a16_tiles.CANDIDATES.values()))
    for name, candidates in w4a16_tiles.CANDIDATES.items():
        for candidate in candidates:
            source, _ = w4a16_plans.plan_of(candidate.config, 64, 4096, 4096, space.FORM, (9, 0))
            assert source == sources[name]
            assert candidate.most == 0 or candidate.least <= candidate.most  # recorded alone, or for some tokens


def test_ten_layers_are_withheld_from_the_fit():
    recorded = {(n, k) for _, _, n, k in places_of(configurations("nvidia-h200")["w4a16_gemm"])}
    shapes = space.shapes()
    assert len(set(shapes)) == 10 and set(shapes) & recorded == {UNSEEN}


def test_recorded_configurations_are_nearly_the_best_by_its_estimate():
    """What the estimate was fitted to: were a constant or the law another, they would not be."""
    losses = []
    for config, m, n, k in places_of(configurations("nvidia-h200")["w4a16_gemm"]):
        chosen = w4a16_choice.cheapest(m, n, k), config  # which may be one that is recorded alone
        best = min(w4a16_estimates.estimate(each, m, n, k, 4, 132) for each in chosen)
        losses.append(w4a16_estimates.estimate(config, m, n, k, 4, 132) / best)
    assert min(losses) >= 1 and geometric_mean(losses) < 1.03


def test_wgmma_is_chosen_where_a_device_has_it_and_tokens_are_many():
    assert "RT" not in w4a16_choice.cheapest(128, 6144, 4096)
    assert "RT" in w4a16_choice.cheapest(16, 6144, 4096)
    for capability in ((8, 0), (10, 0)):
        for tokens in (32, 128):
            assert "RT" in w4a16_choice.cheapest(tokens, 6144, 4096, capability=capability)
    assert w4a16_choice.cheapest(16, 512, 8192, capability=(8, 0))["SPLIT"] == 1
    assert w4a16_choice.cheapest(16, 512, 8192)["SPLIT"] > 1


def test_few_tokens_do_not_hide_the_waits_of_wgmma():
    """Those of several tiles half of them; an unrolled loop waits less, and by group sums more with more warpgroups."""
    sums, weights, lone = {"SCALED": 0, "WGS": 4}, {"WGS": 4}, {"WGS": 1}
    cases = (
        (weights, 24, 24, False, 1.19), (weights, 65, 24, False, 1.095), (weights, 48, 48, False, 1.11),
        (weights, 65, 40, False, 1.095), (weights, 64, 64, False, 1.0), (lone, 64, 64, False, 1.0),
        (lone, 65, 72, False, 1.1), (sums, 48, 16, True, 0.94), (sums, 40, 40, True, 0.99 * 1.06),
        (sums, 65, 56, True, 1.06), (sums | {"WGS": 2}, 65, 56, True, 1.0), (weights, 40, 40, True, 1.06),
        (weights, 64, 64, True, 0.97),
    )  # fmt: skip
    for config, m, tokens, unrolled, want in cases:
        assert w4a16_estimates.wgmma_wait(config, m, tokens, unrolled) == pytest.approx(want)


def test_an_unrolled_loop_over_many_tokens_is_estimated_by_its_warpgroups():
    """Weights that scales multiply: a step of 64 columns, by 128 rows for 288 tokens; sums of a split are added up."""
    loop = dict(zip(w4a16_tiles.WGMMA, (2, 96, 128, 8, 4, 1))) | {"KNOWN": 1}
    step = w4a16_estimates.LOOP_STEP[2] + 96 * w4a16_estimates.LOOP_PRODUCT[2]
    assert w4a16_estimates.estimate(loop, 288, 4096, 4096, 4, 132) == pytest.approx(3.2 + 64 * step)
    split = w4a16_estimates.estimate(loop | {"SPLIT": 2}, 288, 2048, 4096, 4, 132)
    assert split == pytest.approx(3.2 + 32 * step + 1e-4 * 128 * 96)
    assert w4a16_estimates.estimate(loop, 65, 4096, 4096, 4, 132) == pytest.approx(
        3.2 + 64 * (w4a16_estimates.LOOP_STEP[2] + 72 * w4a16_estimates.LOOP_PRODUCT[2])
    )
    waits_for_words = dict(zip(w4a16_tiles.WGMMA, (1, 80, 128, 4, 2, 1))) | {"KNOWN": 1}
    reading = w4a16_estimates.reading(64, 4096, 4, 2 * 128 * 64 * 4 / 8)
    assert reading > 64 * (w4a16_estimates.LOOP_STEP[1] + 72 * w4a16_estimates.LOOP_PRODUCT[1])
    assert w4a16_estimates.estimate(waits_for_words, 72, 4096, 4096, 4, 132) == pytest.approx(3.2 + reading)


def test_a_card_with_half_the_sms_gets_other_tiles():
    """One wave of 64 SMs: tiles of twice the rows, or half the splits."""
    whole, half = (w4a16_choice.cheapest(64, 4096, 4096, sms=sms) for sms in (132, 66))
    assert whole != half


def test_a_shape_without_an_entry_is_estimated_for_the_tiles_that_its_tokens_make(monkeypatch):
    monkeypatch.setattr(w4a16_choice, "launch_config", lambda *_: None)
    monkeypatch.setattr(w4a16_choice, "cheapest", lambda *arguments: arguments)
    monkeypatch.setattr(w4a16_choice, "estimate", lambda *_: 0.0)
    arguments_of = [w4a16_choice.configuration(m, 48, 256, 4, "cpu")[:4] for m in (1, 17, 256, 257, 600)]
    assert [each[0] for each in arguments_of] == [8, 24, 256, 264, 600]
    assert arguments_of[0] == (8, 48, 256, 4)


def test_between_recorded_numbers_of_tokens_their_tiles_count(monkeypatch):
    """129 tokens are one tile of 136; 65 are one of 72 by the source whose start is shorter, 128 by the other."""
    recorded = configurations("nvidia-h200")["w4a16_gemm"]
    monkeypatch.setattr(w4a16_choice, "launch_config", lambda kernel, key, device: recorded.get(key))
    configs = {m: w4a16_choice.configuration(m, 14336, 4096, 4, "cpu") for m in (64, 65, 128, 129, 192, 193, 256, 600)}
    assert "PAIR" in configs[129] and w4a16_plans.trimmed(configs[129], 129) == 136
    assert configs[64] == recorded["w4 m64 14336x4096"] and configs[128] == recorded["w4 m128 14336x4096"]
    assert "WGS" in configs[65] and w4a16_plans.trimmed(configs[65], 65) == 72
    assert [w4a16_tiles.tokens_of(configs[m]) for m in (129, 192, 193, 256)] == [192, 192, 256, 256]
    assert configs[256] == recorded["w4 m256 14336x4096"]
    assert w4a16_choice.configuration(512, 14336, 4096, 4, "cpu") == recorded["w4 m448 14336x4096"]  # two full tiles
    times = {m: w4a16_estimates.estimate(config, m, 14336, 4096, 4, 132) for m, config in configs.items()}
    assert times[129] < 1.15 * times[128] and times[65] < 1.25 * times[64]


def test_of_equal_estimates_the_recorded_one_is_taken_where_its_tile_is_full(monkeypatch):
    """Its stages are as many as fit beside a full tile: 264 tokens, two tiles of 136, leave room for more."""
    other = {"MB": 4, "STAGES": 4, "RING": 2, "SPLIT": 1, "PAIR": 1}  # estimated as any with as many tokens
    recorded = {"w4 m256 14336x4096": other}
    monkeypatch.setattr(w4a16_choice, "launch_config", lambda kernel, key, device: recorded.get(key))
    monkeypatch.setattr(w4a16_choice, "estimate", lambda *_: 1.0)
    assert w4a16_choice.configuration(512, 14336, 4096, 4, "cpu") == other
    assert w4a16_choice.configuration(264, 14336, 4096, 4, "cpu") != other


def test_few_tokens_have_tiles_of_their_own(monkeypatch):
    """Recorded for 24, 32 and 80 tokens; of a layer without an entry the estimate's, no wgmma where it would wait."""
    recorded = configurations("nvidia-h200")["w4a16_gemm"]
    monkeypatch.setattr(w4a16_choice, "launch_config", lambda kernel, key, device: recorded.get(key))
    for m, shape, key in ((17, "14336x4096", "m24"), (25, "28672x8192", "m32"), (73, "4096x14336", "m80")):
        assert w4a16_choice.configuration(m, *map(int, shape.split("x")), 4, "cpu") == recorded[f"w4 {key} {shape}"]
    for m, shape, chosen in ((2, (6144, 4096), (3, 1, 8)), (8, (28672, 4096), (2, 7, 2))):
        config = w4a16_choice.configuration(m, *shape, 4, "cpu")  # of some forty the fastest on an H200, no entry
        assert (8, *chosen) == tuple(config[name] for name in ("MT", "RT", "WR", "WK"))
    for m, chosen in ((9, (3, 1, 8)), (12, (3, 1, 8)), (13, (1, 3, 4)), (16, (1, 3, 4))):
        config = w4a16_choice.configuration(m, 6144, 4096, 4, "cpu")
        assert (16, *chosen) == tuple(config[name] for name in ("MT", "RT", "WR", "WK"))
    assert w4a16_choice.configuration(17, 6145, 4096, 4, "cpu")["MT"] == 32
    for m in (9, 17, 24, 25, 33, 49, 65, 81, 96, 97, 113, 128):
        chosen = w4a16_choice.configuration(m, 28672, 4096, 4, "cpu")
        assert w4a16_plans.is_unrolled(chosen) and chosen["WGS"] == 4
        assert w4a16_plans.trimmed(chosen, m) == max(16, -(-m // 8) * 8)  # one tile
    assert w4a16_plans.is_unrolled(w4a16_choice.configuration(49, 6144, 4096, 4, "cpu"))
    assert "WGS" in w4a16_choice.configuration(65, 28673, 4096, 4, "cpu")
    for capability in ((8, 0), (10, 0)):
        assert "RT" in w4a16_choice.cheapest(32, 28672, 4096, capability=capability)


def test_known_columns_count_where_a_weight_ends_with_a_tile():
    """17 to 24 tokens of a layer without an entry; they are estimated as a little faster."""
    chosen = w4a16_choice.configuration(17, 6144, 4096, 4, "cpu")
    assert "RT" in chosen and chosen["KNOWN"] == 1
    assert w4a16_plans.known(chosen, 6144, 4096) and not w4a16_plans.known(chosen, 6145, 4096)
    without = {name: value for name, value in chosen.items() if name != "KNOWN"}
    times = [w4a16_estimates.estimate(each, 17, 6144, 4096, 4, 132) for each in (chosen, without)]
    assert times[0] == pytest.approx(w4a16_estimates.KNOWN_SHARE * times[1])


def test_a_launch_beside_another_takes_what_is_recorded_for_it(monkeypatch):
    """Else what is recorded for a launch alone; what nothing is recorded for has no unrolled loop."""
    recorded = {"w4a16_gemm_tail": {"w4 m16 8192x8192": {"tail": 1}}, "w4a16_gemm": {}}
    recorded["w4a16_gemm"] = {"w4 m16 8192x8192": {"alone": 16}, "w4 m32 8192x8192": {"alone": 32}}
    monkeypatch.setattr(w4a16_choice, "launch_config", lambda kernel, key, device: recorded[kernel].get(key))
    places = itertools.product((9, 25), (False, True))
    configs = [w4a16_choice.configuration(m, 8192, 8192, 4, "cpu", beside) for m, beside in places]
    assert configs == [{"alone": 16}, {"tail": 1}, {"alone": 32}, {"alone": 32}]
    every = {beside: w4a16_choice.chosen_from(40, 4, (9, 0), beside) for beside in (False, True)}
    assert any(map(w4a16_plans.is_unrolled, every[False])) and not any(map(w4a16_plans.is_unrolled, every[True]))
    assert every[True] == [config for config in every[False] if not w4a16_plans.is_unrolled(config)]
    assert w4a16_choice.configuration(40, 28672, 4096, 4, "cpu") not in every[True]
    assert w4a16_choice.configuration(40, 28672, 4096, 4, "cpu", True) in every[True]


def test_an_unrolled_loop_is_tried_for_tokens_that_fill_its_tile():
    """Of 16 tokens those of 256 rows alone; a tile of 64 from 41 on, of 128 from 97; of 4 bits.

    From 129 on several tiles of `wgmma` where scales multiply weights, from 257 on of all.
    """
    few = {8: set(), 16: {48}, 24: {32, 48}, 32: {32, 48}, 33: {48}, 41: {48, 64, 72, 80}, 49: {64, 72, 80}}
    few |= {65: {72, 80, 96}, 73: {80, 96}, 81: {96, 112}}
    several = {64, 72, 80, 96, 104, 112, 128}
    many = {97: {104, 112, 128}, 105: {112, 128}, 128: {128}, 129: {160, 192} | several, 161: {192} | several}
    many |= {193: {224, 256} | several, 225: {256} | several, 256: {256} | several}
    many[257] = many[2048] = set().union(*few.values(), *many.values())  # several tiles of each
    for m, tiles in (few | many).items():
        able = list(filter(w4a16_plans.is_unrolled, w4a16_choice.chosen_from(m, 4, (9, 0))))
        assert {w4a16_tiles.tokens_of(config) for config in able} == tiles
        assert (m > 16) == any(config.get("WGS") != 4 for config in able) or not able
        sums = {config["WGS"] for config in able if config.get("SCALED") == 0}
        assert (4 in sums) == (9 <= m <= 40 or m >= 257)
        assert not any(map(w4a16_plans.is_unrolled, w4a16_choice.chosen_from(m, 8, (9, 0))))


def test_tiles_are_chosen_from_for_tokens_that_fill_them():
    """Without a record; 8 tokens have tiles of 8, and no device without wgmma has its sources."""
    tiles_of = {8: {8, 16}, 16: {16}, 17: {16, 24, 32}, 33: {16, 32, 40, 48, 64}, 64: {16, 32, 64}, 600: {16, 32, 64}}
    for m, tiles in tiles_of.items():
        for capability in ((8, 0), (10, 0)):
            able = w4a16_choice.chosen_from(m, 4, capability)
            assert {config["MT"] for config in able} == tiles and all("RT" in config for config in able)
    for m, tiles in {65: {64, 80, 96, 112}, 97: {64, 80, 96, 112, 128, 192, 256, 320, 352}}.items():
        able = [config for config in w4a16_choice.chosen_from(m, 8, (9, 0)) if "RT" not in config]
        assert {w4a16_tiles.tokens_of(config) for config in able} == tiles
    assert not [config for config in w4a16_choice.chosen_from(80, 2, (9, 0)) if "WGS" in config and "MT" in config]
    recorded = [each for each in w4a16_gemm.SPACE if each not in w4a16_choice.chosen_from(16, 4, (9, 0))]
    assert {"MT": 16, "RT": 2, "WR": 1, "WK": 8, "KS": 1024, "STAGES": 4, "BLOCKS": 1, "SCALED": 0, "SPLIT": 1} | {
        "KNOWN": 1
    } in recorded


def test_a_record_is_a_character_a_configuration():
    text = space.as_text({"a": 10.0, "d": 10.31, "f": 15.0, "h": 30.0}, "abcdefghi")
    assert text == "0--3-O---"
    asked = {"a", "b", "d"}
    assert space.as_text({"a": 10.0, "d": 10.31}, "abcd", asked) == "0- 3"
    assert space.STEPS.index(text[5]) == 50
    assert space.name_of({"STAGES": 4, "MT": 16}) == "MT=16 STAGES=4"


CASE = 256, 28672, 4096


def run_of(case, times, **about):
    """A run of a file with one case: microseconds by configuration."""
    names = sorted(times)
    place = {"best_us": min(times.values()), "over": space.as_text(times, names)}
    return {**about, "configs": names, "places": {space.key(case): place}}


def recorded(times, *more):
    """A file of an H200."""
    return {"device": "NVIDIA H200", "sms": 132, "runs": [run_of(CASE, times), *more]}


def test_what_is_chosen_is_compared_with_the_fastest_of_all_runs():
    chosen = space.name_of(w4a16_choice.configuration(*CASE, 4, space.UNTUNED))
    other, third = [space.name_of(config) for config in space.tried(CASE) if space.name_of(config) != chosen][:2]
    content = recorded({chosen: 20.0, other: 16.0})
    assert space.ratios(content) == {space.key(CASE): 1.25}
    assert space.ratios(recorded({chosen: 20.0, other: 24.0}, run_of(CASE, {third: 16.0}))) == {space.key(CASE): 1.25}
    assert space.ratios(recorded({chosen: 20.0, other: 16.0}, run_of(CASE, {chosen: 16.0}))) == {space.key(CASE): 1.0}
    assert space.ratios(recorded({other: 16.0})) == {}  # no run has the choice
    at_other_cases = run_of(CASE, {third: 16.0})
    at_other_cases["configs"].append(chosen)
    at_other_cases["places"][space.key(CASE)]["over"] += space.NOT_ASKED
    assert space.ratios(recorded({chosen: 20.0}, at_other_cases)) == {space.key(CASE): 1.25}
    with pytest.raises(ValueError, match="recorded on 66 SMs"):
        space.ratios(content | {"sms": 66})


def test_what_no_run_has_is_measured_and_the_rest_stays(tmp_path):
    """A configuration counts as measured for the cases of its run, however slow it was or whether it failed."""
    path, origin = tmp_path / "space.json", {"device": "NVIDIA H200", "commit": "new"}
    names = [space.name_of(config) for config in space.compared(CASE)]
    content = recorded({names[0]: 10.0, names[1]: 99.0})
    content["runs"][0]["configs"].append(names[2])
    content["runs"][0]["places"][space.key(CASE)]["over"] += space.NOT_RUN
    path.write_text(json.dumps(content))
    kept = space.resumed(path, origin, 132)
    assert kept == content
    todo = space.unmeasured(kept)
    assert [space.name_of(config) for config in todo[CASE]] == names[3:]
    assert set(todo) == set(space.cases()) and todo[256, 6144, 4096] == space.compared((256, 6144, 4096))
    assert list(todo) == space.cases()
    place = content["runs"][0]["places"][space.key(CASE)]
    content["runs"][0]["configs"], place["over"] = names, "0" * (len(names) - 1) + space.NOT_ASKED
    assert [space.name_of(config) for config in space.unmeasured(content)[CASE]] == names[-1:]
    place["over"] = "0" * len(names)
    assert CASE not in space.unmeasured(content)
    anew = space.resumed(path, origin | {"device": "NVIDIA H100"}, 132)
    assert (
        anew
        == {"device": "NVIDIA H100", "sms": 132, "runs": []}
        == space.resumed(tmp_path / "none.json", origin | {"device": "NVIDIA H100"}, 132)
    )


@pytest.mark.parametrize("case", [(16, 3584, 3584), (256, 3584, 3584)])
def test_what_is_compiled_ahead_is_what_a_launch_loads(monkeypatch, case):
    """A case's sources and macros, without a GPU."""
    from repro.kernels import nvrtc

    loaded, function = [], nvrtc.Function.__new__(nvrtc.Function)
    vars(function).update(_driver=None, _index=0, _function=None, _shared=0, digest="")

    def load(source, name, macros, device, shared):
        loaded.append((source, macros))
        return function

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(nvrtc, "load", load)
    x = torch.empty(case[0], case[2], dtype=torch.bfloat16)
    configs = space.tried(case)[::5]
    for config in configs:
        w4a16_gemm.prepared(x, *space.FORM[:2], *case[1:], space.FORM[2], config)
    assert loaded == list(space.sources(case, configs))


def test_tiles_of_256_tokens_are_for_devices_with_wgmma_and_more_than_64_tokens(monkeypatch):
    monkeypatch.setattr(w4a16_choice, "launch_config", lambda *_: None)
    configs = {m: w4a16_choice.configuration(m, 28672, 4096, 4, "cpu") for m in (16, 64, 129, 256, 600)}
    assert [m for m, config in configs.items() if "PAIR" in config] == [129, 256, 600]
    monkeypatch.setattr(w4a16_choice, "processors", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "MT" in w4a16_choice.configuration(256, 28672, 4096, 4, "cuda")
