"""Figures: titles that fit, panels without measurements, ticks where there are points, series that stand out."""

import re

import pytest

from repro.render import plot

LONG = "Damage by quantizing one layer at a time, skip-one loss against CKA damage. Scale some-full-name"


def one(*points):
    return [(x, y, None, None) for x, y in points]


def drawn(path, panels, title="t", **more) -> str:
    plot.lines(panels, title, "x", "y", path, **more)
    return path.read_text(encoding="utf-8")


def texts(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def test_a_title_is_broken_between_words(tmp_path):
    """At its width of 5.2 inches a line of 9 points holds some 70 characters; a hyphen is no place to break."""
    result = texts(drawn(tmp_path / "f.svg", {"m": {"a": one((1, 2))}}, LONG))
    lines = [text for text in result if text in LONG and len(text) > 5]
    assert " ".join(lines) == LONG and max(map(len, lines)) <= 5.2 * plot.CHARACTERS
    assert "full" not in lines, "a name with hyphens stays whole"


def test_an_unmeasured_panel_has_no_ticks_and_an_unmeasured_figure_says_so(tmp_path):
    result = texts(drawn(tmp_path / "f.svg", {"m": {"a": one((1, 2), (3, 4))}, "n": {"a": []}}))
    assert result.count("not measured") == 1 and not any("0.0" in text or "0.5" in text for text in result)
    result = texts(drawn(tmp_path / "g.svg", {"m": {"a": []}}, LONG))
    assert " ".join(result) == f"{LONG}: not measured"


@pytest.mark.parametrize("last, ticks", [(4, {"1", "2", "3", "4"}), (90, {"20", "40", "60", "80"})])
def test_ticks_are_where_points_are(tmp_path, last, ticks):
    """Quartiles have no tick at 1.5, and layers none at 2.5."""
    points = one(*((x, 0.003 * x) for x in range(1, last + 1)))
    result = {text for text in texts(drawn(tmp_path / "f.svg", {"m": {"a": points}})) if text.isdecimal()}
    assert ticks <= result and "1.5" not in texts(drawn(tmp_path / "f.svg", {"m": {"a": points}}))


def test_leading_series_stand_out_and_the_others_are_grey(tmp_path):
    series = {name: one((1, i), (2, i + 1)) for i, name in enumerate("abcd")}
    looks = {name: plot._look(list(series), name, ["c", "a"]) for name in series}
    assert looks["c"]["linewidth"] > 1.5 * looks["a"]["linewidth"] > looks["b"]["linewidth"]
    assert looks["b"]["color"] == looks["d"]["color"] == "0.65" and looks["c"]["color"] == plot.PALETTE[0]
    assert len({look["marker"] for look in looks.values()}) == 4
    assert "stroke-width: 2.4" in drawn(tmp_path / "f.svg", {"m": series}, lead=["c", "a"])


def test_a_broken_axis_leaves_out_what_is_empty(tmp_path):
    heights = [12, 15, 40, 42, 45, 50, 51, 52, 53, 60]
    low, high = plot._gap(heights)
    assert 15 < low < 20 and 35 < high < 40
    assert plot._gap([40, 42, 45, 50]) is None and plot._gap([]) is None, "no gap"
    assert plot._gap([10, 11, 12, 50, 51]) is None, "most lie below it"
    panels = {"m": {"a": one(*enumerate(heights[2:])), "b": one((0, 12), (1, 15))}}
    whole, broken = (texts(drawn(tmp_path / "f.svg", panels, broken=b)) for b in (False, True))
    assert "30" in whole and "30" not in broken


def test_a_legend_names_what_is_not_measured_and_is_as_wide_as_its_figure(tmp_path):
    names = [f"FlexQuant at best, {i} layers a switch" for i in range(6)]
    panels = {"m": {name: one((1, i)) if i else [] for i, name in enumerate(names)}}
    result = texts(drawn(tmp_path / "f.svg", panels))
    assert f"{names[0]}: not measured" in result and set(names[1:]) <= set(result)
    figure = plot.plt.figure(figsize=(5.2, 2.8), layout="constrained")
    plot._legend(figure, figure.add_subplot().plot([[0] * 6, [1] * 6]), names)
    assert figure.legends[0].get_window_extent().width <= figure.bbox.width and len(figure.legends) == 1
    assert figure.get_size_inches()[1] > 2.8 + 6 / 2 * 0.15, "the panels keep their height"
    plot.plt.close(figure)


def test_ticks_do_not_overlap(tmp_path):
    points = one(*((x, x) for x in (250, 500, 1000, 2000, 3000, 4000, 6000, 7800)))
    assert not {"250", "500"} & set(texts(drawn(tmp_path / "f.svg", {"m": {"a": points}})))


def test_bars_of_times_have_no_line_at_one_and_without_any_say_so(tmp_path):
    def bars(name, points, **more):
        plot.bars({"": {"a": points}}, LONG, "layer", "microseconds", tmp_path / name, **more)
        return (tmp_path / name).read_text(encoding="utf-8")

    points = [("512x2048", 3.0, None, None)]
    line = "stroke: #333333"
    assert line in bars("f.svg", points) and line not in bars("g.svg", points, ratios=False)
    assert " ".join(texts(bars("h.svg", []))) == f"{LONG}: not measured"


def test_bars_of_every_panel_are_drawn_with_their_values_and_what_can_be_seen_of_intervals(tmp_path):
    panels = {
        "13B": {"W4": [("2", 2.62, 2.61, 2.63), ("4", 3.0, None, None)], "naive": [("2", 61.8, 24.2, 99.3)]},
        "70B": {"W4": [("2", 7.53, 7.5, 7.6)]},
        "7B": {"W4": []},
    }
    plot.bars(panels, "Latency", "ranks", "ms", tmp_path / "f.svg", ratios=False)
    svg = (tmp_path / "f.svg").read_text(encoding="utf-8")
    words = texts(svg)
    assert {"13B", "70B", "2.62", "3.00", "61.8", "7.53"} <= set(words) and "7B" not in words
    whiskers = re.search(r"[.](s\d+)[{]fill: none; stroke: #333333", svg)
    assert svg.count(f'class="{whiskers[1]}"') == 1  # of 61.8; the others are narrower than a line
    plot.bars(panels, "Latency", "ranks", "ms", tmp_path / "g.svg")
    assert "61.8" not in texts((tmp_path / "g.svg").read_text(encoding="utf-8"))  # ratios have the line at 1


def test_the_highest_point_of_a_logarithmic_axis_has_room_above_it(tmp_path, monkeypatch):
    drawn_axes = []
    monkeypatch.setattr(plot, "save", lambda figure, path: drawn_axes.extend(figure.axes))
    panels = {"m": {"a": [(1e-4, -2e-4, None, None), (1e-2, 0.14, None, None)]}}
    plot.loglog(panels, "t", "x", "y", tmp_path / "f.svg")
    low, high = drawn_axes[0].get_ylim()
    assert high > 1.5 * 0.14 and low < -2e-4
