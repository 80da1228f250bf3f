"""Tuning: every configuration is checked, the fastest is recorded, a device without a file has its heuristic."""

import json

import pytest
import torch
from fake_device import Fake

from repro.__main__ import main
from repro.bench.commands import tune
from repro.bench.commands.tune import TUNABLE
from repro.bench.kernel_list import load
from repro.bench.timing import Task
from repro.errors import UserError

COSTS = {1: 3e-6, 2: 2e-6, 4: 1e-6, 8: 0.5e-6, 16: 1.995e-6}  # 8 is the fastest, and wrong
SPACE = [{"warps": w} for w in COSTS]


def tunable(fake, space=SPACE):
    def make(place):
        torch.manual_seed(place)
        return {"x": torch.randn(2, 32), "weight": torch.randn(place, 32)}

    def task(place, inputs, config):
        def launch(x, weight):
            y = torch.empty(2, place)
            wrong = 1.1 if config["warps"] == 8 else 1.0
            fake.run(lambda: y.copy_(wrong * x @ weight.T), COSTS[config["warps"]])
            return y

        return Task("", launch, inputs, lambda x, weight: x @ weight.T, 1e-5)

    def at(place):
        inputs = make(place)
        return lambda config: task(place, inputs, config)

    return [tune.Place(f"{place}x32", space, lambda place=place: at(place)) for place in (16, 48)]


def test_the_fastest_right_configuration_wins():
    fake, said = Fake(), []
    best = tune.sweep("toy", tunable(fake), fake, said.append)
    assert best == {"16x32": {"warps": 4}, "48x32": {"warps": 4}}
    assert "toy 48x32: 1.00 us" in said[1] and "4 of 5 run" in said[1]


def test_a_tie_goes_to_the_first():
    fake = Fake()
    space = [{"warps": 2}, {"warps": 16}]  # 16 is a quarter of a percent faster
    assert tune.sweep("toy", tunable(fake, space), fake, str)["16x32"] == {"warps": 2}


def test_nothing_that_runs_is_said():
    fake = Fake()
    with pytest.raises(UserError, match="no configuration of toy runs at 16x32: .*off by"):
        tune.sweep("toy", tunable(fake, [{"warps": 8}]), fake, str)


def test_merge_keeps_what_it_did_not_sweep_and_is_one_line_a_configuration(tmp_path):
    path = tmp_path / "configs" / "nvidia-test.json"
    tune.merge(path, "toy", {"a": {"warps": 4}, "b": {"warps": 2}})
    tune.merge(path, "other", {"c": {"block": 64}})
    tune.merge(path, "toy", {"b": {"warps": 8}})
    text = path.read_text()
    assert json.loads(text) == {"toy": {"a": {"warps": 4}, "b": {"warps": 8}}, "other": {"c": {"block": 64}}}
    assert tune.read(path) == json.loads(text) and '    "b": {"warps": 8}\n' in text
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("text", ["{", "[]", '{"toy": 3}', '{"toy": {"a": 3}}'])
def test_a_damaged_file_stops_before_the_sweep_and_stays(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(UserError, match="not a file of launch configurations"):
        tune.merge(path, "toy", {"a": {}})
    assert path.read_text() == text


def test_the_launcher_finds_what_tune_wrote(tmp_path, monkeypatch):
    launch_config = pytest.importorskip("repro.kernels.launch_config")
    monkeypatch.setattr(launch_config, "FOLDER", tmp_path)
    launch_config.configurations.cache_clear()
    tune.merge(tmp_path / "cpu.json", "toy", {"48x32": {"warps": 4}})
    assert launch_config.launch_config("toy", "48x32", "cpu") == {"warps": 4}
    assert launch_config.launch_config("toy", "16x32", "cpu") is None
    launch_config.configurations.cache_clear()


def test_a_device_without_a_file_says_so(tmp_path, monkeypatch):
    launch_config = pytest.importorskip("repro.kernels.launch_config")
    monkeypatch.setattr(launch_config, "FOLDER", tmp_path)
    launch_config.configurations.cache_clear()
    with pytest.warns(UserWarning, match="no launch configurations for nvidia-test"):
        assert launch_config.configurations("nvidia-test") == {}
    launch_config.configurations.cache_clear()


@pytest.mark.parametrize("name", TUNABLE)
def test_tune_writes_under_the_keys_of_the_recorded_files(name):
    """What is in `kernels/configs` can be made again, key by key, and no two places share a key."""
    if reason := cannot_import(name):
        pytest.skip(reason)
    places = TUNABLE[name]()
    keys = [place.key for place in places]
    assert len(set(keys)) == len(keys) and all(len(place.space) > 1 for place in places)
    for path in tune.FOLDER.glob("*.json"):
        assert set(tune.read(path).get(name, {})) <= set(keys), path.name


def cannot_import(name):
    try:
        return None if hasattr(load(name), "SPACE") else f"{name} has no SPACE"
    except ImportError as error:
        return str(error)


@pytest.mark.parametrize(
    "words, said",
    [
        (["tune", "wna16_gemm"], "unknown kernel 'wna16_gemm'; did you mean"),
        (["tune", "quantize_activation"], "launched in one way only"),
        (["tune", "read_floor"], "no CUDA device"),
    ],
)
def test_bad_input_is_a_sentence(words, said, capsys):
    if torch.cuda.is_available() and said == "no CUDA device":
        pytest.skip("there is one")
    assert main(words) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_gemlite_tunes_itself_where_nothing_is_recorded(tmp_path, monkeypatch):
    """Its own tuner runs at a first launch; what it found is added to the file that `bench` loads."""
    import sys
    import types

    from repro.bench import peers

    launched, known = [], {"GEMM": {"(64, 48, 64, 128, 8, 104)": {"num_warps": 4}}}

    class Linear:
        @staticmethod
        def cache_config(name):
            found = {str((m, n, k, 128, 8, 104)): {"num_warps": 8} for n, k, m in launched}
            with open(name, "w") as file:
                json.dump({"GEMV": {}, "GEMM": known["GEMM"] | found}, file)

    core = types.SimpleNamespace(GemLiteLinear=Linear)
    monkeypatch.setitem(sys.modules, "gemlite", types.SimpleNamespace(core=core))
    monkeypatch.setattr(peers, "no_gemlite", lambda device: None)
    monkeypatch.setattr(
        peers,
        "gemlite_configuration",
        lambda bits, group, layer, m: known["GEMM"].get(f"({m}, {layer.rows}, 64, 128, 8, 104)"),
    )
    path, said = tmp_path / "gemlite.json", []

    def task(bits, group, layer, m):
        return {"x": m}, lambda x: launched.append((layer.rows, layer.columns, x)), None

    monkeypatch.setattr(peers, "gemlite_task", task)
    assert tune.gemlite([(48, 64, 64), (48, 64, 8), (48, 64, 512)], [(4, 128)], path, said.append) == path
    assert launched == [(48, 64, 8)] and said == ["gemlite W4 g128, 48 x 64, M = 8"]
    assert tune.read(path) == {"GEMM": known["GEMM"] | {"(8, 48, 64, 128, 8, 104)": {"num_warps": 8}}}
    monkeypatch.setattr(peers, "no_gemlite", lambda device: "needs the package gemlite==1")
    with pytest.raises(UserError, match="gemlite needs the package"):
        tune.gemlite([], path=path)
