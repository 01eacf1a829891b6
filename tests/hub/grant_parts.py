"""Directories of secrets and credentials, and runners that redeem what they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scripted_bridge import ScriptedBridge, Stage, capabilities

SECRET = "canary-of-a-project-7f1d"
OTHER = 'canary "with" more\nlines'
PASSWORD = "canary-publish-credential-55c0"
RESULT = "b" * 40
URL = "https://example.org/repo.git"
PUSHES = {"publication": {"mode": "bridge_push"}}


def make_sources(directory: Path) -> dict[str, Path]:
    """Directories as an operator makes them; the settings that name them."""
    secrets, credentials = directory / "secrets", directory / "credentials"
    for path in (secrets, credentials, secrets / "p-1", credentials / "p-1"):
        path.mkdir(mode=0o700)
    private_file(secrets / "p-1" / "DEPLOY_KEY", f"{SECRET}\n")
    private_file(secrets / "p-1" / "OTHER", OTHER)
    grant = {"repositoryUrl": URL, "username": "forge", "credential": PASSWORD}
    private_file(credentials / "p-1" / "repo.json", json.dumps(grant))
    return {"secrets_directory": secrets, "credentials_directory": credentials}


def private_file(path: Path, content: str) -> None:
    path.touch(mode=0o600)
    path.write_text(content)


async def pushing_bridge(
    stage: Stage, runner_id: str = "r1", instance_id: str = "i1"
) -> ScriptedBridge:
    """A registered runner that can push."""
    bridge = await stage.connect(runner_id, instance_id)
    able = capabilities(publicationModes=["bridge_push", "shared_filesystem"])
    assert (await bridge.register(capabilities=able))["accepted"]
    assert (await bridge.heartbeat())["accepted"]
    return bridge


def secret_request(start: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "attemptId": start["attemptId"],
        "fence": start["fence"],
        "runnerInstanceId": start["runnerInstanceId"],
        "handle": start["secretGrants"][0],
        **changes,
    }


def publish_request(start: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "attemptId": start["attemptId"],
        "fence": start["fence"],
        "runnerInstanceId": start["runnerInstanceId"],
        "handle": start["publication"]["handle"],
        "branch": start["branch"],
        "resultCommit": RESULT,
        **changes,
    }
