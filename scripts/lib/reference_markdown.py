"""Markdown as the generated pages have it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

GENERATED = "<!-- Written by scripts/generate-reference; change the code instead. -->"


def page(title: str, *parts: str) -> str:
    """A whole page."""
    return "\n\n".join([f"# {title}", GENERATED, *(part for part in parts if part)]) + "\n"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; cells may hold Markdown, but no line breaks."""
    lines = [f"| {' | '.join(columns)} |", f"|{'|'.join(' --- ' for _ in columns)}|"]
    lines += [f"| {' | '.join(cell(text) for text in row)} |" for row in rows]
    return "\n".join(lines)


def cell(text: str) -> str:
    """Text as a cell of a table takes it."""
    return " ".join(text.split()).replace("|", "\\|")


def code(text: str) -> str:
    """Text in a code span."""
    return f"`{text}`"


def prose(docstring: str | None) -> str:
    """A docstring's paragraphs, reStructuredText's code spans as Markdown's."""
    text = (docstring or "").replace("``", "`")
    return "\n\n".join(" ".join(part.split()) for part in text.strip().split("\n\n"))
