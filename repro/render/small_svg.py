"""Matplotlib's SVG in fewer bytes: the same picture, to a hundredth of a point, written as a person would."""

import re
from collections import Counter

LINE = re.compile(r"M (\S+) (\S+)L (\S+) (\S+)")  # a path of one line


def smaller(svg: str) -> str:
    """The same picture in fewer bytes.

    Coordinates are rounded, nothing is indented, a path is a line and each style is named once; ids are short, groups
    that say nothing are gone, rectangles are named by their sides, and lines of one look are one path, also those that
    mark ticks and the ends of error bars.
    """
    svg = re.sub(r"<!DOCTYPE[^>]*>\n", "", svg)
    svg = re.sub(r"\n +<", "\n<", rounded(svg))
    svg = re.sub(r' transform="rotate\(-?0 [^"]*"', "", svg)
    svg = re.sub(r' d="[^"]*"', lambda path: re.sub(r" *\n", "", path[0]), svg)
    svg = _one_font(svg)
    classes: dict[str, str] = {}

    def named(style: re.Match) -> str:
        return f' class="{classes.setdefault(style[1], f"s{len(classes)}")}"'

    svg = re.sub(r' style="([^"]*)"', named, svg)
    rules = "".join(f"\n.{name}{{{style}}}" for style, name in classes.items())
    svg = svg.replace("</style>", f"{rules}</style>", 1)
    svg = _without_line_markers(_short_rectangles(_without_bare_groups(svg)))
    svg = _shared_looks(_joined_lines(svg))
    return _short_paths(_short_ids(_needed_classes(svg)))


def _one_font(svg: str) -> str:
    """With the font of most texts named once for all texts."""
    fonts = Counter(re.findall(r"font-family: [^;\"]*", svg))
    if not fonts:
        return svg
    ((font, _),) = fonts.most_common(1)
    name = re.escape(font)
    svg = re.sub(rf'{name}; |(?:; )?{name}(?=")', "", svg)
    return svg.replace("</style>", f"\ntext{{{font}}}</style>", 1)


def _without_bare_groups(svg: str) -> str:
    """Without the groups, a tag a line, that have nothing but a name that nobody refers to."""
    needed, open_groups = [], []
    for line in re.sub(r'<g id="[^"]*"', "<g", svg).split("\n"):
        is_bare = line in ("<g>", "<g/>")
        if line.startswith("<g") and not line.endswith("/>"):
            open_groups.append(is_bare)
        elif line == "</g>":
            is_bare = open_groups.pop()
        if not is_bare:
            needed.append(line)
    return "\n".join(needed)


def _short_ids(svg: str) -> str:
    """With markers and clipping paths named by their number."""
    numbers = {name: f"i{n}" for n, name in enumerate(dict.fromkeys(re.findall(r' id="([^"]*)"', svg)))}

    def short(reference: re.Match) -> str:
        return reference[1] + numbers.get(reference[2], reference[2])

    return re.sub(r'( id="|href="#|url\(#)([^")]+)', short, svg)


def _short_rectangles(svg: str) -> str:
    """With rectangles, such as bars and the cells of a map, by their sides."""
    number = r"(-?[\d.]+)"
    corners = rf"M {number} {number}L {number} \2L \3 {number}L \1 \4(?:L \1 \2)?z?(?=\")"
    return re.sub(corners, r"M \1 \2H \3V \4H \1z", svg)


def _rules(svg: str) -> dict[str, set[str]]:
    """The declarations of each class."""
    return {name: set(style.split("; ")) for name, style in re.findall(r"\.(s\d+)\{([^}]*)\}", svg)}


def _without_line_markers(svg: str) -> str:
    """With markers that are a single line, such as ticks and the ends of error bars, as lines where they stand."""
    rules = _rules(svg)
    markers = {}
    for name, path, look in re.findall(r'<path id="([^"]*)" d="([^"]*)" class="(s\d+)"/>', svg):
        if line := LINE.fullmatch(path):
            markers[name] = ([float(number) for number in line.groups()], look)
    use = re.compile(r'<use xlink:href="#([^"]*)" x="([^"]*)" y="([^"]*)" class="(s\d+)"/>')

    def placed(match: re.Match) -> str:
        name, x, y, look = match[1], float(match[2]), float(match[3]), match[4]
        if name not in markers:
            return match[0]
        (x1, y1, x2, y2), own_look = markers[name]
        inherited = {rule for rule in rules.get(look, ()) if not rule.startswith("fill:")}
        if not inherited <= rules.get(own_look, set()):
            return match[0]
        ends = [_number(value) for value in (x + x1, y + y1, x + x2, y + y2)]
        return f'<path d="M {ends[0]} {ends[1]}L {ends[2]} {ends[3]}" class="{own_look}"/>'

    svg = use.sub(placed, svg)
    for name in markers:
        if f'"#{name}"' not in svg:
            svg = re.sub(rf'(<defs>\n)?<path id="{name}" [^>]*>\n(?(1)</defs>\n)', "", svg)
    return svg


def _joined_lines(svg: str) -> str:
    """With paths that follow one another, have one look and enclose nothing, such as error bars, as one.

    A group around one path is the path.
    """
    hollow = {name for name, style in _rules(svg).items() if "fill: none" in style}
    path = re.compile(r'<path d="([^"]*)"((?: clip-path="[^"]*")? class="(s\d+)")/>')
    alone = re.compile(r"<g( clip-path=\"[^\"]*\")>\n<path d=(\"[^\"]*\")( class=\"s\d+\")/>\n</g>")
    for _ in range(2):  # within groups; then those that were alone in a group
        joined: list[str] = []
        for line in svg.split("\n"):
            path_here = path.fullmatch(line)
            path_before = path.fullmatch(joined[-1]) if joined else None
            if path_here and path_before and path_here[2] == path_before[2]:
                both = f"{path_before[1]}{path_here[1]}"
                if path_here[3] in hollow or re.fullmatch(f"({LINE.pattern})+".replace("\\S+", r"[-\d.]+"), both):
                    joined[-1] = f'<path d="{both}"{path_here[2]}/>'
                    continue
            joined.append(line)
        svg = alone.sub(r"<path d=\2\1\3/>", "\n".join(joined))
    return svg


def _shared_looks(svg: str) -> str:
    """With the class of a group's markers at the group, where all have one, and like groups that follow as one."""
    group = re.compile(r'<g( clip-path="[^"]*")>((?:\n<use [^>]* class="s\d+"/>)+)\n</g>')

    def shared(match: re.Match) -> str:
        looks = set(re.findall(r' class="s\d+"', match[2]))
        if len(looks) > 1:
            return match[0]
        (look,) = looks
        return f"<g{match[1]}{look}>{match[2].replace(look, '')}\n</g>"

    svg = group.sub(shared, svg)
    only_markers = re.compile(r'(<g clip-path="[^"]*" class="s\d+">)((?:\n<use [^>]*/>)+)\n</g>\n\1')
    while only_markers.search(svg):
        svg = only_markers.sub(r"\1\2", svg)
    return svg


def _needed_classes(svg: str) -> str:
    """Without the styles that nothing has, and with the others numbered in their order."""
    used = set(re.findall(r' class="(s\d+)"', svg))
    svg = re.sub(r"\n\.(s\d+)\{[^}]*\}", lambda rule: rule[0] if rule[1] in used else "", svg)
    numbers = {name: f"s{n}" for n, name in enumerate(_rules(svg))}
    return re.sub(r'(\n\.| class=")(s\d+)(?=["{])', lambda name: name[1] + numbers.get(name[2], name[2]), svg)


def _short_paths(svg: str) -> str:
    """With no blank after a letter, and lines along an axis by the coordinate that changes."""

    def short(attribute: re.Match) -> str:
        parts = []
        x = y = ""  # where the pen is, if the last letter says it
        for letter, numbers in re.findall(r"([A-Za-z])([^A-Za-z]*)", attribute[1]):
            words = numbers.split()
            if letter == "L" and len(words) == 2 and words[0] == x:
                letter, words = "V", words[1:]
            elif letter == "L" and len(words) == 2 and words[1] == y:
                letter, words = "H", words[:1]
            parts.append(letter + " ".join(words))
            if letter in "ML" and len(words) == 2:
                x, y = words
            elif letter == "V":
                y = words[-1]
            elif letter == "H":
                x = words[-1]
            else:
                x = y = ""
        return f' d="{"".join(parts)}"'

    return re.sub(r' d="([^"]*)"', short, svg)


def _number(value: float) -> str:
    """A coordinate with two decimals at most."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def rounded(svg: str) -> str:
    """The same picture with coordinates of two decimals, a hundredth of a point; its text as it was."""

    def shorter(attribute: re.Match) -> str:
        return re.sub(r"-?\d+\.\d{2,}(?!e)", lambda number: _number(float(number[0])), attribute[0])

    return re.sub(r' (?:d|x|y|points|transform|width|height)="[^"]*"', shorter, svg)
