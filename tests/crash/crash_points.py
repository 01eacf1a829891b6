"""The matrix as a file that people can read: which points each scenario passes through."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from forge_core.ready import RecordKind

FILE = Path(__file__).with_name("points.txt")
HEAD = """\
# Every point that the bridge passes through, by scenario: place, name, how often by then.
# Recorded; tests/crash/test_crash_matrix.py says how.
"""


@dataclass(frozen=True, slots=True)
class Point:
    """Where a bridge can be killed.

    :ivar place: the stage or phase of the dispatch there; what runs beside it may move a little.
    :ivar count: the point is passed for the count-th time in this scenario.
    """

    scenario: str
    place: str
    name: str
    count: int

    @property
    def key(self) -> tuple[str, str, int]:
        """The point without its place."""
        return self.scenario, self.name, self.count

    @property
    def part(self) -> str:
        """The place; what goes to the hub does so beside it, wherever the dispatch stands."""
        return "outbox" if "Submit" in self.name else self.place

    @property
    def gap(self) -> str:
        """Before a record, between a record and its effect, or after an effect."""
        what, _, side = self.name.rpartition(":")
        is_record = set(what.split("+")) <= set(RecordKind)
        if side == "before":
            return "before" if is_record else "between"
        return "between" if is_record else "after"

    @classmethod
    def parse(cls, scenario: str, line: str) -> Self:
        """One line of a recording."""
        place, name, count = line.split("\t")
        return cls(scenario, place, name, int(count))

    def __str__(self) -> str:
        return f"{self.place}\t{self.name}\t{self.count}"


def read() -> tuple[Point, ...]:
    """The matrix as it was found last."""
    points: list[Point] = []
    scenario = ""
    for line in FILE.read_text().splitlines():
        if line.startswith("["):
            scenario = line.strip("[]")
        elif line and not line.startswith("#"):
            points.append(Point.parse(scenario, line))
    return tuple(points)


def write(points: Iterable[Point]) -> None:
    """Replace the matrix."""
    text, scenario = HEAD, ""
    for point in points:
        if point.scenario != scenario:
            scenario = point.scenario
            text += f"\n[{scenario}]\n"
        text += f"{point}\n"
    FILE.write_text(text)


def one_of_each(points: Iterable[Point]) -> frozenset[Point]:
    """One point of each part and gap, and of each scenario's gaps that are new in it.

    It is the one in the middle: the first and the last are likely to be those of a neighbour.
    """
    groups: dict[tuple[str, str], list[Point]] = defaultdict(list)
    seen: dict[str, str] = {}
    for point in points:
        groups[point.part, point.gap].append(point)
        if seen.setdefault(point.name, point.scenario) == point.scenario:
            groups[point.scenario, point.gap].append(point)
    return frozenset(group[len(group) // 2] for group in groups.values())
