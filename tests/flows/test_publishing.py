"""Publication: redeem, look, push, look, tell; on a real Git server, with a hub that we script."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from bridge_parts import KEY, REPOSITORY, Bridge, make_repository, memory_bridge, wait_for
from memory_engine import Container, MemoryEngine, idle_helper
from scripted_hub import HubException

from forge_bridge.repositories import add_repository
from forge_bridge.sandbox import publish
from forge_core.errors import DiskUnusable
from forge_core.publication import Credential
from git_server import PASSWORD, USERNAME, GitServer, git, git_server

pytestmark = pytest.mark.requirement("B-61", "B-63")

BRANCH = "result"
MODE = {"publicationMode": "bridge_push"}
CAN_PUSH: dict[str, Any] = {"sandbox_publication_mode": "bridge_push"}


class Packing:
    """The output helper of a workspace in which one file has changed: a real bundle of it."""

    def __init__(self, clone: Path) -> None:
        self._clone = clone
        tree = self._git("mktree", data=self._git("ls-tree", "HEAD") + self._line())
        self.commit = self._git("commit-tree", tree.strip(), "-p", "HEAD", "-m", "Result").strip()

    def _line(self) -> str:
        blob = self._git("hash-object", "-w", "--stdin", data="changed\n").strip()
        return f"100644 blob {blob}\tZ\n"

    def _git(self, *arguments: str, data: str = "") -> str:
        dates = {f"GIT_{who}_DATE": "1700000000 +0000" for who in ("AUTHOR", "COMMITTER")}
        people = ("-c", "user.name=forge", "-c", "user.email=forge@localhost")
        command = ["git", *people, "-C", str(self._clone), *arguments]
        environment = {**os.environ, **dates, "GIT_CONFIG_GLOBAL": os.devnull}
        done = subprocess.run(
            command, input=data, text=True, check=True, capture_output=True, env=environment
        )
        return done.stdout

    async def __call__(self, container: Container) -> int:
        request = json.loads(await container.read_line())
        await container.read(request["listingBytes"])
        bundle = await anyio.to_thread.run_sync(self._bundle, request["ref"])
        reply = {"resultCommit": self.commit, "files": 1, "bytes": 8}
        container.write(json.dumps(reply).encode() + b"\n" + bundle)
        return 0

    def _bundle(self, ref: str) -> bytes:
        self._git("update-ref", ref, self.commit)
        path = self._clone.parent / "bundle"
        self._git("bundle", "create", "-q", str(path), ref, "^HEAD")
        return path.read_bytes()


class Stage:
    """A bridge that pushes, its hub, and the remote."""

    def __init__(self, bridge: Bridge, server: GitServer, packing: Packing, url: str) -> None:
        self.bridge = bridge
        self.hub = bridge.hub
        self.server = server
        self.commit = packing.commit
        self.url = url
        self.hub.answers["RedeemPublishGrant"] = lambda _payload: self.granted()

    def granted(self, **changes: Any) -> dict[str, Any]:
        whole = {
            "accepted": True,
            "repositoryUrl": self.url,
            "username": USERNAME,
            "credential": PASSWORD,
            "expiresAt": "2099-11-29T14:00:00.000Z",
            **changes,
        }
        return {name: value for name, value in whole.items() if value is not None}

    async def go(self, *argv: str, **more: Any) -> str:
        """One attempt that is to be published; returns its id once it runs."""
        offer = await self.bridge.accept(requirements=MODE)
        publication = {"mode": "bridge_push", "handle": "publish-handle"}
        start = self.bridge.start(offer, *argv, publication=publication, **more)
        self.hub.send("Start", {**start, "branch": BRANCH})
        return str(offer["attemptId"])

    @property
    def told(self) -> list[str]:
        """The outcomes that the hub was told."""
        return [payload["outcome"] for payload in self.hub.of("SubmitPublication")]

    @property
    def at_the_remote(self) -> str | None:
        return self.server.branch(REPOSITORY, BRANCH)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[GitServer]:
    with git_server(tmp_path / "served") as server:
        yield server


@asynccontextmanager
async def on_stage(directory: Path, server: GitServer, **more: Any) -> AsyncIterator[Stage]:
    root, clone = directory / "state", directory / "clone"
    root.mkdir(mode=0o700)
    make_repository(clone)
    url = server.create(REPOSITORY, source=clone)
    add_repository(root, REPOSITORY, clone, remote=url)
    engine, packing = MemoryEngine(), Packing(clone)
    engine.programs["helper"] = packing
    async with memory_bridge(directory, engine=engine, **{**CAN_PUSH, **more}) as bridge:
        bridge.secrets.add(PASSWORD)
        yield Stage(bridge, server, packing, url)
    assert not any(PASSWORD.encode() in p.read_bytes() for p in root.rglob("*") if p.is_file())


async def within(seconds: float, done: Callable[[], object]) -> None:
    """It is done soon."""
    begun_s = time.monotonic()
    await wait_for(done)
    assert time.monotonic() - begun_s < seconds


# -- what is published ----------------------------------------------------------------------------


async def test_the_result_commit_is_pushed_and_told_before_the_result(
    tmp_path: Path, server: GitServer
) -> None:
    async with on_stage(tmp_path, server) as stage:
        attempt_id = await stage.go("true")
        result = await stage.hub.over(attempt_id)
        assert (result["outcome"], result["resultCommit"]) == ("succeeded", stage.commit)
        assert stage.at_the_remote == stage.commit
        assert server.pushes == 1
        (asked,) = stage.hub.of("RedeemPublishGrant")
        assert (asked["handle"], asked["branch"]) == ("publish-handle", BRANCH)
        assert asked["resultCommit"] == stage.commit
        assert asked["runnerInstanceId"] == stage.hub.instance_id
        (told,) = stage.hub.of("SubmitPublication")
        assert told == {
            "attemptId": attempt_id,
            "fence": 1,
            "resourceRunnerInstanceId": stage.hub.instance_id,
            "branch": BRANCH,
            "resultCommit": stage.commit,
            "outcome": "pushed",
        }
        methods = [c.method for c in stage.hub.calls if "Event" not in c.method]
        assert methods.index("SubmitPublication") < methods.index("SubmitDispatchResult")
        events = [e["type"] for e in stage.hub.of("SubmitDispatchEvent", attemptId=attempt_id)]
        begun = events.index("publication.started")
        assert events.index("output.imported") < begun < events.index("teardown.started")
        assert "publish" in result["timings"]
        assert stage.hub.of("RedeemSecretGrant") == []


@pytest.mark.requirement("B-61", "B-62")
@pytest.mark.parametrize("how", ["pushed", "refused", "cancelled"])
async def test_the_credential_is_overwritten_when_the_publication_is_over(
    tmp_path: Path, server: GitServer, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    made: list[Credential] = []

    class Recorded(Credential):
        def __init__(self, username: str, password: str) -> None:
            super().__init__(username, password)
            made.append(self)

    monkeypatch.setattr(publish, "Credential", Recorded)
    async with on_stage(tmp_path, server) as stage:
        if how == "refused":
            server.password = "another"
        elif how == "cancelled":
            server.fault.hang = "pushes"
        attempt_id = await stage.go("true")
        if how == "cancelled":
            assert await anyio.to_thread.run_sync(server.entered.wait, 20)
            assert made[0]._basic
            stage.hub.send("Cancel", {"attemptId": attempt_id, "fence": 1, "reason": "enough"})
        await stage.hub.over(attempt_id)
        (credential,) = made
        assert not credential._basic
        assert credential._masker is None


async def test_a_branch_at_the_input_commit_is_moved(tmp_path: Path, server: GitServer) -> None:
    async with on_stage(tmp_path, server) as stage:
        served = server.root / f"{REPOSITORY}.git"
        git(served, "update-ref", f"refs/heads/{BRANCH}", stage.bridge.commit)
        assert (await stage.hub.over(await stage.go("true")))["outcome"] == "succeeded"
        assert stage.at_the_remote == stage.commit
        assert stage.told == ["pushed"]


async def test_what_is_there_already_is_a_success_without_a_push(
    tmp_path: Path, server: GitServer
) -> None:
    async with on_stage(tmp_path, server) as stage:
        git(tmp_path / "clone", "push", "-q", str(server.root / f"{REPOSITORY}.git"),
            f"{stage.commit}:refs/heads/{BRANCH}")  # fmt: skip
        assert (await stage.hub.over(await stage.go("true")))["outcome"] == "succeeded"
        assert stage.told == ["already_published"]
        assert server.pushes == 0


async def test_nothing_that_changed_nothing_is_redeemed(tmp_path: Path, server: GitServer) -> None:
    async with on_stage(tmp_path, server) as stage:
        _engine(stage).programs["helper"] = idle_helper
        result = await stage.hub.over(await stage.go("true"))
        assert (result["outcome"], "resultCommit" in result) == ("succeeded", False)
        assert stage.hub.of("RedeemPublishGrant") == []
        assert stage.told == []
        assert server.seen == []


async def test_a_human_who_was_faster_wins(tmp_path: Path, server: GitServer) -> None:
    async with on_stage(tmp_path, server) as stage:
        theirs = server.commit(REPOSITORY, BRANCH, "a human's")
        result = await stage.hub.over(await stage.go("true"))
        assert (result["outcome"], result["failureCode"]) == ("failed", "publication_stale")
        assert theirs in result["summary"]
        assert stage.told == ["stale_remote"]
        assert stage.at_the_remote == theirs
        assert server.pushes == 0


async def test_a_human_who_comes_between_look_and_push_wins(
    tmp_path: Path, server: GitServer
) -> None:
    async with on_stage(tmp_path, server) as stage:
        git_store, theirs = stage.bridge.runner.git, list[str]()
        look = git_store.remote_branch

        async def look_and_be_overtaken(*arguments: Any) -> Any:
            seen = await look(*arguments)
            if not theirs:
                theirs.append(server.commit(REPOSITORY, BRANCH, "a human's"))
            return seen

        # A frozen dataclass with slots has no room for a double of one method.
        stage.bridge.runner.git = _Overtaken(git_store, look_and_be_overtaken)
        result = await stage.hub.over(await stage.go("true"))
        assert result["failureCode"] == "publication_stale"
        assert stage.told == ["stale_remote"]
        assert stage.at_the_remote == theirs[0]


class _Overtaken:
    def __init__(self, git_store: Any, look: Any) -> None:
        self._git_store = git_store
        self.remote_branch = look

    def __getattr__(self, name: str) -> Any:
        return getattr(self._git_store, name)


# -- what is denied -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        {"accepted": False, "reason": "grant_unknown"},
        HubException("no"),
        None,
        {"repositoryUrl": None},
        {"credential": None},
        {"username": None},
        {"credential": "abc"},
        {"username": "a:b"},
        {"repositoryUrl": "https://evil.example/sample.git"},
        {"repositoryUrl": "http://evil.example/sample.git"},
        {"repositoryUrl": "ext::sh -c 'touch /tmp/pwned'"},
        {"repositoryUrl": f"http://{USERNAME}:{PASSWORD}@127.0.0.1/sample.git"},
        {"expiresAt": "2001-11-29T14:00:00.000Z"},
        {"expiresAt": "tomorrow"},
        {"expiresAt": "2099-13-32T25:00:60Z"},
    ],
    ids=str,
)
async def test_an_answer_that_is_no_grant_for_this_remote_pushes_nothing(
    tmp_path: Path, server: GitServer, answer: object
) -> None:
    async with on_stage(tmp_path, server) as stage:
        changes = answer if isinstance(answer, dict) and "accepted" not in answer else None
        given = answer if changes is None else stage.granted(**changes)
        stage.hub.answers["RedeemPublishGrant"] = lambda _payload: given
        result = await stage.hub.over(await stage.go("true"))
        assert (result["outcome"], result["failureCode"]) == ("failed", "publication_denied")
        assert PASSWORD not in result["summary"]
        assert result["summary"].count("cannot publish") == 1
        assert stage.told == []
        assert server.seen == []
        assert len(stage.hub.of("RedeemPublishGrant")) == 1


async def test_a_lost_answer_is_not_asked_for_again(tmp_path: Path, server: GitServer) -> None:
    async with on_stage(tmp_path, server) as stage:
        hub = stage.hub
        hub.answers["RedeemPublishGrant"] = hub.never
        attempt_id = await stage.go("true")
        await hub.next("RedeemPublishGrant")
        hub.snapshot = [{"attemptId": attempt_id, "fence": 1, "state": "running"}]
        hub.drop()
        assert (await hub.over(attempt_id))["failureCode"] == "publication_denied"
        assert len(hub.of("RedeemPublishGrant")) == 1
        assert server.seen == []


async def test_a_hub_that_is_away_is_waited_for(tmp_path: Path, server: GitServer) -> None:
    async with on_stage(tmp_path, server) as stage:
        hub, runner = stage.hub, stage.bridge.runner
        attempt_id = await stage.go("wait")
        run = runner.attempts[attempt_id, 1]
        await hub.event(attempt_id, "agent.started")
        hub.snapshot = [{"attemptId": attempt_id, "fence": 1, "state": "running"}]
        runner.hub.offline(runner.hub._connection)  # type: ignore[arg-type]
        (agent,) = [c for c in _engine(stage).containers.values() if c.role == "agent"]
        agent._input += b'{"type":"cancel"}\n'
        agent.frame("exit", code=0)
        agent._move()
        await wait_for(lambda: run.state.stage == "publish")
        assert hub.of("RedeemPublishGrant") == []
        hub.drop()
        assert (await hub.over(attempt_id))["outcome"] == "succeeded"
        assert stage.told == ["pushed"]


def _engine(stage: Stage) -> MemoryEngine:
    engine = stage.bridge.runner.engine
    assert isinstance(engine, MemoryEngine)
    return engine


@pytest.mark.parametrize("fault", ["credential", "hook", "missing"])
async def test_what_the_remote_does_not_take_is_denied_with_its_words(
    tmp_path: Path, server: GitServer, fault: str
) -> None:
    async with on_stage(tmp_path, server) as stage:
        served = server.root / f"{REPOSITORY}.git"
        words = "declined by policy 7"
        if fault == "credential":
            server.password, words = "another", "could not read Username"
        elif fault == "missing":
            served.rename(served.with_name("elsewhere.git"))
            words = "not found"
        else:
            hook = served / "hooks" / "pre-receive"
            hook.write_text(f"#!/bin/sh\necho '{words}' '{PASSWORD}' >&2\nexit 1\n")
            hook.chmod(0o755)
        result = await stage.hub.over(await stage.go("true"))
        assert (result["outcome"], result["failureCode"]) == ("failed", "publication_denied")
        assert words in result["summary"], result["summary"]
        assert stage.told == ["aborted"]
        if fault != "missing":
            assert stage.at_the_remote is None


async def test_a_credential_that_expires_under_the_push_publishes_nothing(
    tmp_path: Path, server: GitServer
) -> None:
    """After it, the branch cannot be seen either: the hub has to look."""
    async with on_stage(tmp_path, server) as stage:
        server.fault.expires_after = 3
        result = await stage.hub.over(await stage.go("true"))
        assert result["failureCode"] == "publication_denied"
        assert stage.told == ["unknown"]
        assert stage.at_the_remote is None


async def test_a_remote_that_is_away_for_a_moment_is_looked_at_again(
    tmp_path: Path, server: GitServer
) -> None:
    async with on_stage(tmp_path, server) as stage:
        server.fault.status = 503
        attempt_id = await stage.go("true")
        await wait_for(lambda: server.seen)
        server.fault.status = None
        assert (await stage.hub.over(attempt_id))["outcome"] == "succeeded"
        assert stage.told == ["pushed"]


# -- what is ended --------------------------------------------------------------------------------


@pytest.mark.parametrize(("hang", "outcome"), [("looks", "aborted"), ("pushes", "unknown")])
async def test_a_cancel_ends_git_within_a_second(
    tmp_path: Path, server: GitServer, hang: str, outcome: str
) -> None:
    async with on_stage(tmp_path, server) as stage:
        server.fault.hang = hang
        attempt_id = await stage.go("true")
        assert await anyio.to_thread.run_sync(server.entered.wait, 20)
        stage.hub.send("Cancel", {"attemptId": attempt_id, "fence": 1, "reason": "enough"})
        await within(1.0, lambda: stage.told)
        assert stage.told == [outcome]
        result = await stage.hub.over(attempt_id)
        assert (result["outcome"], result["failureCode"]) == ("cancelled", "cancelled")
        assert stage.at_the_remote is None


async def test_a_lease_that_ends_ends_the_push(tmp_path: Path, server: GitServer) -> None:
    async with on_stage(tmp_path, server) as stage:
        server.fault.hang = "pushes"
        lease = {"ttlMs": 2_000, "sequence": 0, "key": base64.b64encode(KEY).decode()}
        attempt_id = await stage.go("true", lease=lease)
        result = await stage.hub.over(attempt_id)
        assert (result["outcome"], result["failureCode"]) == ("expired", "lease_expired")
        assert stage.told == ["unknown"]


async def test_a_push_whose_answer_is_lost_is_seen_at_the_remote(
    tmp_path: Path, server: GitServer
) -> None:
    async with on_stage(tmp_path, server) as stage:
        sandbox = stage.bridge.runner.sandbox
        assert sandbox is not None
        stage.bridge.runner.sandbox = replace(sandbox, push_ms=2_000)
        server.fault.lose_answer = True
        result = await stage.hub.over(await stage.go("true"))
        assert (result["outcome"], result["resultCommit"]) == ("succeeded", stage.commit)
        assert stage.told == ["pushed"]
        assert server.pushes == 1


async def test_a_push_that_cannot_be_recorded_is_not_begun(
    tmp_path: Path, server: GitServer
) -> None:
    async with on_stage(tmp_path, server) as stage:
        attempt_id = await stage.go("wait")
        await stage.hub.event(attempt_id, "agent.started")
        run = stage.bridge.runner.attempts[attempt_id, 1]
        ledger = run._ledger

        class Full:
            async def append_all(self, records: Any) -> None:
                if any(kind == "push_intent" for kind, _ in records):
                    raise DiskUnusable("cannot write: no space")
                await ledger.append_all(records)

        run._ledger = Full()
        (agent,) = [c for c in _engine(stage).containers.values() if c.role == "agent"]
        agent._input += b'{"type":"cancel"}\n'
        agent.frame("exit", code=0)
        agent._move()
        result = await stage.hub.over(attempt_id)
        assert result["failureCode"] == "disk_full"
        assert stage.told == ["aborted"]
        assert server.pushes == 0


# -- what is offered ------------------------------------------------------------------------------


@pytest.mark.requirement("B-37", "B-51")
async def test_a_runner_offers_the_mode_that_it_is_set_to_and_no_other(
    tmp_path: Path, server: GitServer
) -> None:
    async with on_stage(tmp_path, server) as stage:
        hub = stage.hub
        (registered,) = hub.of("RegisterRunner")
        assert registered["capabilities"]["publicationModes"] == ["bridge_push"]
        kept = stage.bridge.offer()
        hub.send("Offer", kept)
        decision = await hub.decision(kept)
        assert (decision["decision"], decision["reasonCode"]) == ("rejected", "policy_unsatisfied")
        offer = await stage.bridge.accept(requirements=MODE)
        start = stage.bridge.start(offer, "true", publication={"mode": "bridge_push"})
        hub.send("Start", start)
        result = await hub.over(offer["attemptId"])
        assert "without a handle" in result["summary"]


@pytest.mark.requirement("B-37", "B-40")
async def test_a_repository_without_a_remote_is_not_offered_to_be_published(tmp_path: Path) -> None:
    async with memory_bridge(tmp_path, **CAN_PUSH) as bridge:
        offer = bridge.offer(requirements=MODE)
        bridge.hub.send("Offer", offer)
        decision = await bridge.hub.decision(offer)
        assert (decision["decision"], decision["reasonCode"]) == ("rejected", "policy_unsatisfied")
        assert "add-repo sample PATH --remote URL" in decision["detail"]


def test_no_thread_of_a_server_is_left() -> None:
    assert [t for t in threading.enumerate() if "process_request_thread" in t.name] == []
