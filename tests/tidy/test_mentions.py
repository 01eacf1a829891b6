"""What the code refers to can be found: a page of docs/, and the section that is named in it."""

from __future__ import annotations

import re

from test_files import HEADING
from tracked import ROOT, python_sources, tracked_files

MENTION = re.compile(
    r"(?<![\w./-])(?P<page>(?:docs/[\w-]+/)?[\w-]+\.md)\b(?:, \*?(?P<section>[A-Z][^;()*.:]*))?"
)


def _mentions(text: str) -> list[tuple[str, str]]:
    """Page and section of every mention; neither ends with a line."""
    joined = re.sub(r"\s*\n[ #]*", " ", text)
    return [(m["page"], (m["section"] or "").strip()) for m in MENTION.finditer(joined)]


def test_a_mention_is_a_page_and_a_section_however_it_is_wrapped() -> None:
    assert _mentions("see (lifecycle.md, Start-up and\n    # reaping; B-80) or docs/a/b.md.") == [
        ("lifecycle.md", "Start-up and reaping"),
        ("docs/a/b.md", ""),
    ]


def test_every_page_that_is_named_is_there_with_the_section_that_is_named() -> None:
    pages = [path for path in tracked_files() if path.suffix == ".md" and path.parts[0] == "docs"]
    named = {page.name: page for page in pages}
    assert len(named) == len(pages), "a page is named without its folder"
    lost = []
    for source in python_sources("src", "scripts", "benchmarks"):
        for page, section in _mentions((ROOT / source).read_text("utf-8")):
            where = named.get(page.rpartition("/")[2])
            if where is None or not str(where).endswith(page):
                if not (ROOT / page).is_file():
                    lost.append(f"{source}: {page}")
                continue
            headings = HEADING.findall((ROOT / where).read_text("utf-8"))
            if section and not any(section.startswith(heading) for heading in headings):
                lost.append(f"{source}: {page}, {section}")
    assert lost == []
