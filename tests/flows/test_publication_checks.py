"""What the doctor says of publication is what this host's Git has just done."""

from __future__ import annotations

from pathlib import Path

import pytest
from bridge_parts import make_repository

from forge_bridge.doctor.publication_checks import prove_publication
from forge_bridge.repositories import add_repository
from forge_core.wire.codes import PublicationMode
from forge_edges import git_push

pytestmark = pytest.mark.requirement("B-37", "B-51", "B-62")

PUSH = PublicationMode.BRIDGE_PUSH
ID = "publication_mode"


async def test_a_git_that_can_push_is_shown_with_the_repositories_that_lack_a_remote(
    tmp_path: Path,
) -> None:
    make_repository(tmp_path / "clone")
    add_repository(tmp_path, "with", tmp_path / "clone", remote="https://example.org/a")
    proofs = await prove_publication(PUSH, tmp_path)
    assert "git version 2." in proofs.shown[ID]
    assert "1 repositories have a remote" in proofs.shown[ID]
    add_repository(tmp_path, "without", tmp_path / "clone")
    proofs = await prove_publication(PUSH, tmp_path)
    assert "no remote is recorded for without (forge-bridge add-repo" in proofs.shown[ID]
    assert proofs.failed == {}


async def test_nothing_is_tried_where_nothing_is_pushed(tmp_path: Path) -> None:
    proofs = await prove_publication(PublicationMode.SHARED_FILESYSTEM, tmp_path)
    assert (proofs.shown, proofs.failed) == ({}, {})


OLD = """#!/bin/sh
case "$*" in
*version*) echo "git version 2.30.2";;
*exec-path*) echo /nonexistent;;
*) exit 1;;
esac
"""
NO_HTTPS = OLD.replace("*) exit 1;;", "*) echo seen;;")


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (OLD, "git version 2.30.2: it takes no configuration from its environment"),
        (NO_HTTPS, "it does not speak https: there is no /nonexistent/git-remote-https"),
        (None, "cannot run"),
    ],
)
async def test_a_git_that_cannot_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str | None, why: str
) -> None:
    git = tmp_path / "git"
    if program is not None:
        git.write_text(program)
        git.chmod(0o755)
    monkeypatch.setattr(git_push, "GIT", str(git))
    proofs = await prove_publication(PUSH, tmp_path)
    assert why in proofs.failed[ID]
    assert proofs.shown == {}
