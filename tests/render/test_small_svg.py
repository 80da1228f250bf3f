"""An SVG in fewer bytes is the same picture: nothing is drawn elsewhere, in another look or order."""

from repro.render import plot, small_svg


def test_coordinates_have_two_decimals_and_text_is_as_it_was():
    svg = (
        '<path d="M 1.23456 -7.8 L 12.000001 3.005"/><text x="0.33333" transform="rotate(-90 1.5555 2)">0.12345</text>'
    )
    want = '<path d="M 1.23 -7.8 L 12 3"/><text x="0.33" transform="rotate(-90 1.56 2)">0.12345</text>'
    assert small_svg.rounded(svg) == want


def test_a_picture_is_written_with_each_style_once_and_a_path_a_line():
    path = '<path d="M 0 1 \nL 2 3.456 \nz\n" style="fill: none; stroke: #123456"/>'
    svg = f"<svg>\n <defs>\n  <style>*{{stroke-linejoin: round}}</style>\n </defs>\n {path}\n {path}\n"
    svg += " <text style=\"font: 9px 'A'\">two  blanks</text>\n</svg>\n"
    want = "<svg>\n<defs>\n<style>*{stroke-linejoin: round}\n"
    want += ".s0{fill: none; stroke: #123456}\n.s1{font: 9px 'A'}</style>\n</defs>\n"
    want += '<path d="M0 1L2 3.46zM0 1L2 3.46z" class="s0"/>\n'
    want += '<text class="s1">two  blanks</text>\n</svg>\n'
    assert small_svg.smaller(svg) == want == small_svg.smaller(want)


def test_a_rectangle_is_written_by_its_sides():
    svg = '<svg><style></style>\n<path d="M 1 9L 5 9L 5 2L 1 2z"/>\n<path d="M 1 9L 5 9L 5 2L 1 2L 1 9"/>\n'
    svg += '<path d="M 1 9L 5 9L 5 2L 1 3z"/>\n</svg>\n'  # no rectangle
    sides = '<path d="M1 9H5V2H1z"/>\n'
    assert small_svg.smaller(svg) == f'<svg><style></style>\n{sides}{sides}<path d="M1 9H5V2L1 3z"/>\n</svg>\n'


def test_a_picture_has_short_names_and_no_group_that_says_nothing():
    svg = '<svg><style></style>\n<defs>\n<path id="m0123456789" d="M 0 1" style="fill: #123456"/>\n</defs>\n'
    svg += (
        '<clipPath id="p012"/>\n<g id="axes_1">\n<g clip-path="url(#p012)">\n<use xlink:href="#m0123456789"/>\n</g>\n'
    )
    svg += 2 * '<path d="M 0 1" style="fill: #123456"/>\n' + "</g>\n<text>#m0123456789</text>\n</svg>\n"
    want = '<svg><style>\n.s0{fill: #123456}</style>\n<defs>\n<path id="i0" d="M0 1" class="s0"/>\n</defs>\n'
    want += '<clipPath id="i1"/>\n<g clip-path="url(#i1)">\n<use xlink:href="#i0"/>\n</g>\n'
    want += 2 * '<path d="M0 1" class="s0"/>\n' + "<text>#m0123456789</text>\n</svg>\n"
    assert small_svg.smaller(svg) == want


HEAD = "<svg><style>*{stroke-linejoin: round}</style>\n"
TICK = '<defs>\n<path id="tick" d="M 0 0 \nL 0 3.5 \n" style="stroke: #000000; stroke-width: 0.8"/>\n</defs>\n'


def body(svg: str) -> str:
    """A picture in fewer bytes, without its head."""
    return small_svg.smaller(HEAD + svg + "</svg>\n").partition("</style>\n")[2].removesuffix("</svg>\n")


def test_a_marker_that_is_a_line_is_drawn_where_it_stands():
    look = 'style="fill: #000000; stroke: #000000; stroke-width: 0.8"'
    uses = f'<use xlink:href="#tick" x="1.5" y="2" {look}/>\n<use xlink:href="#tick" x="-4" y="9.25" {look}/>\n'
    path = '<path d="M1.5 2V5.5M-4 9.25V12.75" '
    assert body(TICK + uses) == path + 'class="s0"/>\n'
    clipped = f'<g clip-path="url(#clip)">\n{uses}</g>\n'
    assert body(TICK + clipped) == path + 'clip-path="url(#clip)" class="s0"/>\n'
    assert body(TICK + 2 * clipped).count("M") == 4 and body(TICK + 2 * clipped).count("<path") == 1


def test_a_marker_that_inherits_a_look_or_is_no_line_stays_a_marker():
    thick = '<use xlink:href="#tick" x="1" y="2" style="stroke: #000000; stroke-opacity: 0.5"/>\n'
    assert "<use" in body(TICK + thick) and 'id="i0"' in body(TICK + thick)
    corner = TICK.replace("L 0 3.5", "L 0 3.5 L 1 1")
    assert "<use" in body(corner + '<use xlink:href="#tick" x="1" y="2" style="stroke: #000000"/>\n')


def test_markers_of_one_look_say_it_once():
    dot = '<defs>\n<path id="dot" d="M 0 1C 1 1 1 0 0 0z" style="stroke: #111111"/>\n</defs>\n'

    def group(*looks: str) -> str:
        uses = [f'<use xlink:href="#dot" x="{x}" y="2" style="fill: {look}"/>\n' for x, look in enumerate(looks)]
        return f'<g clip-path="url(#clip)">\n{"".join(uses)}</g>\n'

    result = body(dot + group("red", "red") + group("red") + group("blue"))
    assert result.count('class="s1"') == 1 and result.count('class="s2"') == 1 and result.count("<use") == 4
    assert result.count("<g ") == 2 and result.index("s1") < result.index("s2")
    mixed = body(dot + group("red", "blue"))
    assert '<g clip-path="url(#clip)">' in mixed and mixed.count("class=") == 3


def test_lines_that_enclose_something_are_not_joined_where_they_are_filled():
    shape = '<path d="M 0 0L 5 0L 5 5" style="fill: #123456"/>\n'
    assert body(2 * shape).count("<path") == 2
    line = '<path d="M 0 0L 5 5" style="stroke: #123456"/>\n'
    assert body(2 * line).count("<path") == 1 and body(line + shape + line).count("<path") == 3


def test_a_line_along_an_axis_is_named_by_what_changes():
    for path, want in {
        "M 1 2L 1 5L 3 5L 4 6L 4 6": "M1 2V5H3L4 6V6",
        "M 1 2L 1 5zL 1 7": "M1 2V5zL1 7",
        "M 0 0C 1 2 3 4 5 6L 5 9": "M0 0C1 2 3 4 5 6L5 9",
        "M 1.004 2L 1 -5": "M1 2V-5",
        "M 1 2 3 2L 1 2": "M1 2 3 2L1 2",
    }.items():
        assert body(f'<path d="{path}"/>\n') == f'<path d="{want}"/>\n'


def test_what_says_nothing_is_left_out():
    text = '<text style="font: 9px" x="1" y="2" transform="rotate(-0 1 2)">transform="rotate(-0 1 2)" M 1 2</text>\n'
    assert body(text) == '<text class="s0" x="1" y="2">transform="rotate(-0 1 2)" M 1 2</text>\n'
    turned = '<text x="1" y="2" transform="rotate(-90 1 2)">a</text>\n'
    assert body(turned) == turned
    doctype = '<!DOCTYPE svg PUBLIC "-//W3C//DTD SVG 1.1//EN"\n  "http://www.w3.org/Graphics/SVG/1.1/DTD/svg11.dtd">\n'
    assert small_svg.smaller(f"<?xml?>\n{doctype}<svg/>\n") == "<?xml?>\n<svg/>\n"


def test_the_font_of_most_texts_is_named_once():
    family = "font-family: 'A B', serif"
    styles = [f"font-size: 9px; {family}", f"{family}; text-anchor: end", f"a: 1; {family}; b: 2", "font-family: C"]
    texts = "".join(f'<text style="{style}">x</text>\n' for style in styles)
    rules = small_svg.smaller(f"{HEAD}{texts}</svg>\n").partition("</style>")[0].splitlines()[1:]
    want = [f"text{{{family}}}", ".s0{font-size: 9px}", ".s1{text-anchor: end}", ".s2{a: 1; b: 2}"]
    assert rules == [*want, ".s3{font-family: C}"]


def test_a_picture_of_ours_says_nothing_of_when_and_by_what_it_was_drawn(tmp_path):
    plot.lines({"m": {"a": [(1, 2, 1.5, 2.5), (3, 4, 3.5, 4.5)]}}, "t", "x", "y", tmp_path / "f.svg")
    svg = (tmp_path / "f.svg").read_text(encoding="utf-8")
    assert "metadata" not in svg and "matplotlib" not in svg.lower() and svg.count("font-family") == 1
    assert svg.count("<use") == 3, "two points and one in the legend; ticks and the ends of error bars are lines"
