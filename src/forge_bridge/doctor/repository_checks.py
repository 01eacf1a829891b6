"""A project's contract and Dockerfile, as a runner would read them from a commit (B-41, B-52)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread

from forge_bridge.doctor.checks import Preflight
from forge_bridge.doctor.results import CheckResult, Gate, exit_code
from forge_core.contract import CONTRACT_PATH, DOCKERFILE_PATH, Contract, read_contract
from forge_core.dockerfile import analyse_dockerfile
from forge_core.dockerignore import IGNORE_PATHS, first_ignore
from forge_core.errors import ForgeError, RefusedError
from forge_edges.durable_file import on_disk, read_file
from forge_edges.git_borrowed import BORROWED, borrowed_store, resolve_commit

HEAD: Final = "HEAD"
MAX_FILE_BYTES: Final = 1 << 20
_COMMIT_IT: Final = "git add .forge && git commit"
_PATHS: Final = (CONTRACT_PATH, DOCKERFILE_PATH, *IGNORE_PATHS)

CONTRACT: Final = Gate("contract", "The contract can be used", CONTRACT_PATH)
DOCKERFILE: Final = Gate("dockerfile", "The Dockerfile may be built", DOCKERFILE_PATH)


@dataclass(frozen=True, slots=True)
class Project:
    """What was found about a repository.

    :param commit: the full id of the commit that was read; None: there is none yet.
    """

    path: Path
    commit: str | None
    results: tuple[CheckResult, ...]

    @property
    def summary(self) -> str:
        """Whether agents can work on it, in a sentence."""
        blockers = ", ".join(result.id for result in self.results if result.blocks)
        what = f"{self.path} at {self.commit[:12] if self.commit else 'no commit yet'}"
        return f"{what}: {f'no agent can work on it ({blockers})' if blockers else 'can be used'}"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The runner and, where one was named, a project on it."""

    preflight: Preflight
    project: Project | None

    @property
    def results(self) -> tuple[CheckResult, ...]:
        """Every finding; those about the project change nothing in what the runner offers."""
        return (*self.preflight.results, *(self.project.results if self.project else ()))

    @property
    def exit_code(self) -> int:
        """See :func:`forge_bridge.doctor.results.exit_code`."""
        return exit_code(self.results)


@dataclass(frozen=True, slots=True)
class Files:
    """The files in a commit and in the working tree; those that are not there are left out.

    :param commit: None: there is none yet.
    """

    commit: str | None
    committed: Mapping[str, bytes] = field(default_factory=dict)
    working: Mapping[str, bytes] = field(default_factory=dict)

    def seen(self, path: str) -> tuple[bytes | None, str]:
        """What is judged, and where it was seen: the commit's, else the working tree's."""
        if path in self.committed and self.commit is not None:
            return self.committed[path], f"commit {self.commit[:12]}"
        return self.working.get(path), "the working tree"

    def beside(self, path: str) -> Mapping[str, bytes]:
        """All files of the commit or of the working tree, wherever ``path`` was seen."""
        return self.committed if path in self.committed else self.working

    def differ(self, path: str) -> bool:
        """Whether the working tree has something else, line ends aside."""
        committed, working = self.committed.get(path), self.working.get(path)
        return _line_ends(committed) != _line_ends(working)


def default_repository(directory: Path) -> Path | None:
    """The working tree around ``directory``, when its project has a ``.forge``."""
    for candidate in (directory, *directory.parents):
        if (candidate / ".git").exists():
            return candidate if (candidate / ".forge").is_dir() else None
    return None


async def check_repository(clone: Path, revision: str | None = None) -> Project:
    """Look at the contract of a commit.

    :param clone: a clone, a working tree of one, or a bare repository.
    :param revision: names the commit; None: ``HEAD``, and where nothing has been committed yet,
        the working tree.
    :raises RefusedError: code ``malformed``: there is no repository, or no such commit.
    """
    try:
        commit = await resolve_commit(clone, revision or HEAD)
    except RefusedError as error:
        raise RefusedError(str(error), code="malformed", field="repository") from None
    if commit is None and revision is not None:
        raise RefusedError(
            f"cannot find the commit {revision[:100]!r} in {clone}",
            code="malformed",
            field="commit",
        )
    try:
        committed = {} if commit is None else await _committed(clone, commit)
    except ForgeError as error:
        unseen = CONTRACT.unseen(
            str(error), "commit plain files; whether the clone is whole says git fsck"
        )
        return Project(clone, commit, (unseen,))
    files = Files(commit, committed, await on_disk(_working, clone))
    return Project(clone, commit, await anyio.to_thread.run_sync(judge, files))


def judge(files: Files) -> tuple[CheckResult, ...]:
    """Every finding about the files."""
    content, where = files.seen(CONTRACT_PATH)
    if content is None:
        return (
            CONTRACT.warns(
                f"{_in(files)} there is no {CONTRACT_PATH}: agents work in the tooling image, "
                "without a network",
                "forge sandbox init",
            ),
        )
    try:
        contract = read_contract(content)
    except RefusedError as error:
        return (
            CONTRACT.blocks_all(f"{where}: {_one_line(error)}", f"mend {CONTRACT_PATH}, commit it"),
        )
    told = f"{where}: {_described(contract)}"
    return (_compared(CONTRACT, files, CONTRACT_PATH, told), *_dockerfile(contract, files))


def _dockerfile(contract: Contract, files: Files) -> tuple[CheckResult, ...]:
    content, where = files.seen(DOCKERFILE_PATH)
    if contract.image is None or contract.image.dockerfile is None:
        if content is None:
            return ()
        unused = f"{where}: nothing is built from it, for the contract does not name it"
        return (DOCKERFILE.warns(unused, f"image: {{dockerfile: {DOCKERFILE_PATH}}}"),)
    if content is None:
        return (
            DOCKERFILE.blocks_all(
                f"{_in(files)} there is none, and the contract names it",
                "forge sandbox init --base IMAGE shows one",
            ),
        )
    try:
        analysis = analyse_dockerfile(content)
        if analysis.reads_context:
            first_ignore(files.beside(DOCKERFILE_PATH))
    except RefusedError as error:
        return (
            DOCKERFILE.blocks_all(
                f"{where}: {_one_line(error)}", f"mend {DOCKERFILE_PATH}, commit it"
            ),
        )
    images = ", ".join(analysis.external) or "nothing"
    return (_compared(DOCKERFILE, files, DOCKERFILE_PATH, f"{where}: it fetches {images}"),)


def _compared(check: Gate, files: Files, path: str, told: str) -> CheckResult:
    if path not in files.committed:
        return check.warns(f"{told}; it is not committed, and runners read commits", _COMMIT_IT)
    if path in files.working and files.differ(path):
        other = "the working tree has another one, which no runner reads"
        return check.warns(f"{told}; {other}{_also_wrong(files, path)}", _COMMIT_IT)
    return check.passed(told)


def _also_wrong(files: Files, path: str) -> str:
    try:
        (read_contract if path == CONTRACT_PATH else analyse_dockerfile)(files.working[path])
    except RefusedError as error:
        return f", and it is wrong: {_one_line(error)}"
    return ""


def _described(contract: Contract) -> str:
    image = contract.image and (contract.image.dockerfile or contract.image.reference)
    parts = [f"image {image or 'of the tooling'}", f"network {contract.network.policy.value}"]
    parts += [f"service {service.name.value}" for service in contract.services]
    parts += [f"port {port.container}" for port in contract.ports]
    if contract.secrets:
        parts.append(f"secrets {', '.join(contract.secrets)}")
    return ", ".join(parts)


def _in(files: Files) -> str:
    return "in the working tree" if files.commit is None else f"in commit {files.commit[:12]}"


def _one_line(error: RefusedError) -> str:
    head, *lines = str(error).split("\n")
    return f"{head} {'; '.join(line.strip() for line in lines)}".strip()


def _line_ends(content: bytes | None) -> bytes | None:
    return None if content is None else content.replace(b"\r\n", b"\n")


async def _committed(clone: Path, commit: str) -> dict[str, bytes]:
    async with borrowed_store(clone, commit) as stores:
        found = await stores.read_files(BORROWED, commit, dict.fromkeys(_PATHS, MAX_FILE_BYTES))
    return {path: content for path, content in found.items() if content is not None}


def _working(clone: Path) -> dict[str, bytes]:
    """What the working tree has of them; what cannot be read counts as not there."""
    found = {}
    for path in _PATHS:
        try:
            found[path] = read_file(clone / path, MAX_FILE_BYTES)
        except ForgeError:
            continue
    return found
