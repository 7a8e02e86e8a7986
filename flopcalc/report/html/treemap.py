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


def divide(values: Sequence[float], box: Box) -> list[Box]:
    """Boxes that fill `box`, each as large as its value's share: cut along the longer side into halves, these again."""
    if len(values) == 1:
        return [box]
    at, total = 1, sum(values)
    while at < len(values) - 1 and 2 * sum(values[:at]) + values[at] < total:
        at += 1
    x, y, width, height = box
    share = sum(values[:at]) / total
    if width >= height:
        halves = Box(x, y, width * share, height), Box(x + width * share, y, width * (1 - share), height)
    else:
        halves = Box(x, y, width, height * share), Box(x, y + height * share, width, height * (1 - share))
    return divide(values[:at], halves[0]) + divide(values[at:], halves[1])


def arrange(leaves: Sequence[Leaf], box: Box) -> tuple[list[TreemapGroup], list[TreemapTile]]:
    """Every leaf's place in a box, and the groups around them."""
    nodes = find_groups(build_tree(leaves))
    places = divide([node.value for node in nodes], box) if nodes else []
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
    for part, place in zip(parts, divide([part.value for part in parts], box), strict=True):
        tiles += _place(part, above if part.path == node.path else node.path, group, place)
    return tiles
