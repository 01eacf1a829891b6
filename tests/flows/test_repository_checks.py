"""``forge sandbox doctor`` on a project: the commit counts, and nothing around it has a say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engines import Engine
from forge_bridge.doctor import CheckResult, Verdict
from forge_bridge.doctor.repository_checks import (
    MAX_FILE_BYTES,
    Project,
    check_repository,
    default_repository,
)
from forge_bridge.starter.begin import begin
from forge_core.contract import CONTRACT_PATH, DOCKERFILE_PATH
from forge_core.errors import RefusedError

pytestmark = pytest.mark.requirement("B-41", "B-52")

PINNED = f"registry.example:5000/python@sha256:{'a' * 64}"
FORGE = (sys.executable, "-c", "from forge_cli.main import main; main()")
EMPTY = "version: 1\n"
COPYING = "FROM scratch\nCOPY . /\n"
BUILT = f"version: 1\nimage: {{dockerfile: {DOCKERFILE_PATH}}}\n"


def git(repository: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    return subprocess.run(
        ["git", *identity, *arguments],
        cwd=repository,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    path = tmp_path / "project"
    git(tmp_path, "init", "--quiet", str(path))
    return path


def write(repository: Path, **files: str | bytes) -> None:
    """``contract=`` and ``dockerfile=`` in the working tree."""
    for name, text in files.items():
        path = repository / {"contract": CONTRACT_PATH, "dockerfile": DOCKERFILE_PATH}[name]
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)


def commit(repository: Path, **files: str | bytes) -> str:
    write(repository, **files)
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "--allow-empty", "--message", "x")
    return git(repository, "rev-parse", "HEAD")


def finding(project: Project, check: str = "contract") -> CheckResult:
    (result,) = [result for result in project.results if result.id == check]
    return result


@pytest.mark.parametrize("base", [None, PINNED])
async def test_a_starter_passes_at_once_and_without_a_warning_once_committed(
    repository: Path, base: str | None
) -> None:
    begin(repository, base=base)
    checks = ["contract"] if base is None else ["contract", "dockerfile"]
    fresh = await check_repository(repository)
    assert [(result.id, result.verdict) for result in fresh.results] == [
        (check, Verdict.WARN) for check in checks
    ]
    assert finding(fresh).remedy == "git add .forge && git commit"
    assert finding(fresh).evidence.endswith("it is not committed, and runners read commits")
    sha = commit(repository)
    committed = await check_repository(repository)
    assert committed.commit == sha
    assert [(result.id, result.verdict) for result in committed.results] == [
        (check, Verdict.PASS) for check in checks
    ]
    assert sha[:12] in finding(committed).evidence


async def test_without_a_contract_it_is_said_what_that_means(repository: Path) -> None:
    for _ in range(2):
        result = finding(await check_repository(repository))
        assert (result.verdict, result.remedy) == (Verdict.WARN, "forge sandbox init")
        commit(repository)


async def test_the_working_tree_is_compared_and_not_believed(repository: Path) -> None:
    commit(repository, contract="version: 1\nnetwork: {policy: no}\n")
    write(repository, contract=EMPTY)
    broken = finding(await check_repository(repository))
    assert broken.verdict is Verdict.BLOCK_ALL
    assert "line 2: network.policy: no is unknown here" in broken.evidence
    commit(repository)
    write(repository, contract="version: 1\nnetwork: {policy: no}\n")
    other = finding(await check_repository(repository))
    assert other.verdict is Verdict.WARN
    assert "the working tree has another one, which no runner reads" in other.evidence
    assert "and it is wrong: cannot use .forge/forge.sandbox.yml: line 2: " in other.evidence
    write(repository, contract=f"{EMPTY}tmp: {{}}\n")
    assert finding(await check_repository(repository)).evidence.endswith("which no runner reads")


async def test_line_ends_of_a_checkout_are_no_difference(repository: Path) -> None:
    commit(repository, contract=EMPTY)
    write(repository, contract=EMPTY.replace("\n", "\r\n"))
    assert finding(await check_repository(repository)).verdict is Verdict.PASS


async def test_everything_that_is_wrong_is_in_one_line(repository: Path) -> None:
    commit(repository, contract="version: 1\nimage: {}\ntmp: x\n")
    evidence = finding(await check_repository(repository)).evidence
    assert "\n" not in evidence
    assert "line 2: image: " in evidence
    assert "line 3: tmp: " in evidence


@pytest.mark.parametrize(
    ("contract", "dockerfile", "verdict", "evidence"),
    [
        (BUILT, f"FROM {PINNED}\n", Verdict.PASS, f"it fetches {PINNED}"),
        (BUILT, "FROM scratch\n", Verdict.PASS, "it fetches nothing"),
        (BUILT, "FROM python\n", Verdict.BLOCK_ALL, "line 1, FROM: "),
        (BUILT, "", Verdict.BLOCK_ALL, "line 1: the file has no "),
        (BUILT, None, Verdict.BLOCK_ALL, "there is none, and the contract names it"),
        (EMPTY, "FROM python\n", Verdict.WARN, "the contract does not name it"),
        (EMPTY, None, None, ""),
    ],
)
async def test_the_dockerfile_is_judged_when_it_counts(
    repository: Path,
    contract: str,
    dockerfile: str | None,
    verdict: Verdict | None,
    evidence: str,
) -> None:
    write(repository, contract=contract)
    if dockerfile is not None:
        write(repository, dockerfile=dockerfile)
    commit(repository)
    results = {result.id: result for result in (await check_repository(repository)).results}
    assert results["contract"].verdict is Verdict.PASS
    found = results.get("dockerfile")
    assert (found and found.verdict) is verdict
    assert found is None or evidence in found.evidence


async def test_a_pattern_that_no_build_would_take_is_found(repository: Path) -> None:
    (repository / ".dockerignore").write_text("[\n")
    commit(repository, contract=BUILT, dockerfile=COPYING)
    found = finding(await check_repository(repository), "dockerfile")
    assert found.verdict is Verdict.BLOCK_ALL
    assert "cannot use .dockerignore: " in found.evidence
    (repository / f"{DOCKERFILE_PATH}.dockerignore").write_text("*\n")
    commit(repository)
    assert finding(await check_repository(repository), "dockerfile").verdict is Verdict.PASS


async def test_the_patterns_are_those_of_the_commit_that_has_the_dockerfile(
    repository: Path,
) -> None:
    commit(repository, contract=BUILT, dockerfile=COPYING)
    (repository / ".dockerignore").write_text("[\n")
    assert finding(await check_repository(repository), "dockerfile").verdict is Verdict.PASS
    commit(repository)
    (repository / f"{DOCKERFILE_PATH}.dockerignore").write_text("*\n")
    found = finding(await check_repository(repository), "dockerfile")
    assert found.verdict is Verdict.BLOCK_ALL


async def test_patterns_do_not_count_where_no_context_is_sent(repository: Path) -> None:
    (repository / ".dockerignore").write_text("[\n")
    commit(repository, contract=BUILT, dockerfile="FROM scratch\n")
    assert finding(await check_repository(repository), "dockerfile").verdict is Verdict.PASS


async def test_any_commit_can_be_looked_at(repository: Path) -> None:
    old = commit(repository, contract="version: 2\n")
    new = commit(repository, contract=EMPTY)
    for revision, sha, verdict in (
        (old, old, Verdict.BLOCK_ALL),
        ("HEAD~1", old, Verdict.BLOCK_ALL),
        (new[:10], new, Verdict.WARN),
    ):
        write(repository, contract=f"{EMPTY}# changed\n")
        project = await check_repository(repository, revision)
        assert (project.commit, finding(project).verdict) == (sha, verdict)
    for nonsense in ("nowhere", "--help", "HEAD:.forge", "0" * 40):
        with pytest.raises(RefusedError, match="cannot find the commit"):
            await check_repository(repository, nonsense)


async def test_nothing_of_the_clone_but_its_objects_has_a_say(
    repository: Path, tmp_path: Path
) -> None:
    ran = tmp_path / "ran"
    git(repository, "config", "filter.evil.smudge", f"touch {ran}; cat")
    git(repository, "config", "filter.evil.clean", "cat")
    git(repository, "config", "core.fsmonitor", f"touch {ran}")
    (repository / ".gitattributes").write_text("* filter=evil\n")
    good = commit(repository, contract=EMPTY)
    bad = commit(repository, contract="version: 2\n")
    ran.unlink(missing_ok=True)
    git(repository, "replace", bad, good)
    assert finding(await check_repository(repository, bad)).verdict is Verdict.BLOCK_ALL
    assert not ran.exists()


@pytest.mark.parametrize("kind", ["linked", "bare", "sha256"])
async def test_every_kind_of_clone_is_read(repository: Path, tmp_path: Path, kind: str) -> None:
    other = tmp_path / "other"
    if kind == "sha256":
        git(tmp_path, "init", "--quiet", "--object-format=sha256", str(other))
        sha = commit(other, contract=EMPTY)
    else:
        sha = commit(repository, contract=EMPTY)
        add = ("worktree", "add", "--detach") if kind == "linked" else ("clone", "--bare", ".")
        git(repository, *add, str(other))
    project = await check_repository(other)
    assert (project.commit, finding(project).verdict) == (sha, Verdict.PASS)


async def test_what_is_no_plain_file_in_the_commit_is_refused(repository: Path) -> None:
    (repository / ".forge").mkdir()
    (repository / "elsewhere.yml").write_text(EMPTY)
    (repository / CONTRACT_PATH).symlink_to("../elsewhere.yml")
    commit(repository)
    assert finding(await check_repository(repository)).verdict is Verdict.BLOCK_ALL
    (repository / CONTRACT_PATH).unlink()
    commit(repository, contract="#" * (MAX_FILE_BYTES + 1))
    assert finding(await check_repository(repository)).verdict is Verdict.BLOCK_ALL


async def test_a_clone_that_has_lost_an_object_cannot_be_looked_at(repository: Path) -> None:
    commit(repository, contract=EMPTY)
    blob = git(repository, "rev-parse", f"HEAD:{CONTRACT_PATH}")
    (repository / ".git/objects" / blob[:2] / blob[2:]).unlink()
    result = finding(await check_repository(repository))
    assert (result.verdict, result.looked) == (Verdict.BLOCK_ALL, False)


async def test_a_repository_is_needed(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(RefusedError, match=f"cannot use {path}") as caught:
            await check_repository(path)
        assert caught.value.code == "malformed"


def test_the_repository_around_is_taken_when_it_has_a_contract(repository: Path) -> None:
    (repository / "src/deep").mkdir(parents=True)
    assert default_repository(repository / "src/deep") is None
    begin(repository)
    assert default_repository(repository / "src/deep") == repository
    assert default_repository(repository.parent) is None


def doctor(
    *arguments: str, cwd: Path, **environment: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, str]]:
    """The run, and with ``--json`` verdict by check."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from forge_cli.main import main; main()",
            "sandbox",
            "doctor",
            *arguments,
        ],
        env=kept | environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    if "--json" not in arguments or not done.stdout:
        return done, {}
    return done, {check["id"]: check["verdict"] for check in json.loads(done.stdout)["checks"]}


@pytest.mark.engine("d26")
def test_a_starter_passes_the_doctor_at_once(
    engine: Engine, repository: Path, tmp_path: Path
) -> None:
    begin(repository, base=PINNED)
    settings = {
        "DOCKER_HOST": engine.base_url,
        "FORGE_AGENT_TOOLING_IMAGE": engine.tooling_image,
        "FORGE_SANDBOX_STATE_ROOT": str(tmp_path / "state"),
    }
    without, runner = doctor("--json", cwd=tmp_path, **settings)
    assert json.loads(without.stdout)["repository"] is None
    done, found = doctor("--json", cwd=repository, **settings)
    assert done.returncode == without.returncode
    assert found == {**runner, "contract": "warn", "dockerfile": "warn"}
    sha = commit(repository)
    named, found = doctor("--json", "--repository", str(repository), cwd=tmp_path, **settings)
    assert named.returncode == without.returncode
    assert found == {**runner, "contract": "pass", "dockerfile": "pass"}
    assert json.loads(named.stdout)["repository"] == {"path": str(repository), "commit": sha}
    assert json.loads(named.stdout)["capabilities"] == json.loads(without.stdout)["capabilities"]


@pytest.mark.engine("d26")
@pytest.mark.requirement("B-41")
def test_what_is_logged_meanwhile_is_beside_the_result(engine: Engine, tmp_path: Path) -> None:
    settings = {
        "DOCKER_HOST": engine.base_url,
        "FORGE_DOCKER_EXECUTABLE": str(tmp_path / "no-docker"),
        "FORGE_SANDBOX_STATE_ROOT": str(tmp_path / "state"),
    }
    done, found = doctor("--json", cwd=tmp_path, **settings)
    assert found["builder"] == "block_required"
    assert "images of projects cannot be built" in done.stderr


def test_exit_status_and_text_say_what_is_wrong(repository: Path, tmp_path: Path) -> None:
    commit(repository, contract="version: 2\n")
    nowhere = {"DOCKER_HOST": f"unix://{tmp_path}/no.sock"}
    done, _ = doctor(cwd=repository, **nowhere)
    assert done.returncode == 2, "the engine could not be looked at"
    assert "line 1: version: 2 is unknown here" in done.stdout
    assert "no agent can work on it (contract)" in done.stdout
    for arguments in (("--commit", "HEAD"), ("--repository", ".")):
        wrong, _ = doctor(*arguments, cwd=tmp_path, **nowhere)
        assert wrong.returncode == 2
        assert wrong.stderr.startswith("error: cannot ")
