"""A treemap of modules: boxes as large as their values, nested as the modules are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MOST_GROUPS = 8


class Box(NamedTuple):
    """A rectangle."""

    x: float
    y: float
    width: float
    height: float


class Leaf(NamedTuple):
    """A module that does work itself."""

    path: str
    kind: str
    value: int


class TreemapTile(NamedTuple):
    """A leaf with its place; `group` numbers the part of the model that it belongs to."""

    leaf: Leaf
    label: str
    group: int
    box: Box


class TreemapGroup(NamedTuple):
    """A part of the model: its path, the sum of its leaves, and its place."""

    path: str
    value: int
    box: Box


class Node:
    """A module with what is in it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.leaf: Leaf | None = None
        self.children: dict[str, Node] = {}

    @property
    def value(self) -> int:
        return (self.leaf.value if self.leaf else 0) + sum(child.value for child in self.children.values())

    def list_parts(self) -> list[Node]:
        """What it is divided into, largest first; work of its own is a part next to its children."""
        parts = list(self.children.values())
        if self.leaf is not None and parts:
            own = Node(self.path)
            own.leaf = self.leaf
            parts.append(own)
        return sorted(parts, key=lambda part: (-part.value, part.path))


def build_tree(leaves: Sequence[Leaf]) -> Node:
    """The modules of dotted paths; those without work are left out."""
    root = Node("")
    for leaf in leaves:
        if leaf.value <= 0:
            continue
        node = root
        for name in leaf.path.split("."):
            path = f"{node.path}.{name}" if node.path else name
            node = node.children.setdefault(name, Node(path))
        node.leaf = leaf
    return root


def find_groups(root: Node) -> list[Node]:
    """Parts of the model that get a colour each: the largest is divided while it holds more than single leaves."""
    groups = root.list_parts()
    while True:
        deep = [node for node in groups if any(child.children for child in node.children.values())]
        for node in sorted(deep, key=lambda node: -node.value):
            parts = node.list_parts()
            if len(parts) == 1 or len(groups) - 1 + len(parts) <= MOST_GROUPS:
                at = groups.index(node)
                groups[at : at + 1] = parts
                break
        else:
            return sorted(groups, key=lambda node: (-node.value, node.path))


def squarify(values: Sequence[float], box: Box) -> list[Box]:
    """Boxes that fill `box`, each as large as its value's share, as square as strips allow; values largest first."""
    total = sum(values)
    areas = [value / total * box.width * box.height for value in values]
    boxes: list[Box] = []
    while len(boxes) < len(areas):
        start = len(boxes)
        side = min(box.width, box.height)
        end, covered = start + 1, areas[start]
        worst = _find_worst(areas[start], areas[start], covered, side)
        while end < len(areas):
            longer = _find_worst(areas[start], areas[end], covered + areas[end], side)
            if longer > worst:
                break
            worst, covered, end = longer, covered + areas[end], end + 1
        strip, box = _fill_strip(areas[start:end], covered, box)
        boxes += strip
    return boxes


def _find_worst(largest: float, smallest: float, covered: float, side: float) -> float:
    """The greatest ratio of a box's sides in a strip that covers an area along a side."""
    thickness = covered / side
    return max(largest / thickness**2, thickness**2 / smallest)


def _fill_strip(areas: Sequence[float], covered: float, box: Box) -> tuple[list[Box], Box]:
    """Boxes in a strip along the shorter side, and what is left next to it."""
    x, y, width, height = box
    boxes = []
    if width >= height:
        thickness = covered / height
        for area in areas:
            boxes.append(Box(x, y, thickness, area / thickness))
            y += area / thickness
        return boxes, Box(x + thickness, box.y, max(width - thickness, 1e-9), height)
    thickness = covered / width
    for area in areas:
        boxes.append(Box(x, y, area / thickness, thickness))
        x += area / thickness
    return boxes, Box(box.x, y + thickness, width, max(height - thickness, 1e-9))


def arrange(leaves: Sequence[Leaf], box: Box) -> tuple[list[TreemapGroup], list[TreemapTile]]:
    """Every leaf's place in a box, and the groups around them."""
    nodes = find_groups(build_tree(leaves))
    places = squarify([node.value for node in nodes], box)
    groups, tiles = [], []
    for at, (node, place) in enumerate(zip(nodes, places, strict=True)):
        groups.append(TreemapGroup(node.path, node.value, place))
        tiles += _place(node, node.path.rpartition(".")[0], at, place)
    return groups, tiles


def _place(node: Node, above: str, group: int, box: Box) -> list[TreemapTile]:
    parts = node.list_parts()
    if not parts:
        assert node.leaf is not None  # only leaves have no parts
        return [TreemapTile(node.leaf, node.leaf.path.removeprefix(f"{above}."), group, box)]
    tiles = []
    for part, place in zip(parts, squarify([part.value for part in parts], box), strict=True):
        tiles += _place(part, above if part.path == node.path else node.path, group, place)
    return tiles
