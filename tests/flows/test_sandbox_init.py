"""``forge sandbox init`` as a person uses it: what it writes, leaves alone, and says."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from engines import Engine
from forge_bridge.starter import Kind
from forge_bridge.starter.base_image import is_pinned, pinned_base
from forge_bridge.starter.begin import begin
from forge_bridge.starter.project import look_at
from forge_bridge.starter.render import starter_for
from forge_bridge.starter.write import write_starter
from forge_core.contract import CONTRACT_PATH, DOCKERFILE_PATH, Contract, read_contract
from forge_core.dockerfile import analyse_dockerfile
from forge_core.dockerignore import IGNORE_PATHS, Ignore
from forge_core.errors import DiskUnusable, RefusedError
from forge_edges.buildx_policy import DOCKER_HUB

pytestmark = pytest.mark.requirement("B-41")

PINNED = f"registry.example:5000/python@sha256:{'a' * 64}"
HASHED = "anyio==4.6.0 \\\n    --hash=sha256:" + "0" * 64 + "\n"
LOCKED = {
    Kind.PYTHON: {"pyproject.toml": "[project]\n", "requirements.lock": HASHED},
    Kind.NODE: {"package.json": "{}", "package-lock.json": "{}"},
    Kind.PHP: {"composer.json": "{}", "composer.lock": "{}"},
    Kind.PLAIN: {"Makefile": "all:\n"},
}
UNLOCKED = {kind: dict(list(files.items())[:1]) for kind, files in LOCKED.items()}
INSTALLS = {Kind.PYTHON: "--require-hashes", Kind.NODE: "npm ci", Kind.PHP: "composer install"}


def forge(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command line with nothing of ours in its environment but ``environment``."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    return subprocess.run(
        [sys.executable, "-c", "from forge_cli.main import main; main()", *arguments],
        env=kept | environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    path = tmp_path / "project"
    subprocess.run(["git", "init", "--quiet", str(path)], check=True, timeout=60)
    return path


def fill(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)


def entries(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def uncommented(contract: str) -> str:
    """With every example in it put to use."""
    _, _, examples = contract.partition("take the # away in front of what you need.\n#\n")
    assert examples
    return contract.replace(examples, re.sub(r"^# ", "", examples, flags=re.MULTILINE))


def test_without_options_it_writes_a_contract_that_asks_for_nothing(repository: Path) -> None:
    done = forge("sandbox", "init", cwd=repository)
    assert (done.returncode, done.stdout) == (0, f"{repository / CONTRACT_PATH}\n"), done.stderr
    assert "git add .forge" in done.stderr
    assert entries(repository / ".forge") == ["forge.sandbox.yml"]
    assert read_contract((repository / CONTRACT_PATH).read_bytes()) == Contract(version=1)


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("base", [None, PINNED])
@pytest.mark.parametrize("files", [LOCKED, UNLOCKED], ids=["locked", "unlocked"])
def test_every_starter_can_be_used_as_it_is_and_with_all_its_examples(
    repository: Path, kind: Kind, base: str | None, files: dict[Kind, dict[str, str]]
) -> None:
    fill(repository, files[kind])
    project = look_at(repository)
    assert project.kind is kind
    starter = starter_for(project, base)
    contract = read_contract(starter.files[CONTRACT_PATH].encode())
    assert (contract.image is not None) == (base is not None)
    searched = base is not None and files is LOCKED and kind in (Kind.PYTHON, Kind.NODE)
    assert ("PATH" in contract.environment) == searched
    whole = read_contract(uncommented(starter.files[CONTRACT_PATH]).encode())
    assert whole.services
    assert whole.network.domains
    assert whole.secrets
    if base is None:
        assert set(starter.files) == {CONTRACT_PATH}
        return
    assert set(starter.files) == {CONTRACT_PATH, DOCKERFILE_PATH, IGNORE_PATHS[0]}
    dockerfile = starter.files[DOCKERFILE_PATH]
    assert analyse_dockerfile(dockerfile.encode()).external == (PINNED,)
    assert dockerfile.endswith("USER 1000:1000\n")
    commands = [line for line in dockerfile.splitlines() if not line.startswith("#")]
    installs = any(INSTALLS.get(kind, "nothing") in line for line in commands)
    assert installs == (files is LOCKED and kind is not Kind.PLAIN)
    head, found, steps = dockerfile.partition("take the # away:\n")
    assert bool(found) == (files is UNLOCKED and kind is not Kind.PLAIN)
    with_steps = head + re.sub(r"^# (?!Agents|Node|The)", "", steps, flags=re.MULTILINE)
    assert analyse_dockerfile(with_steps.encode()).external == (PINNED,)
    assert not found or INSTALLS[kind] in re.sub(r"#.*", "", with_steps)
    copied = re.findall(r"^COPY (.*) \./$", with_steps, re.MULTILINE)
    ignore = Ignore.parse(starter.files[IGNORE_PATHS[0]].encode())
    assert not [path for path in " ".join(copied).split() if ignore.excludes(path)]
    assert bool(copied) == (kind is not Kind.PLAIN)
    for path in ("README.md", "src/main.py", "requirements/other.txt", ".forge/forge.sandbox.yml"):
        assert ignore.excludes(path)


def test_a_lock_in_a_directory_is_sent_alone(repository: Path) -> None:
    fill(repository, {"setup.py": "", "requirements/dev.lock": HASHED})
    files = starter_for(look_at(repository), PINNED).files
    assert "COPY requirements/dev.lock ./\n" in files[DOCKERFILE_PATH]
    assert "--requirement dev.lock\n" in files[DOCKERFILE_PATH]
    ignore = Ignore.parse(files[IGNORE_PATHS[0]].encode())
    assert not ignore.excludes("requirements/dev.lock")
    assert ignore.excludes("requirements/run.lock")


@pytest.mark.parametrize(
    ("files", "kind", "seen", "lock"),
    [
        ({}, Kind.PLAIN, None, None),
        ({"requirements.txt": "anyio\n"}, Kind.PYTHON, "requirements.txt", None),
        ({"setup.py": "", "requirements.txt": HASHED}, Kind.PYTHON, "setup.py", "requirements.txt"),
        (
            {"setup.cfg": "", "requirements/run.txt": HASHED, "requirements/dev.lock": HASHED},
            *(Kind.PYTHON, "setup.cfg", "requirements/dev.lock"),
        ),
        ({"setup.py": "", "requirements.txt": f"-cx.txt\n{HASHED}"}, Kind.PYTHON, "setup.py", None),
        ({"setup.py": "", "requirements.txt": f"-e .\n{HASHED}"}, Kind.PYTHON, "setup.py", None),
        ({"setup.py": "", "a requirements.txt": HASHED}, Kind.PYTHON, "setup.py", None),
        ({"pyproject.toml": "", "package.json": "{}"}, Kind.PYTHON, "pyproject.toml", None),
        (
            {"package.json": '{"workspaces": ["a"]}', "package-lock.json": "{}"},
            *(Kind.NODE, "package.json", None),
        ),
        ({"package.json": "[", "package-lock.json": "{}"}, Kind.NODE, "package.json", None),
        ({"package.json": "[" * 99_999, "package-lock.json": ""}, Kind.NODE, "package.json", None),
    ],
)  # fmt: skip
def test_the_project_is_known_by_its_files(
    repository: Path, files: dict[str, str], kind: Kind, seen: str | None, lock: str | None
) -> None:
    fill(repository, files)
    found = look_at(repository)
    assert (found.kind, found.seen, found.lock) == (kind, seen, lock)


def test_the_kind_can_be_chosen(repository: Path) -> None:
    fill(repository, {**LOCKED[Kind.PYTHON], **LOCKED[Kind.NODE]})
    done = forge("sandbox", "init", "--kind", "node", "--base", PINNED, cwd=repository)
    assert done.returncode == 0, done.stderr
    assert "written for Node (package.json)" in done.stderr
    assert "npm ci" in (repository / DOCKERFILE_PATH).read_text()
    path = read_contract((repository / CONTRACT_PATH).read_bytes()).environment["PATH"]
    assert path.startswith("/node_modules/.bin:")


def test_it_is_written_at_the_top_of_the_working_tree(repository: Path) -> None:
    (repository / "src/deep").mkdir(parents=True)
    assert begin(repository / "src/deep").paths == (repository / CONTRACT_PATH,)
    assert entries(repository / "src") == ["deep"]


def test_outside_of_a_working_tree_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "broken/.git").mkdir(parents=True)
    for directory in (tmp_path, tmp_path / "broken", tmp_path / "absent"):
        with pytest.raises(RefusedError, match=f"cannot use {directory}: "):
            begin(directory)
    assert entries(tmp_path) == ["broken"]


def test_nothing_is_overwritten(repository: Path) -> None:
    there = repository / DOCKERFILE_PATH
    fill(repository, {DOCKERFILE_PATH: "mine"})
    done = forge("sandbox", "init", cwd=repository)
    assert done.returncode == 1
    assert done.stderr == (
        f"error: cannot write a starter: {there} is there, and nothing is ever overwritten; "
        "move it away first\n"
    )
    assert there.read_text() == "mine"
    assert entries(repository / ".forge") == ["Dockerfile"]
    assert entries(repository) == [".forge", ".git"]


@pytest.mark.parametrize("target", ["elsewhere", "absent", "project/.git", "file"])
def test_no_link_is_followed_out_of_the_repository(
    repository: Path, tmp_path: Path, target: str
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "file").touch()
    (repository / ".forge").symlink_to(tmp_path / target)
    with pytest.raises(RefusedError, match="is a symbolic link"):
        begin(repository)
    assert entries(tmp_path / "elsewhere") == []
    assert entries(repository) == [".forge", ".git"]


def test_an_empty_directory_is_no_obstacle_and_the_umask_holds(repository: Path) -> None:
    (repository / ".forge").mkdir()
    before = os.umask(0o027)
    try:
        begin(repository, base=PINNED)
    finally:
        os.umask(before)
    modes = {p.name: stat.S_IMODE(p.lstat().st_mode) for p in (repository / ".forge").iterdir()}
    names = ["Dockerfile", "Dockerfile.dockerignore", "forge.sandbox.yml"]
    assert modes == dict.fromkeys(names, 0o640)
    assert stat.S_IMODE((repository / ".forge").lstat().st_mode) == 0o750


def test_what_cannot_be_written_whole_is_not_written(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starter = starter_for(look_at(repository), PINNED)
    written = []

    def full_at_the_second(descriptor: int, data: bytes) -> None:
        written.append(os.write(descriptor, data[:10]))
        if len(written) == 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("forge_bridge.starter.write.write_all", full_at_the_second)
    with pytest.raises(DiskUnusable, match=r"cannot write .*No space left"):
        write_starter(repository, starter)
    assert len(written) == 2
    assert entries(repository) == [".git"]


def test_of_two_at_once_one_writes(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starter = starter_for(look_at(repository), PINNED)
    rename = Path.rename

    def after_another(draft: Path, directory: Path) -> Path:
        monkeypatch.setattr(Path, "rename", rename)
        fill(repository, {".forge/forge.sandbox.yml": "another's"})
        return rename(draft, directory)

    monkeypatch.setattr(Path, "rename", after_another)
    with pytest.raises(DiskUnusable, match="Directory not empty"):
        write_starter(repository, starter)
    assert (repository / CONTRACT_PATH).read_text() == "another's"
    assert entries(repository) == [".forge", ".git"]


def test_a_base_with_its_digest_needs_no_engine(repository: Path) -> None:
    base = f"python:3.12@sha256:{'a' * 64}"
    nowhere = f"unix://{repository}/no.sock"
    done = forge("sandbox", "init", "--base", base, cwd=repository, DOCKER_HOST=nowhere)
    assert done.returncode == 0, done.stderr
    assert f"FROM {base}\n" in (repository / DOCKERFILE_PATH).read_text()
    assert is_pinned(PINNED)
    assert not is_pinned("python:3.12")


@pytest.mark.parametrize(
    "base", ["python:3.12@sha256:abc", f"a b@sha256:{'a' * 64}", f"x@md5:{'a' * 64}", "x\n@y"]
)
def test_a_base_that_is_no_reference_is_refused(base: str) -> None:
    with pytest.raises(RefusedError, match="cannot use --base: "):
        is_pinned(base)


class OneImage:
    """An engine with one image."""

    def __init__(self, *digests: str) -> None:
        self._digests = digests

    async def inspect_image(self, reference: str) -> dict[str, object]:
        return {"RepoDigests": list(self._digests)}


@pytest.mark.parametrize(
    ("image", "number"),
    [
        ("python:3.12", 1),
        ("python", 1),
        (f"{DOCKER_HUB}/python", 1),
        (f"{DOCKER_HUB}/library/python:3.12", 1),
        ("mirror.example:5000/python", 0),
        ("5e1f", 0),
    ],
)
async def test_of_several_registries_the_named_one_counts(image: str, number: int) -> None:
    digests = (f"mirror.example:5000/python@sha256:{'a' * 64}", f"python@sha256:{'b' * 64}")
    assert await pinned_base(cast("Any", OneImage(*digests)), image) == digests[number]
    with pytest.raises(RefusedError, match="it came from no registry"):
        await pinned_base(cast("Any", OneImage()), image)


@pytest.mark.engine("d26")
def test_a_base_by_name_is_pinned_by_what_the_engine_knows(
    engine: Engine, repository: Path
) -> None:
    where = {"DOCKER_HOST": engine.base_url}
    done = forge("sandbox", "init", "--base", "no-such:image", cwd=repository, **where)
    assert done.returncode == 2
    assert "cannot build on no-such:image: the engine does not have it" in done.stderr
    assert entries(repository) == [".git"]
    # By its id, so that nothing in the engine is named anew: with the last tag of a repository
    # the engine forgets the digests that it has there, which are what other tests go by.
    image = engine.api.get(f"/images/{engine.busybox_image}/json")
    done = forge("sandbox", "init", "--base", image["Id"], cwd=repository, **where)
    assert done.returncode == 0, done.stderr
    pinned = re.findall(r"^FROM (.*)$", (repository / DOCKERFILE_PATH).read_text(), re.MULTILINE)
    assert len(pinned) == 1
    assert pinned[0] in image["RepoDigests"]
