"""Where a secret could be: files, processes, and what an engine tells and keeps."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

import processes
from engines import Engine


def forms(secret: str | bytes) -> set[bytes]:
    """How a secret looks where somebody encoded it."""
    raw = secret.encode() if isinstance(secret, str) else secret
    found = {raw, raw.hex().encode(), base64.b64encode(raw), base64.urlsafe_b64encode(raw)}
    if isinstance(secret, str):
        found |= {json.dumps(secret)[1:-1].encode(), quote(secret).encode()}
    return found


def holds(content: bytes, secrets: Iterable[str | bytes]) -> bool:
    return any(form in content for secret in secrets for form in forms(secret))


def files_with(directory: Path, *secrets: str | bytes) -> list[str]:
    """Every file below that holds one of the secrets."""
    found = []
    for path in directory.rglob("*"):
        if path.is_file() and not path.is_symlink() and holds(path.read_bytes(), secrets):
            found.append(str(path.relative_to(directory)))
    return found


def children_of(pid: int) -> set[int]:
    """The process and everything below it."""
    family, todo = {pid}, [pid]
    while todo:
        more = processes.children(todo.pop()) - family
        family |= more
        todo += more
    return family


def processes_with(*secrets: str | bytes) -> dict[int, list[str]]:
    """Process → which of its argv and environment hold a secret."""
    found: dict[int, list[str]] = {}
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        for name in ("cmdline", "environ"):
            try:
                content = (process / name).read_bytes()
            except OSError:  # it has ended
                continue
            if holds(content, secrets):
                found.setdefault(int(process.name), []).append(name)
    return found


def engine_says(engine: Engine, runner_id: str) -> bytes:
    """What the engine tells and keeps about everything of this runner: inspect, and its files."""
    api = engine.api
    wanted = json.dumps({"label": [f"dev.forge.runner-id={runner_id}"]})
    pieces, root = [], Path(api.get("/info")["DockerRootDir"])
    containers = api.get("/containers/json", {"all": "1", "filters": wanted})
    assert containers, "there is nothing to search"
    for container in containers:
        pieces.append(json.dumps(api.get(f"/containers/{container['Id']}/json")).encode())
        pieces.append(json.dumps(api.get(f"/containers/{container['Id']}/top")).encode())
        for path in (root / "containers" / container["Id"]).rglob("*"):
            if path.is_file():
                pieces.append(path.read_bytes())
    for volume in api.get("/volumes", {"filters": wanted})["Volumes"]:
        pieces.append(json.dumps(api.get(f"/volumes/{volume['Name']}")).encode())
    return b"\n".join(pieces)
