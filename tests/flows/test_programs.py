"""What runs inside containers is of one version, for as long as the bridge runs."""

from __future__ import annotations

import ast

import pytest

from forge_bridge import programs


@pytest.mark.requirement("B-55", "B-70")
async def test_programs_are_those_that_the_bridge_began_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def replaced(package: str) -> None:
        raise AssertionError(f"{package} was read again")

    programs.source.cache_clear()
    await programs.read_programs()
    monkeypatch.setattr(programs, "files", replaced)
    for program in programs.PROGRAMS:
        assert ast.parse(programs.source(program)).body
