"""Rules of the tracked files: what they must not name, where their links lead."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest
from tracked import ROOT, tracked_files, tracked_text

from forge_bridge import __version__

# Bracketed, so that these patterns do not find themselves.
REGISTRIES = re.compile(
    r"pypi[.]org|pythonhosted[.]org|npmjs[.](?:org|com)|(?<!share/)docker[.]io/"
    r"|registry-1[.]docker|hub[.]docker[.]com"
    r"|ghcr[.]io|quay[.]io|gcr[.]io|azurecr[.]io|nuget[.]org|crates[.]io|rubygems[.]org"
    r"|proxy[.]golang[.]org|debian[.]org|ubuntu[.]com|alpinelinux[.]org"
)
MACHINE_PATHS = re.compile(r"(?<![\w.~$}-])/(?:w[o]rk|r[o]ot|h[o]me/[a-z]+|U[s]ers/[A-Za-z]+)/")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)


def _lines_with(pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{path}:{number} {match[0]}"
        for path, text in tracked_text()
        for number, line in enumerate(text.splitlines(), 1)
        if (match := pattern.search(line))
    ]


def test_no_package_registry_is_named() -> None:
    assert REGISTRIES.search("https://pypi{}org/simple".format("."))
    assert _lines_with(REGISTRIES) == []


def test_no_path_of_a_machine_is_named() -> None:
    assert MACHINE_PATHS.search("see /{}/main".format("work"))
    assert not MACHINE_PATHS.search("below /workspace/ or $HOME/root/")
    assert _lines_with(MACHINE_PATHS) == []


def _documents() -> list[Path]:
    return [p for p in tracked_files() if p.suffix == ".md" and p.parts[0] != "tests"]


def _anchors(text: str) -> set[str]:
    """Headings as the usual renderers turn them into anchors."""
    headings = HEADING.findall(FENCE.sub("", text))
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


def test_links_lead_somewhere() -> None:
    broken = []
    for document in _documents():
        text = FENCE.sub("", (ROOT / document).read_text("utf-8"))
        for match in LINK.finditer(text):
            target, _, anchor = (match[1] or match[2]).partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            file = (ROOT / document.parent / target) if target else ROOT / document
            if not file.exists() or ROOT not in (file.resolve(), *file.resolve().parents):
                broken.append(f"{document}: {target}")
            elif anchor and anchor not in _anchors(file.read_text("utf-8")):
                broken.append(f"{document}: {target}#{anchor}")
    assert broken == []


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md", "CONTRIBUTING.md"])
def test_the_usual_documents_are_there(name: str) -> None:
    assert (ROOT / name).is_file()


def test_scripts_can_be_run() -> None:
    scripts = [p for p in tracked_files() if p.parts[0] == "scripts" and len(p.parts) == 2]
    scripts += [p for p in tracked_files() if p.parts[0] == ".ci"]
    assert scripts
    for path in scripts:
        assert os.access(ROOT / path, os.X_OK), f"{path} is not executable"
        assert (ROOT / path).read_bytes().startswith(b"#!/"), f"{path} names no interpreter"


def test_the_version_is_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["version"] == __version__
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_no_two_test_files_share_a_name() -> None:
    names = [path.name for path in tracked_files() if path.name.startswith("test_")]
    assert sorted(names) == sorted(set(names)), "pytest imports each by its bare name"
