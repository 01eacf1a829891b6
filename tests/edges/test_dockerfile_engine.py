"""What the analysis says of a Dockerfile, held against what a real builder asks for.

A source policy denies everything but what the analysis found: an accepted file must build all the
same, and one that was refused for its sources must be caught asking for more.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from dockerfile_corpus import BASE, DIGESTS, OTHER, Case, cases
from engines import Engine
from forge_core.dockerfile import analyse_dockerfile

pytestmark = [pytest.mark.requirement("B-31", "B-52"), pytest.mark.engine("d26")]

CONTEXT = {"a": "a", "dir/b": "b", "app-1.0.txt": "app", "x.git/f": "f"}
ACCEPTED = [case for case in cases() if case.external]
FETCHING = [case for case in cases() if case.fetches]


def _on(engine: Engine, text: str) -> str:
    """*text* with the images of the test bed in place of those of the corpus."""
    for name, image in ((BASE, engine.busybox_image), (OTHER, engine.tooling_image)):
        repository, _, digest = image.partition("@sha256:")
        text = text.replace(name, repository).replace(DIGESTS[name], digest)
    return text


def _build(
    engine: Engine, folder: Path, content: str, allowed: Iterable[str]
) -> subprocess.CompletedProcess[str]:
    for name, text in CONTEXT.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "Dockerfile").write_text(content, encoding="utf-8", newline="")
    permitted = ["local://*", *(f"docker-image://{image}" for image in allowed)]
    rules = [("DENY", "*"), *(("ALLOW", name) for name in permitted)]
    policy = {"rules": [{"action": a, "selector": {"identifier": n}} for a, n in rules]}
    (folder / "policy.json").write_text(json.dumps(policy))
    options = ("--builder=default", "--progress=plain", "--network=none", "--output=type=cacheonly")
    return subprocess.run(
        [engine.docker_executable, "buildx", "build", *options, str(folder)],
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "DOCKER_CONFIG": engine.docker_config,
            "DOCKER_HOST": engine.base_url,
            "EXPERIMENTAL_BUILDKIT_SOURCE_POLICY": str(folder / "policy.json"),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


@pytest.mark.parametrize("case", ACCEPTED, ids=str)
def test_an_accepted_file_builds_from_what_was_found_alone(
    engine: Engine, tmp_path: Path, case: Case
) -> None:
    content = _on(engine, case.content.decode())
    built = _build(engine, tmp_path, content, analyse_dockerfile(content.encode()).external)
    assert built.returncode == 0, built.stderr[-2000:]


@pytest.mark.parametrize("case", FETCHING, ids=str)
def test_a_refused_file_would_have_fetched_more(engine: Engine, tmp_path: Path, case: Case) -> None:
    content = _on(engine, case.content.decode())
    built = _build(engine, tmp_path, content, (engine.busybox_image,))
    assert built.returncode != 0
    denied = [line for line in built.stderr.splitlines() if "denied by policy" in line]
    assert any(_on(engine, case.fetches) in line for line in denied), built.stderr[-2000:]
