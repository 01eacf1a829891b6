"""Whole lives, one transcript each: what went in, and what was recorded, told and done for it.

``pytest tests/transcripts --rewrite-transcripts`` writes the answers again after a change that
was meant; the difference is then read like any other change.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from admission_player import AdmissionPlayer
from attempt_player import AttemptPlayer
from transcript import Play, played

HERE = Path(__file__).parent
PLAYERS: dict[str, Callable[[], Play]] = {"admission": AdmissionPlayer, "attempt": AttemptPlayer}
TRANSCRIPTS = sorted(path.name for path in HERE.glob("*.txt"))


@pytest.mark.requirement("B-04", "B-10", "B-70", "B-71", "B-83", "B-86")
@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_transcript(name: str, pytestconfig: pytest.Config) -> None:
    path = HERE / name
    written = path.read_text(encoding="utf-8")
    afresh = played(written, PLAYERS[name.partition("_")[0]]())
    if pytestconfig.getoption("--rewrite-transcripts"):
        path.write_text(afresh, encoding="utf-8")
    else:
        assert afresh == written


@pytest.mark.parametrize("kind", PLAYERS)
def test_every_kind_has_transcripts(kind: str) -> None:
    assert any(name.startswith(f"{kind}_") for name in TRANSCRIPTS)
