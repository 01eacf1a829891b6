"""The image stage of an attempt: which image, why, told how; and what is left of a failure."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from bridge_parts import Bridge, git, memory_bridge, wait_for
from image_doubles import EVIDENCE, ScriptedBuilder, ScriptedGates, refusal
from memory_engine import IMAGE, MemoryEngine

from forge_bridge.state_root.images import ImageIndex
from forge_core.errors import EngineOutOfDisk, RefusedError
from forge_core.image_ports import BuiltImage, Evidence, ImageNotBuilt
from forge_core.image_retention import CachedImage
from forge_core.ports import EngineImage, PathKind
from forge_core.sandbox_spec import TOOLING_MOUNT

BASE = "registry.example/base@sha256:" + "5" * 64
CONTRACT = "version: 1\nimage:\n  dockerfile: .forge/Dockerfile\n"
DOCKERFILE = f"FROM {BASE}\nCOPY . /src\nRUN make\n"
FILES = {".forge/forge.sandbox.yml": CONTRACT, ".forge/Dockerfile": DOCKERFILE}
MARKER = "words-that-only-the-build-says"


@dataclass
class Project:
    """A bridge and a repository that it knows."""

    bridge: Bridge
    engine: MemoryEngine
    builder: ScriptedBuilder
    gates: ScriptedGates

    @property
    def clone(self) -> Path:
        return self.bridge.state_root.parent / "clone"

    def commit(self, files: Mapping[str, str]) -> str:
        """A commit with these files besides what is there."""
        for name, content in files.items():
            path = self.clone / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        git(self.clone, "add", "--all")
        git(self.clone, "commit", "--quiet", "--allow-empty", "--message=Next")
        return git(self.clone, "rev-parse", "HEAD")

    async def run(self, approved: str, *argv: str, **more: Any) -> str:
        return await self.bridge.run(*argv, approvedCommit=approved, **more)

    async def result(self, attempt: str) -> dict[str, Any]:
        """The last result of an attempt, once all of it has been told."""

        def told() -> list[dict[str, Any]]:
            results = self._sent("SubmitDispatchResult", attempt)
            return [result for result in results if result["cleanup"] == "complete"]

        await wait_for(lambda: told() and "teardown.finished" in dict(self.events(attempt)))
        return told()[0]

    def events(self, attempt: str) -> list[tuple[str, dict[str, Any]]]:
        """The durable events, in order."""
        sent = self._sent("SubmitDispatchEvent", attempt)
        return [(event["type"], event["payload"]) for event in sent]

    def _sent(self, method: str, attempt: str) -> list[dict[str, Any]]:
        calls = [call.payload for call in self.bridge.hub.calls if call.method == method]
        return [payload for payload in calls if payload["attemptId"] == attempt]

    def event(self, attempt: str, kind: str) -> dict[str, Any]:
        (payload,) = [payload for name, payload in self.events(attempt) if name == kind]
        return payload


@asynccontextmanager
async def project(directory: Path, **settings: Any) -> AsyncIterator[Project]:
    engine, gates = MemoryEngine(), ScriptedGates()
    builder = ScriptedBuilder(engine)
    async with memory_bridge(
        directory, engine=engine, builder=builder, gates=gates, **settings
    ) as bridge:
        yield Project(bridge, engine, builder, gates)


def agents(engine: MemoryEngine) -> list[Mapping[str, Any]]:
    return [
        request for request in engine.requests if request["Labels"]["dev.forge.role"] == "agent"
    ]


@pytest.mark.requirement("B-52", "B-84")
async def test_without_a_contract_it_is_the_tooling_image(tmp_path: Path) -> None:
    async with project(tmp_path) as at:
        attempt = await at.run(at.bridge.commit)
        assert (await at.result(attempt))["outcome"] == "succeeded"
        assert at.event(attempt, "image.resolved")["cache"] == "hit"
        (agent,) = agents(at.engine)
        assert agent["Image"].endswith(IMAGE)
        assert agent["Entrypoint"][0] == "/usr/bin/python3"
        assert at.builder.requests == []


@pytest.mark.requirement("B-27", "B-29", "B-31", "B-52", "B-84")
async def test_a_project_image_is_built_proven_and_run(tmp_path: Path) -> None:
    async with project(tmp_path) as at:
        commit = at.commit({**FILES, "code": "print()"})
        at.builder.config = {"Env": ["LC_ALL=evil", "PATH=/evil"]}
        attempt = await at.run(commit)
        assert (await at.result(attempt))["outcome"] == "succeeded"
        kinds = [kind for kind, _ in at.events(attempt)]
        assert kinds[1:4] == ["build.started", "build.finished", "image.resolved"]
        resolved = at.event(attempt, "image.resolved")
        assert resolved["cache"] == "miss"
        (agent,) = agents(at.engine)
        assert agent["Image"] == resolved["digest"]
        assert agent["Entrypoint"][0].startswith(TOOLING_MOUNT)
        assert {"LC_ALL=C", "PATH"} <= set(agent["Env"])
        assert [gate for gate, _ in at.gates.asked] == ["before_build", "after_build"]
        assert at.gates.asked[0][1] == (BASE, f"tooling@{IMAGE}")
        (request,) = at.builder.requests
        assert (request.sources, request.network) == ((BASE,), False)
        with tarfile.open(fileobj=io.BytesIO(at.builder.contexts[0])) as tar:
            assert {".forge/Dockerfile", "code", "README"} <= set(tar.getnames())
        key = resolved["imageKey"]
        kept = at.bridge.state_root / "attestations" / key
        assert {path.name for path in kept.iterdir()} == {one.name for one in EVIDENCE}
        assert not (at.bridge.state_root / "build-logs" / key).exists()


@pytest.mark.requirement("B-27")
async def test_the_same_key_is_not_built_again(tmp_path: Path) -> None:
    async with project(tmp_path) as at:
        commit = at.commit(FILES)
        first, second = await at.run(commit), ""
        await at.result(first)
        second = await at.run(commit)
        assert (await at.result(second))["outcome"] == "succeeded"
        assert len(at.builder.requests) == 1
        one, other = (at.event(attempt, "image.resolved") for attempt in (first, second))
        assert (one["cache"], other["cache"]) == ("miss", "hit")
        assert one["digest"] == other["digest"]
        assert at.gates.asked[-1] == ("before_use", (one["digest"], tuple(EVIDENCE[::-1])))


@pytest.mark.requirement("B-52")
async def test_only_the_approved_commit_has_a_say(tmp_path: Path) -> None:
    async with project(tmp_path) as at:
        approved = at.commit(FILES)
        later = at.commit({".forge/Dockerfile": "FROM latest\n", "more": "code"})
        (at.clone / ".forge" / "forge.sandbox.yml").write_text("not even YAML: [")
        attempt = await at.run(approved, inputCommit=later)
        assert (await at.result(attempt))["outcome"] == "succeeded"
        with tarfile.open(fileobj=io.BytesIO(at.builder.contexts[0])) as tar:
            dockerfile = tar.extractfile(".forge/Dockerfile")
            assert dockerfile is not None
            assert dockerfile.read().decode() == DOCKERFILE
            assert "more" not in tar.getnames()


@pytest.mark.requirement("B-27", "B-52")
async def test_a_build_that_takes_nothing_of_the_repository_gets_nothing(tmp_path: Path) -> None:
    async with project(tmp_path) as at:
        dockerfile = f"FROM {BASE}\nRUN make\n"
        attempts = [await at.run(at.commit({**FILES, ".forge/Dockerfile": dockerfile}))]
        await at.result(attempts[0])
        attempts.append(await at.run(at.commit({"code": "changed"})))
        await at.result(attempts[1])
        assert [at.event(one, "image.resolved")["cache"] for one in attempts] == ["miss", "hit"]
        with tarfile.open(fileobj=io.BytesIO(at.builder.contexts[0])) as tar:
            assert tar.getnames() == [".forge/Dockerfile"]


@pytest.mark.requirement("B-27", "B-52")
async def test_what_dockerignore_leaves_out_is_not_sent_and_builds_nothing_anew(
    tmp_path: Path,
) -> None:
    async with project(tmp_path) as at:
        first = await at.run(at.commit({**FILES, ".dockerignore": "notes\n", "notes": "one"}))
        await at.result(first)
        with tarfile.open(fileobj=io.BytesIO(at.builder.contexts[0])) as tar:
            assert "README" in tar.getnames()
            assert "notes" not in tar.getnames()
        ignored = await at.run(at.commit({"notes": "two"}))
        await at.result(ignored)
        assert at.event(ignored, "image.resolved")["cache"] == "hit"
        seen = await at.run(at.commit({"code": "two"}))
        await at.result(seen)
        assert at.event(seen, "image.resolved")["cache"] == "miss"


@pytest.mark.requirement("B-52")
async def test_a_contract_that_nobody_approved_is_not_read_and_that_is_said(
    tmp_path: Path,
) -> None:
    async with project(tmp_path) as at:
        attempt = await at.bridge.run(inputCommit=at.commit(FILES))
        assert (await at.result(attempt))["outcome"] == "succeeded"
        assert at.event(attempt, "warning")["code"] == "contract_not_approved"
        assert at.builder.requests == []


@pytest.mark.requirement("B-27")
async def test_two_attempts_share_one_build(tmp_path: Path) -> None:
    async with project(tmp_path) as at:
        commit = at.commit(FILES)
        at.builder.may_end = anyio.Event()
        attempts = [await at.run(commit) for _ in range(2)]
        await at.builder.began.wait()
        at.builder.may_end.set()
        for attempt in attempts:
            assert (await at.result(attempt))["outcome"] == "succeeded"
        assert len(at.builder.requests) == 1
        caches = sorted(at.event(attempt, "image.resolved")["cache"] for attempt in attempts)
        assert caches == ["hit", "miss"]


@pytest.mark.requirement("B-22")
async def test_different_images_wait_for_their_turn(tmp_path: Path) -> None:
    async with project(tmp_path) as at:
        commits = [at.commit({**FILES, "code": str(n)}) for n in range(2)]
        for attempt in [await at.run(commit) for commit in commits]:
            assert (await at.result(attempt))["outcome"] == "succeeded"
        assert len(at.builder.requests) == 2
        assert at.builder.most_at_once == 1


@pytest.mark.requirement("B-72")
async def test_a_cancel_ends_the_build_at_once_and_the_next_one_builds(tmp_path: Path) -> None:
    async with project(tmp_path) as at:
        commit = at.commit(FILES)
        at.builder.may_end = anyio.Event()
        first = await at.run(commit)
        await at.builder.began.wait()
        second = await at.run(commit)
        at.bridge.hub.send("Cancel", {"attemptId": first, "fence": 1, "reason": "enough"})
        await wait_for(lambda: at.builder.cancelled == 1)
        await wait_for(lambda: len(at.builder.requests) == 2)
        at.builder.may_end.set()
        assert (await at.result(second))["outcome"] == "succeeded"
        assert (await at.result(first))["failureCode"] == "cancelled"
        assert at.event(second, "image.resolved")["cache"] == "miss"
        assert [kind for kind, _ in at.events(first) if kind == "build.failed"] == []


@pytest.mark.requirement("B-72")
async def test_a_lease_that_ends_ends_the_build(tmp_path: Path) -> None:
    async with project(tmp_path) as at:
        at.builder.may_end = anyio.Event()
        lease = {
            "ttlMs": 3_000,
            "sequence": 0,
            "key": "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=",
        }
        attempt = await at.run(at.commit(FILES), lease=lease)
        await at.builder.began.wait()
        assert (await at.result(attempt))["failureCode"] == "lease_expired"
        assert at.builder.cancelled == 1
        assert at.engine.images == {}


@pytest.mark.requirement("B-90")
async def test_a_failed_build_leaves_a_log_and_says_nothing_of_it(tmp_path: Path) -> None:
    async with project(tmp_path) as at:
        at.builder.output = (f"#1 {MARKER}\n".encode(),)
        at.builder.failure = ImageNotBuilt(f"it said {MARKER}", reason="the build failed")
        attempt = await at.run(at.commit(FILES))
        result = await at.result(attempt)
        assert (result["outcome"], result["failureCode"]) == ("failed", "image_build_failed")
        failed = at.event(attempt, "build.failed")
        (log,) = (at.bridge.state_root / "build-logs").glob("*/project.log")
        content = log.read_bytes()
        assert MARKER.encode() in content
        assert failed == {
            "stage": "project",
            "logDigest": f"sha256:{hashlib.sha256(content).hexdigest()}",
            "logBytes": len(content),
            "truncated": False,
        }
        assert f"build-logs/{log.parent.name}/project.log" in result["summary"]
        assert MARKER not in repr([call.payload for call in at.bridge.hub.calls])
        assert MARKER not in repr(at.bridge.logs)
        assert log.stat().st_mode & 0o777 == 0o600


@pytest.mark.requirement("B-90")
async def test_a_secret_that_a_build_says_is_masked_in_its_log(tmp_path: Path) -> None:
    async with project(tmp_path) as at:
        secret = "a-secret-of-this-attempt"
        at.bridge.secrets.add(secret)
        at.bridge.hub.answers["RedeemSecretGrant"] = {
            "accepted": True,
            "secrets": {"TOKEN": secret},
        }
        at.builder.output = (f"#1 {secret[:9]}".encode(), f"{secret[9:]}\n".encode())
        at.builder.failure = RefusedError("no", code="image_build_failed")
        attempt = await at.run(at.commit(FILES), secretGrants=["handle"])
        await at.result(attempt)
        (log,) = (at.bridge.state_root / "build-logs").glob("*/project.log")
        assert "#1 ***\n" in log.read_text()


@pytest.mark.requirement("B-27", "B-90")
async def test_all_who_wait_for_a_failing_build_get_its_failure(tmp_path: Path) -> None:
    async with project(tmp_path) as at:
        commit = at.commit(FILES)
        at.builder.may_end = anyio.Event()
        at.builder.failure = RefusedError("no", code="image_build_failed")
        attempts = [await at.run(commit) for _ in range(2)]
        await at.builder.began.wait()
        await wait_for(lambda: len(at.bridge.service.images.pipeline._held) == 2)
        at.builder.may_end.set()
        for attempt in attempts:
            assert (await at.result(attempt))["failureCode"] == "image_build_failed"
            assert at.event(attempt, "build.failed")["stage"] == "project"
        assert len(at.builder.requests) == 1


@pytest.mark.requirement("B-30", "B-31", "B-90")
@pytest.mark.parametrize(
    ("gate", "error", "code", "stage"),
    [
        (
            "before_build",
            RefusedError("not signed", code="signature_invalid"),
            "signature_invalid",
            "signatures",
        ),
        ("after_build", refusal("sbom"), "image_policy_denied", "sbom"),
        ("after_build", refusal("vulnerabilities"), "image_policy_denied", "vulnerabilities"),
        ("after_build", refusal("provenance"), "image_policy_denied", "provenance"),
    ],
)
async def test_a_gate_that_says_no_is_named_and_nothing_is_promoted(
    tmp_path: Path, gate: str, error: Exception, code: str, stage: str
) -> None:
    async with project(tmp_path) as at:
        at.gates.refuses[gate] = error
        attempt = await at.run(at.commit(FILES))
        assert (await at.result(attempt))["failureCode"] == code
        assert at.event(attempt, "build.failed")["stage"] == stage
        (log,) = (at.bridge.state_root / "build-logs").glob(f"*/{stage}.log")
        assert str(error) in log.read_text()
        assert at.engine.images == {}
        assert list((at.bridge.state_root / "images").iterdir()) == []
        kept = (at.bridge.state_root / "attestations").rglob("vulnerabilities.json")
        assert len([*kept]) == (1 if gate == "after_build" else 0)
        assert bool(at.builder.requests) == (gate == "after_build")


@pytest.mark.requirement("B-30")
async def test_an_image_that_does_not_pass_any_more_is_built_anew(tmp_path: Path) -> None:
    async with project(tmp_path) as at:
        commit = at.commit(FILES)
        await at.result(await at.run(commit))
        at.gates.refuses["before_use"] = refusal("vulnerabilities")
        attempt = await at.run(commit)
        assert (await at.result(attempt))["outcome"] == "succeeded"
        assert at.event(attempt, "image.resolved")["cache"] == "miss"
        assert len(at.builder.requests) == 2
        # The image that it was takes no space from now on.
        assert [*at.engine.images] == [at.event(attempt, "image.resolved")["digest"]]


@pytest.mark.requirement("B-28", "B-30")
async def test_a_refusal_takes_no_evidence_from_an_image_that_can_run(tmp_path: Path) -> None:
    async with project(tmp_path) as at:
        commit = at.commit(FILES)
        first = await at.run(commit)
        await at.result(first)
        at.gates.refuses["before_use"] = refusal("vulnerabilities")
        at.gates.refuses["after_build"] = refusal("vulnerabilities")
        second = await at.run(commit)
        assert (await at.result(second))["failureCode"] == "image_policy_denied"
        key = at.event(first, "image.resolved")["imageKey"]
        kept, logs = (at.bridge.state_root / part / key for part in ("attestations", "build-logs"))
        assert {path.name for path in kept.iterdir()} == {one.name for one in EVIDENCE}
        names = {"vulnerabilities.json", "vulnerabilities.log"}
        assert {path.name for path in logs.iterdir()} == names
        at.gates.refuses.clear()
        third = await at.run(commit)
        assert (await at.result(third))["outcome"] == "succeeded"
        assert at.event(third, "image.resolved")["cache"] == "hit"


@pytest.mark.requirement("B-89")
async def test_an_image_of_somebody_else_is_not_touched_under_a_name_of_ours(
    tmp_path: Path,
) -> None:
    async with project(tmp_path) as at:
        theirs = EngineImage("sha256:" + "7" * 64, (), {})
        at.engine.images[theirs.id] = theirs
        at.builder.may_end = anyio.Event()
        attempt = await at.run(at.commit(FILES))
        await at.builder.began.wait()
        (request,) = at.builder.requests

        async def move(_image: BuiltImage) -> Sequence[Evidence]:
            await at.engine.tag_image(theirs.id, request.tag)
            return ()

        at.gates.after_build = move  # type: ignore[assignment, method-assign]
        at.builder.may_end.set()
        result = await at.result(attempt)
        assert result["failureCode"] == "image_policy_denied"
        assert "names " + theirs.id in result["summary"]
        assert at.engine.images == {theirs.id: replace(theirs, names=(request.tag,))}


@pytest.mark.requirement("B-89")
async def test_an_image_whose_record_is_missing_goes_when_another_takes_its_name(
    tmp_path: Path,
) -> None:
    async with project(tmp_path) as at:
        commit = at.commit(FILES)
        first = await at.run(commit)
        await at.result(first)
        images = at.bridge.service.runner.images
        assert images is not None
        await images.records.index.remove(at.event(first, "image.resolved")["imageKey"])
        second = await at.run(commit)
        assert (await at.result(second))["outcome"] == "succeeded"
        assert [*at.engine.images] == [at.event(second, "image.resolved")["digest"]]


@pytest.mark.requirement("B-27")
@pytest.mark.parametrize("what", ["gone", "relabelled", "with a volume"])
async def test_the_index_is_not_believed_blindly(tmp_path: Path, what: str) -> None:
    async with project(tmp_path) as at:
        commit = at.commit(FILES)
        first = await at.run(commit)
        await at.result(first)
        image = at.event(first, "image.resolved")["digest"]
        match what:
            case "gone":
                del at.engine.images[image]
            case "relabelled":
                at.engine.configs[image] = {"Labels": {}}
            case "with a volume":
                at.engine.configs[image] = {**at.engine.configs[image], "Volumes": {"/x": {}}}
        second = await at.run(commit)
        assert (await at.result(second))["outcome"] == "succeeded"
        assert at.event(second, "image.resolved")["cache"] == "miss"
        assert len(at.builder.requests) == 2


@pytest.mark.requirement("B-27", "B-30")
@pytest.mark.parametrize("part", ["the directory", "a file"])
async def test_evidence_that_cannot_be_read_costs_a_build_and_no_more(
    tmp_path: Path, part: str
) -> None:
    async with project(tmp_path) as at:
        commit = at.commit(FILES)
        first = await at.run(commit)
        await at.result(first)
        key = at.event(first, "image.resolved")["imageKey"]
        elsewhere = tmp_path / "elsewhere"
        path = at.bridge.state_root / "attestations" / key
        if part == "a file":
            path /= "sbom.spdx.json"
        path.rename(elsewhere)
        path.symlink_to(elsewhere)
        second = await at.run(commit)
        assert (await at.result(second))["outcome"] == "succeeded"
        assert at.event(second, "image.resolved")["cache"] == "miss"
        third = await at.run(commit)
        assert (await at.result(third))["outcome"] == "succeeded"
        assert at.event(third, "image.resolved")["cache"] == "hit"
        assert elsewhere.exists()


@pytest.mark.requirement("B-90")
async def test_a_log_that_cannot_be_kept_changes_no_failure(tmp_path: Path) -> None:
    async with project(tmp_path) as at:
        at.builder.failure = ImageNotBuilt("it failed", reason="the build failed")
        logs = at.bridge.state_root / "build-logs"
        logs.rmdir()
        logs.write_text("in the way")
        attempt = await at.run(at.commit(FILES))
        assert (await at.result(attempt))["failureCode"] == "image_build_failed"
        assert at.event(attempt, "build.failed")["stage"] == "project"
        logs.unlink()
        logs.mkdir(mode=0o700)


@pytest.mark.requirement("B-29", "B-30")
@pytest.mark.parametrize(
    ("config", "paths", "word"),
    [
        ({"Volumes": {"/data": {}}}, {}, "VOLUME"),
        ({"OnBuild": ["RUN evil"]}, {}, "ONBUILD"),
        ({"Labels": {"dev.forge.managed": "bridge"}}, {}, "dev.forge.managed"),
        ({}, {"/etc/ld.so.preload": "link"}, "/etc/ld.so.preload"),
        ({}, {"/.forge": "directory", TOOLING_MOUNT: "directory"}, TOOLING_MOUNT),
        ({}, {"/.forge": "link"}, "/.forge is no directory"),
        ({}, {"/workspace": "other"}, "/workspace is no directory"),
        ({}, {"/tmp": "link"}, "/tmp is no directory"),
    ],
)
async def test_an_image_that_would_change_a_container_is_not_promoted(
    tmp_path: Path, config: dict[str, Any], paths: dict[str, PathKind], word: str
) -> None:
    async with project(tmp_path) as at:
        at.builder.config, at.engine.paths = config, paths
        attempt = await at.run(at.commit(FILES))
        result = await at.result(attempt)
        assert result["failureCode"] == "image_policy_denied"
        assert word in result["summary"]
        assert at.event(attempt, "build.failed")["stage"] == "contents"
        assert at.engine.images == {}
        assert at.engine.containers == {}
        assert [gate for gate, _ in at.gates.asked] == ["before_build"]


@pytest.mark.requirement("B-25")
async def test_a_full_disk_is_called_that(tmp_path: Path) -> None:
    async with project(tmp_path) as at:
        at.builder.failure = EngineOutOfDisk("no space left on device")
        attempt = await at.run(at.commit(FILES))
        assert (await at.result(attempt))["failureCode"] == "disk_full"


@pytest.mark.requirement("B-41", "B-52")
@pytest.mark.parametrize(
    ("files", "code", "word"),
    [
        ({".forge/forge.sandbox.yml": "version: 2\n"}, "contract_invalid", "version"),
        ({".forge/forge.sandbox.yml": CONTRACT}, "contract_invalid", ".forge/Dockerfile"),
        ({**FILES, ".forge/Dockerfile": "FROM latest\n"}, "image_policy_denied", "latest"),
        (
            {".forge/forge.sandbox.yml": "version: 1\nsecrets: [TOKEN]\n"},
            "contract_invalid",
            "secret TOKEN",
        ),
        (
            {".forge/forge.sandbox.yml": "version: 1\nnetwork: {policy: open_public}\n"},
            "contract_invalid",
            "network policy open_public",
        ),
    ],
)
async def test_what_cannot_be_built_is_refused_before_it_is(
    tmp_path: Path, files: dict[str, str], code: str, word: str
) -> None:
    async with project(tmp_path) as at:
        attempt = await at.run(at.commit(files))
        result = await at.result(attempt)
        assert result["failureCode"] == code
        assert word in result["summary"]
        assert at.builder.requests == []
        assert agents(at.engine) == []


@pytest.mark.requirement("B-31")
async def test_a_reference_goes_the_same_way(tmp_path: Path) -> None:
    async with project(tmp_path) as at:
        contract = f"version: 1\nimage:\n  reference: {BASE}\n"
        attempt = await at.run(at.commit({".forge/forge.sandbox.yml": contract}))
        assert (await at.result(attempt))["outcome"] == "succeeded"
        assert at.gates.asked[0][1] == (BASE, f"tooling@{IMAGE}")
        with tarfile.open(fileobj=io.BytesIO(at.builder.contexts[0])) as tar:
            assert tar.getnames() == [".forge/Dockerfile"]
        # Nothing of the repository is in it, so no other commit of it needs another one.
        again = await at.run(at.commit({"more": "code"}))
        await at.result(again)
        assert at.event(again, "image.resolved")["cache"] == "hit"


@pytest.mark.requirement("B-41")
async def test_the_contract_shapes_the_container_within_what_the_hub_says(tmp_path: Path) -> None:
    contract = "version: 1\ntmp:\n  executable: true\nenvironment:\n  A: contract\n  B: contract\n"
    async with project(tmp_path) as at:
        commit = at.commit({".forge/forge.sandbox.yml": contract})
        agent = {"provider": "command", "argv": ["env", "A"], "env": {"B": "hub"}}
        for name, value in (("A", "contract"), ("B", "hub")):
            attempt = await at.run(commit, agent={**agent, "argv": ["env", name]})
            assert (await at.result(attempt))["outcome"] == "succeeded"
            assert at.event(attempt, "log")["text"] == value
        assert all(
            "exec" in request["HostConfig"]["Tmpfs"]["/tmp"].split(",")
            for request in agents(at.engine)
        )


async def test_no_builder_is_said_and_ends_nothing_else(tmp_path: Path) -> None:
    engine = MemoryEngine()
    async with memory_bridge(tmp_path, engine=engine) as bridge:
        at = Project(bridge, engine, ScriptedBuilder(engine), ScriptedGates())
        attempt = await at.run(at.commit(FILES))
        result = await at.result(attempt)
        assert result["failureCode"] == "image_build_failed"
        assert "no builder" in result["summary"]


@pytest.mark.requirement("B-28")
async def test_the_evidence_of_a_build_stays_until_its_record_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though nothing without a record is kept, and another build ends in between."""
    async with project(tmp_path, sandbox_audit_retention_count=0) as at:
        records = at.bridge.service.images.pipeline.records
        put = ImageIndex.put

        async def put_late(index: ImageIndex, image: CachedImage) -> None:
            await records.prune(image.built_at_ms)
            await put(index, image)

        monkeypatch.setattr(ImageIndex, "put", put_late)
        attempt = await at.run(at.commit(FILES))
        assert (await at.result(attempt))["outcome"] == "succeeded"
        key = at.event(attempt, "image.resolved")["imageKey"]
        kept = at.bridge.state_root / "attestations" / key
        assert {path.name for path in kept.iterdir()} == {one.name for one in EVIDENCE}
