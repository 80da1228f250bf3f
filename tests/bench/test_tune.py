"""Tuning: every configuration is checked, the fastest is recorded, a device without a file has its heuristic."""

import contextlib
import dataclasses
import inspect
import itertools
import json
import multiprocessing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_device import Fake

from repro.__main__ import main
from repro.bench import tune
from repro.bench.kernel_list import load
from repro.bench.timing import Task
from repro.bench.tune import TUNABLE
from repro.core.errors import UserError
from repro.kernels import launch_config, w4a16_choice, w4a16_tiles

COSTS = {1: 3e-6, 2: 2e-6, 4: 1e-6, 8: 0.5e-6, 16: 1.995e-6}  # 8 is the fastest, and wrong
SPACE = [{"warps": w} for w in COSTS]


def interrupted(point):
    """The same point of a sweep, of which Ctrl-C comes before anything is measured."""

    def prepare():
        raise KeyboardInterrupt

    return dataclasses.replace(point, prepare=prepare)


def tunable(fake, space=SPACE):
    def make(rows):
        torch.manual_seed(rows)
        return {"x": torch.randn(2, 32), "weight": torch.randn(rows, 32)}

    def task(rows, inputs, config):
        def launch(x, weight):
            y = torch.empty(2, rows)
            wrong = 1.1 if config["warps"] == 8 else 1.0
            fake.run(lambda: y.copy_(wrong * x @ weight.T), COSTS[config["warps"]])
            return y

        return Task("", launch, inputs, lambda x, weight: x @ weight.T, 1e-5)

    def at(rows):
        inputs = make(rows)
        return lambda config: [task(rows, inputs, config)]

    return [tune.TuningPoint(f"{rows}x32", space, lambda rows=rows: at(rows)) for rows in (16, 48)]


def test_the_fastest_right_configuration_wins():
    fake, lines = Fake(), []
    best = [(point.key, config) for point, config in tune.sweep("toy", tunable(fake), fake, lines.append)]
    assert best == [("16x32", {"warps": 4}), ("48x32", {"warps": 4})]
    assert "toy 48x32: 1.00 us" in lines[1] and "4 of 5 run" in lines[1]


def test_a_tie_goes_to_the_first():
    fake = Fake()
    space = [{"warps": 2}, {"warps": 16}]  # 16 is a quarter of a percent faster
    assert next(tune.sweep("toy", tunable(fake, space), fake, str))[1] == {"warps": 2}


def of_two_types(fake, costs, wrong=()):
    """A point whose configurations cost other seconds in each type; those of (warps, type) in `wrong` are wrong."""
    weight = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))

    def task(warps, dtype):
        def launch(x, weight):
            y = torch.empty(2, 16)
            factor = 1.1 if (warps, dtype) in wrong else 1.0
            fake.run(lambda: y.copy_(factor * x.float() @ weight.T), costs[warps][dtype])
            return y

        x = torch.randn(2, 32, generator=torch.Generator().manual_seed(2)).to(getattr(torch, dtype))
        return Task("", launch, {"x": x, "weight": weight}, lambda x, weight: x.float() @ weight.T, 1e-5)

    space = [{"warps": warps} for warps in costs]
    tasks = lambda config: [task(config["warps"], dtype) for dtype in tune.BOTH_TYPES]  # noqa: E731
    return tune.TuningPoint("16x32", space, lambda: tasks, tune.BOTH_TYPES)


COSTS_BY_TYPE = {  # seconds; the geometric means are 2.83, 2.83 and 2.74 us, the sums 6, 6 and 5.5
    1: {"float16": 2e-6, "bfloat16": 4e-6},
    2: {"float16": 4e-6, "bfloat16": 2e-6},
    4: {"float16": 2.5e-6, "bfloat16": 3e-6},
}


def test_what_is_fastest_in_both_types_together_wins():
    """Neither the fastest in float16 nor the one in bfloat16."""
    fake, lines = Fake(), []
    ((_, best),) = tune.sweep("toy", [of_two_types(fake, COSTS_BY_TYPE)], fake, lines.append)
    assert best == {"warps": 4}
    assert "toy 16x32: 2.74 us (geometric mean of float16 and bfloat16)" in lines[0] and "3 of 3 run" in lines[0]


def test_of_two_types_the_ratio_counts():
    """Twice as fast in the quick type outweighs a third slower in the slow one, whose sum is larger."""
    costs = {1: {"float16": 2e-6, "bfloat16": 9e-6}, 2: {"float16": 1e-6, "bfloat16": 12e-6}}
    fake = Fake()
    assert next(tune.sweep("toy", [of_two_types(fake, costs)], fake, str))[1] == {"warps": 2}


def test_a_configuration_that_is_wrong_in_one_type_is_left_out():
    fake, lines = Fake(), []
    point = of_two_types(fake, COSTS_BY_TYPE, wrong={(4, "float16"), (2, "bfloat16")})
    assert next(tune.sweep("toy", [point], fake, lines.append))[1] == {"warps": 1}
    assert "1 of 3 run" in lines[0]
    both = set(itertools.product(COSTS_BY_TYPE, tune.BOTH_TYPES))
    with pytest.raises(UserError, match='runs at 16x32: {"warps": 1} float16: .*off by'):
        list(tune.sweep("toy", [of_two_types(fake, COSTS_BY_TYPE, both)], fake, str))


def test_of_a_large_space_both_types_are_timed_again(monkeypatch):
    monkeypatch.setattr(tune, "AT_ONCE", 2)
    timed, measure = [], tune.timing.measure

    def counted(tasks, *arguments, **more):
        timed.append(([task.name for task in tasks], more["rounds"]))
        return measure(tasks, *arguments, **more)

    monkeypatch.setattr(tune.timing, "measure", counted)
    fake = Fake()
    assert next(tune.sweep("toy", [of_two_types(fake, COSTS_BY_TYPE)], fake, str))[1] == {"warps": 4}
    first, second, third = (
        [f'{{"warps": {warps}}} float16', f'{{"warps": {warps}}} bfloat16'] for warps in COSTS_BY_TYPE
    )
    assert timed[:2] == [([*first, *second], 3), (third, 3)]
    assert timed[2][1] == 9 and timed[2][0] in ([*first, *third], [*second, *third])


@pytest.mark.parametrize("name", ["w8a8_gemv", "w8a8_gemm"])
def test_w8a8_is_timed_in_both_types_of_activations(name, monkeypatch):
    """Those of x, or of y where activations are codes; all that a launch needs is made once for each type."""
    if reason := cannot_import(name):
        pytest.skip(reason)
    module, launched = load(name), []
    make_inputs, launch = module.make_inputs, module.launch

    def launch_on_a_cpu(*arguments, **given):
        launched.append(given)

    launch_on_a_cpu.__signature__ = inspect.signature(launch)
    monkeypatch.setattr(module, "make_inputs", lambda case, device: make_inputs(case | {"N": 16, "K": 32}))
    monkeypatch.setattr(module, "launch", launch_on_a_cpu)
    for point in TUNABLE[name]():
        assert point.types == ("float16", "bfloat16")
    tasks = point.prepare()(point.space[0])
    for task in tasks:
        task.launch(**task.inputs)
    values = [given["dtype"] if name == "w8a8_gemm" else given["x"].dtype for given in launched]
    assert values == [torch.float16, torch.bfloat16]
    assert all(given["config"] == point.space[0] for given in launched)
    for name in sorted(set(TUNABLE) - {"w8a8_gemv", "w8a8_gemm"}):
        if cannot_import(name) is None:
            assert all(point.types == ("",) for point in TUNABLE[name]()), name


def test_of_a_large_space_the_fastest_are_timed_again(monkeypatch):
    monkeypatch.setattr(tune, "AT_ONCE", 2)
    rounds, measure = [], tune.timing.measure

    def counted(tasks, *arguments, **more):
        rounds.append(([task.name for task in tasks], more["rounds"]))
        return measure(tasks, *arguments, **more)

    monkeypatch.setattr(tune.timing, "measure", counted)
    space, lines = [{"warps": w} for w in (16, 1, 4, 2)], []
    assert next(tune.sweep("toy", tunable(fake := Fake(), space), fake, lines.append))[1] == {"warps": 4}
    names = [json.dumps(config) for config in space]
    assert rounds == [(names[:2], 3), (names[2:], 3), ([names[0], names[2]], 9)]  # in the order of the space
    assert "4 of 4 run" in lines[0]


def test_what_is_compiled_by_a_sweep_is_compiled_beforehand(monkeypatch):
    """Calls that need a kernel which is not in memory name it, and launch nothing."""
    from repro.kernels import nvrtc

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(nvrtc, "_LOADED", {})
    launched, submitted = [], []

    def task(warps):
        def launch(x):
            nvrtc.load(Path("toy.cu"), "toy", {"WARPS": warps}, torch.device("cuda", 0))
            launched.append(warps)

        return Task("", launch, {"x": 1}, None)

    class Pool:
        def submit(self, function, job):
            submitted.append((function, job))
            return SimpleNamespace(exception=lambda: None)

    monkeypatch.setattr(nvrtc, "compile_cubin", lambda *arguments: submitted.append(arguments))
    tune.compile_ahead([task(4), task(8), task(4)], Pool())
    jobs = [(Path("toy.cu"), (("WARPS", warps),), "sm_90a") for warps in (4, 8)]
    assert submitted == [(nvrtc.compile_job, job) for job in jobs] and not launched
    nvrtc.compile_job(jobs[0])
    assert submitted[-1] == (Path("toy.cu"), {"WARPS": 4}, "sm_90a")
    monkeypatch.setattr(nvrtc, "Function", lambda *arguments: "loaded")
    assert nvrtc.load(Path("toy.cu"), "toy", {"WARPS": 4}, torch.device("cuda", 0)) == "loaded"


def test_a_layer_is_swept_by_itself():
    points = [tune.TuningPoint(key, SPACE, lambda: None) for key in ("w4 m1 512x2048", "w8 m1 4096x512", "512x2048")]
    points += [tune.TuningPoint("16x512x2048", SPACE, lambda: None)]
    assert tune.of_layers(points, []) == points
    assert tune.of_layers(points, [(512, 2048)]) == [points[0], *points[2:]]
    with pytest.raises(UserError, match="unknown layer '12x2048'"):
        tune.of_layers(points, [(12, 2048)])


def test_nothing_that_runs_is_said():
    fake = Fake()
    with pytest.raises(UserError, match="no configuration of toy runs at 16x32: .*off by"):
        list(tune.sweep("toy", tunable(fake, [{"warps": 8}]), fake, str))


def test_a_sweep_writes_as_it_goes_and_goes_on_where_it_was_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(tune, "DONE", tmp_path / "done")
    path, fake, lines = tmp_path / "nvidia-test.json", Fake(), []
    first, second = tunable(fake)
    cut = interrupted(second)
    with pytest.raises(KeyboardInterrupt):
        tune.swept("toy", [first, cut], fake, path, lines.append)
    assert tune.read(path) == {"toy": {"16x32": {"warps": 4}}}
    other_space = dataclasses.replace(first, space=SPACE[:2])
    for points, wanted in (([first, second], ["48x32"]), ([first, second], ["16x32", "48x32"])):
        lines.clear()
        tune.swept("toy", points, fake, path, lines.append)
        assert [line.split()[1].rstrip(":") for line in lines if " us, " in line] == wanted
    assert tune.read(path)["toy"] == {"16x32": {"warps": 4}, "48x32": {"warps": 4}}
    with pytest.raises(KeyboardInterrupt):
        tune.swept("toy", [first, cut], fake, path, lines.append)
    lines.clear()
    tune.swept("toy", [other_space, second], fake, path, lines.append)
    assert sum(" us, " in line for line in lines) == 2, "another space is swept anew"
    with pytest.raises(KeyboardInterrupt):
        tune.swept("toy", [first, cut], fake, path, lines.append)
    lines.clear()
    in_bfloat16 = dataclasses.replace(first, types=("bfloat16",))
    tune.swept("toy", [in_bfloat16, second], fake, path, lines.append)
    assert sum(" us, " in line for line in lines) == 2, "what was timed in another type is swept anew"


def test_a_layer_that_is_swept_meanwhile_leaves_what_a_cut_sweep_has_done(tmp_path, monkeypatch):
    monkeypatch.setattr(tune, "DONE", tmp_path / "done")
    path, fake, lines = tmp_path / "nvidia-test.json", Fake(), []
    first, second = tunable(fake)
    third = dataclasses.replace(second, key="64x32")
    cut = interrupted(second)
    with pytest.raises(KeyboardInterrupt):
        tune.swept("toy", [first, cut, third], fake, path, lines.append)
    tune.swept("toy", [third], fake, path, lines.append)
    lines.clear()
    tune.swept("toy", [first, second, third], fake, path, lines.append)
    assert [line.split()[1].rstrip(":") for line in lines if " us, " in line] == ["48x32", "64x32"]
    assert not any((tmp_path / "done").rglob("*.json"))


def test_merge_keeps_what_it_did_not_sweep_and_is_one_line_a_configuration(tmp_path):
    path = tmp_path / "configs" / "nvidia-test.json"
    tune.merge(path, "toy", {"a": {"warps": 4}, "b": {"warps": 2}})
    tune.merge(path, "other", {"c": {"block": 64}})
    tune.merge(path, "toy", {"b": {"warps": 8}})
    text = path.read_text()
    assert json.loads(text) == {"toy": {"a": {"warps": 4}, "b": {"warps": 8}}, "other": {"c": {"block": 64}}}
    assert tune.read(path) == json.loads(text) and '    "b": {"warps": 8}\n' in text
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def merge_one_by_one(path, start, keys):
    """What one of several processes does that tune the same device at once."""
    start.wait()
    for key in keys:
        tune.merge(path, "toy", {key: {"warps": 4}})


def test_of_two_processes_that_tune_at_once_no_winner_is_lost(tmp_path):
    path = tmp_path / "nvidia-test.json"
    context = multiprocessing.get_context("fork")
    start = context.Barrier(2)
    keys, writers = [], []
    for rows in (16, 48):
        of_writer = [f"{rows}x{columns}" for columns in range(25)]
        writers.append(context.Process(target=merge_one_by_one, args=(path, start, of_writer)))
        keys += of_writer
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert sorted(tune.read(path)["toy"]) == sorted(keys)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_sweep_during_another_keeps_what_both_have_done(tmp_path, monkeypatch):
    """The first ends well, which forgets its own points alone."""
    monkeypatch.setattr(tune, "DONE", tmp_path / "done")
    path, fake, lines = tmp_path / "nvidia-test.json", Fake(), []
    first, second = tunable(fake)
    third = dataclasses.replace(second, key="64x32")
    cut = interrupted(second)

    def during_another():
        with pytest.raises(KeyboardInterrupt):
            tune.swept("toy", [third, cut], fake, path, lines.append)
        return first.prepare()

    tune.swept("toy", [dataclasses.replace(first, prepare=during_another)], fake, path, lines.append)
    assert tune.read(path)["toy"] == {"16x32": {"warps": 4}, "64x32": {"warps": 4}}
    lines.clear()
    tune.swept("toy", [second, third], fake, path, lines.append)
    assert [line.split()[1].rstrip(":") for line in lines if " us, " in line] == ["48x32"]
    assert not any((tmp_path / "done").rglob("*.json"))


@pytest.mark.parametrize("text", ["{", "[]", '{"toy": 3}', '{"toy": {"a": 3}}'])
def test_a_damaged_file_stops_before_the_sweep_and_stays(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(UserError, match="not a file of launch configurations"):
        tune.merge(path, "toy", {"a": {}})
    assert path.read_text() == text


def test_a_file_that_cannot_be_read_is_not_called_damaged(tmp_path):
    path = tmp_path / "nvidia-test.json"
    path.mkdir()
    with pytest.raises(UserError, match=r"nvidia-test.json: cannot be read \(Is a directory\)"):
        tune.merge(path, "toy", {"a": {}})


def test_the_launcher_finds_what_tune_wrote(tmp_path, monkeypatch):
    monkeypatch.setattr(launch_config, "FOLDER", tmp_path)
    launch_config.configurations.cache_clear()
    tune.merge(tmp_path / "cpu.json", "toy", {"48x32": {"warps": 4}})
    assert launch_config.launch_config("toy", "48x32", "cpu") == {"warps": 4}
    assert launch_config.launch_config("toy", "16x32", "cpu") is None
    launch_config.configurations.cache_clear()


def test_a_device_without_a_file_says_so_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(launch_config, "FOLDER", tmp_path)
    launch_config.configurations.cache_clear()
    for _ in range(2):
        assert launch_config.configurations("nvidia-test") == {}
    assert [record.message for record in caplog.records] == [
        "no launch configurations for nvidia-test (kernels/configs/nvidia-test.json); using heuristics"
    ]
    launch_config.configurations.cache_clear()


def test_a_card_like_a_tuned_one_takes_its_configurations_and_the_log_says_so_once(tmp_path, monkeypatch, caplog):
    """H100 and H200 have one architecture and as many SMs; what was tuned on the card itself goes before."""
    monkeypatch.setattr(launch_config, "FOLDER", tmp_path)
    names = {0: "NVIDIA H100 80GB HBM3", 1: "NVIDIA H100 PCIe", 2: "NVIDIA H200"}
    facts = {0: (9, 0, 132), 1: (9, 0, 114), 2: (9, 0, 132)}

    def properties(index):
        return SimpleNamespace(**dict(zip(("major", "minor", "multi_processor_count"), facts[index])))

    for name, fake in {"is_available": lambda: True, "device_count": lambda: 3, "get_device_properties": properties,
                       "get_device_name": lambda device: names[torch.device(device).index]}.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, fake)
    launch_config._slug.cache_clear()
    tune.merge(tmp_path / "nvidia-h200.json", "toy", {"a": {"warps": 4}, "b": {"warps": 2}})
    tune.merge(tmp_path / "nvidia-h200.json", "other", {"a": {"warps": 1}})
    tune.merge(tmp_path / "nvidia-h100-80gb-hbm3.json", "toy", {"b": {"warps": 8}, "c": {"warps": 6}})
    configs = {}
    for index in names:
        launch_config.configurations.cache_clear()
        configs[index] = [launch_config.launch_config("toy", key, f"cuda:{index}") for key in ("a", "b", "c")]
        configs[index].append(launch_config.launch_config("other", "a", f"cuda:{index}"))
    assert configs[0] == [{"warps": 4}, {"warps": 8}, {"warps": 6}, {"warps": 1}]
    assert configs[1] == [None] * 4
    assert configs[2] == [{"warps": 4}, {"warps": 2}, {"warps": 6}, {"warps": 1}]
    messages = [record.message for record in caplog.records]
    of_h100, of_pcie, of_h200 = messages
    assert of_h100 == "launch configurations of nvidia-h200 for nvidia-h100-80gb-hbm3: same architecture, as many SMs"
    assert of_pcie.startswith("no launch configurations for nvidia-h100-pcie")
    assert "of nvidia-h100-80gb-hbm3 for nvidia-h200" in of_h200
    launch_config._slug.cache_clear()
    launch_config.configurations.cache_clear()


@pytest.mark.parametrize("name", [name for name in TUNABLE if name != w4a16_choice.HEAD])  # which records tokens alone
def test_every_recorded_configuration_is_in_the_space(name):
    for path in tune.FOLDER.glob("*.json"):
        for key, config in tune.read(path).get(name, {}).items():
            assert config in module_of(name).SPACE, (path.name, key)


def test_the_bits_are_in_the_key_of_every_weight():
    """W2 and W8 do not run what was tuned for W4."""
    recorded = tune.read(tune.FOLDER / "nvidia-h200.json")
    assert all(key.startswith("w4 m") for key in recorded["w4a16_gemm"])
    assert all(key.startswith("w4 ") or key == "default" for key in recorded["linear"])
    case = {"M": 64, "N": 4096, "K": 4096}
    keys = [w4a16_choice.tuning_key(case | {"bits": bits}) for bits in (2, 4, 8)]
    assert keys == [f"w{bits} m64 4096x4096" for bits in (2, 4, 8)] and keys[1] in recorded["w4a16_gemm"]


@pytest.mark.parametrize("name", TUNABLE)
def test_tune_writes_under_the_keys_of_the_recorded_files(name):
    """What is in `kernels/configs` can be made again, key by key, and no two points share one."""
    if reason := cannot_import(name):
        pytest.skip(reason)
    points = TUNABLE[name]()
    keys = [point.key for point in points]
    assert len(set(keys)) == len(keys) and all(len(point.space) > 1 for point in points)
    for path in tune.FOLDER.glob("*.json"):
        recorded = {(name, key) for key in tune.read(path).get(name, {})}
        assert recorded <= {(name, key) for key in keys}, path.name


@pytest.mark.parametrize("name", TUNABLE)
def test_what_is_recorded_is_tried_again_at_its_key(name):
    if reason := cannot_import(name):
        pytest.skip(reason)
    spaces = {point.key: point.space for point in TUNABLE[name]()}
    for path in tune.FOLDER.glob("*.json"):
        for key, config in tune.read(path).get(name, {}).items():
            assert config in spaces[key], (path.name, key)


def test_w4a16_is_swept_over_the_least_estimates_of_all_its_space():
    """A hundred a key, which 16 cores compile in seconds, on the SMs that there are."""
    from repro.kernels.w4a16_estimates import estimate

    space = load("w4a16_gemm").SPACE
    points = {point.key: point for point in TUNABLE["w4a16_gemm"]()}
    assert {len(point.space) for point in points.values()} == {100}
    for tokens, most in ((8, 16), (12, 48), (48, 96), (128, 256), (160, 192)):
        able = [config for config in space if w4a16_tiles.tokens_of(config) <= most]
        able.sort(key=lambda config: estimate(config, tokens, 4096, 14336, 4, 132))
        assert points[f"w4 m{tokens} 4096x14336"].space == able[:100]


def test_w4a16_is_swept_over_what_a_device_runs(monkeypatch):
    monkeypatch.setattr(tune, "capability_of", lambda device: (8, 0))
    monkeypatch.setattr(tune, "processors", lambda device: 108)
    case = {"M": 64, "N": 4096, "K": 4096, "bits": 4}
    there = tune.w4a16_space(case)
    assert there and not any("WGS" in config or "PAIR" in config for config in there)
    monkeypatch.setattr(tune, "processors", lambda device: 40)
    assert tune.w4a16_space(case) != there


def test_a_sweep_of_w4a16_tries_what_is_chosen_without_a_record():
    """Tiles of as many tokens, or of one of the next numbers that there are, which are trimmed."""
    for point in TUNABLE["w4a16_gemm"]():
        _, tokens, shape = point.key.split()
        assert w4a16_choice.cheapest(int(tokens[1:]), *map(int, shape.split("x"))) in point.space


def test_a_second_launch_is_swept_behind_a_first_one_of_256_tokens(monkeypatch):
    """In the configuration that is tried, at each number of tokens that takes its record."""
    name, launched = w4a16_choice.TAIL, []
    monkeypatch.setattr(tune.linear, "launch_two", lambda x, packed, head, tail=None: launched.append((x, head, tail)))
    make_inputs = load("w4a16_gemm").make_inputs
    monkeypatch.setattr(load("w4a16_gemm"), "make_inputs", lambda case, device: make_inputs(case, "cpu"))
    points = {point.key: point for point in TUNABLE[name]()}
    counts = {int(key.split()[1][1:]) for key in points}
    assert counts == {12, 16, 24, 32, 40, 48, 56, 64}
    point = points["w4 m24 512x2048"]
    (task,) = point.prepare()(point.space[3])
    task.launch(**task.inputs)
    (_, *warmed), (x, *given) = launched
    assert warmed == [256, None] and given == [256, point.space[3]] and x.shape == (280, 2048)
    assert task.want(**task.inputs).shape == (280, 512)
    assert len(point.space) == 100


def test_a_first_launch_is_swept_over_whole_tiles_and_all_tokens(monkeypatch):
    """Two launches with so many tokens in the first, or one in the configuration that is chosen for all."""
    name, launched, module = w4a16_choice.HEAD, [], load("w4a16_gemm")
    monkeypatch.setattr(tune.linear, "launch_two", lambda x, packed, head, tail=None: launched.append((len(x), head)))
    monkeypatch.setattr(module, "launch", lambda x, packed, config: launched.append((len(x), config)))
    make_inputs = module.make_inputs
    monkeypatch.setattr(module, "make_inputs", lambda case, device: make_inputs(case, "cpu"))
    points = {point.key: point for point in TUNABLE[name]()}
    assert {int(key.split()[1][1:]) for key in points} == {288, 312, 320, 352, 360, 376, 384, 448, 456, 512, 640}
    point = points["w4 m360 512x2048"]
    assert point.space == [{"tokens": 0}, {"tokens": 320}, {"tokens": 352}]
    tasks = point.prepare()
    for config in point.space:
        (task,) = tasks(config)
        task.launch(**task.inputs)
    assert launched == [(360, w4a16_choice.configuration(360, 512, 2048, 4, "cpu")), (360, 320), (360, 352)]


@pytest.mark.parametrize("name", ["w2a2_gemv", "w2a2_ready"])
def test_copies_and_loads_are_tried_at_every_shape_and_what_is_recorded_among_them(name):
    if reason := cannot_import(name):
        pytest.skip(reason)
    recorded = tune.read(tune.FOLDER / "nvidia-h200.json")[name]
    for point in TUNABLE[name]():
        assert {config["bulk"] for config in point.space} == {False, True}
        assert point.key not in recorded or recorded[point.key] in point.space


def module_of(name):
    return load(tune.MODULES.get(name, name))


def cannot_import(name):
    try:
        return None if hasattr(module_of(name), "SPACE") else f"{name} has no SPACE"
    except ImportError as error:
        return str(error)


@pytest.mark.parametrize(
    "words, message",
    [
        (["tune", "wna16_gemm"], "unknown kernel 'wna16_gemm'; did you mean"),
        (["tune", "quantize_activation"], "has a single launch configuration"),
        (["tune", "linear"], "linear launches other kernels; tune what it launches: wna16_gemv, w4a16_gemm"),
        (["tune", "read_floor"], "no CUDA device"),
    ],
)
def test_bad_input_is_a_sentence(words, message, capsys):
    if torch.cuda.is_available() and message == "no CUDA device":
        pytest.skip("there is one")
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_gemlite_tunes_itself_where_nothing_is_recorded(tmp_path, monkeypatch):
    """Its own tuner runs at a first launch; what it found is added to the file that `bench` loads."""
    import sys
    import types

    from repro.bench import peers

    launched, known = [], {"GEMM": {"(64, 48, 64, 128, 8, 104)": {"num_warps": 4}}}

    class Linear:
        @staticmethod
        def cache_config(name):
            tuned = {str((m, n, k, 128, 8, 104)): {"num_warps": 8} for n, k, m in launched}
            with open(name, "w") as file:
                json.dump({"GEMV": {}, "GEMM": known["GEMM"] | tuned}, file)

    core = types.SimpleNamespace(GemLiteLinear=Linear)
    monkeypatch.setitem(sys.modules, "gemlite", types.SimpleNamespace(core=core))
    monkeypatch.setattr(peers, "no_gemlite", lambda device: None)
    monkeypatch.setattr(
        peers,
        "gemlite_configuration",
        lambda bits, group, layer, m: known["GEMM"].get(f"({m}, {layer.rows}, 64, 128, 8, 104)"),
    )
    path, lines = tmp_path / "gemlite.json", []

    def task(bits, group, layer, m):
        return {"x": m}, lambda x: launched.append((layer.rows, layer.columns, x)), None

    monkeypatch.setattr(peers, "gemlite_task", task)
    assert tune.gemlite([(48, 64, 64), (48, 64, 8), (48, 64, 512)], [(4, 128)], path, lines.append) == path
    assert launched == [(48, 64, 8)] and lines == ["gemlite W4 g128, 48 x 64, M = 8"]
    assert tune.read(path) == {"GEMM": known["GEMM"] | {"(8, 48, 64, 128, 8, 104)": {"num_warps": 8}}}
    monkeypatch.setattr(peers, "no_gemlite", lambda device: "needs the package gemlite==1")
    with pytest.raises(UserError, match="gemlite needs the package"):
        tune.gemlite([], path=path)
