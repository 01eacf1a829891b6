"""What we send of a commit is what a real builder would take of its directory."""

from __future__ import annotations

import os
import subprocess
import tarfile
from pathlib import Path

import pytest
from git_parts import git, word

from engines import Engine
from forge_core.dockerignore import IGNORE_PATHS, Ignore
from forge_edges.git_input import ensure_commit
from forge_edges.git_stores import GitStores

pytestmark = [pytest.mark.requirement("B-52"), pytest.mark.engine("d26")]

DOCKERFILE = ".forge/Dockerfile"
OWN, COMMON = IGNORE_PATHS
FILES = [
    *("README.md", "a", "b.o", "log.txt", "dir/a", "dir/b.o", "dir/keep/c", "dir/keep/d.o"),
    *("src/x/y/z.py", "src/x/y/z.pyc", "src/x/__pycache__/q", "docs/a.md", "docs/sub/b.md"),
    *(".hidden/file", "spaced name/file x", "[odd]/*", "é/ü"),
]
RULES = {
    "nothing": "",
    "directories and an exception": "dir\n!dir/keep\ndir/keep/*.o\n",
    "exception of all": "*\n!src\nsrc/**/*.pyc\n**/__pycache__\n",
    "exception deep inside": "*\n!docs/sub/b.md\n",
    "exception of a parent": "dir/keep\n!dir\n",
    "stars": "**/*.o\n*.md\n!READ*\n.*\n",
    "escapes and sets": "\\[odd\\]\n[a-b]\n**/[^r]??.md\n",
    "slashes and dots": "/dir/\n./docs/../src/x//y/\n../a\n",
    "comments and blanks": "\ufeff# c\n\n  a  \r\n#dir\n spaced name \n",
    "double stars": "docs**\n**keep\nsrc/**/z*\n",
    "the Dockerfile too": ".forge\n.dockerignore\n",
    "everything": "**\n",
}


class Bench:
    """A working tree with a commit, and the builder of an engine."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine, self.folder = engine, folder
        self.tree = folder / "tree"
        for name in FILES:
            self.write(name, "x")
        self.write(DOCKERFILE, "FROM scratch\nCOPY . /\n")
        (self.tree / "link").symlink_to("dir/a")
        (self.tree / "loop").symlink_to("../outside")
        git(self.tree, "init", "-q")

    def write(self, name: str, text: str) -> None:
        (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
        (self.tree / name).write_text(text, encoding="utf-8", newline="")

    def taken(self, context: str, data: bytes = b"") -> set[str]:
        """What ``COPY . /`` takes of a directory, or of a tar on standard input."""
        result = self.folder / "result.tar"
        options = ("--builder=default", "--network=none", f"--output=type=tar,dest={result}")
        name = DOCKERFILE if context == "-" else str(self.tree / DOCKERFILE)
        built = subprocess.run(
            [self.engine.docker_executable, "buildx", "build", *options, "-f", name, context],
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(self.folder),
                "DOCKER_CONFIG": self.engine.docker_config,
                "DOCKER_HOST": self.engine.base_url,
            },
            input=data,
            capture_output=True,
            check=False,
            timeout=100,
        )
        assert built.returncode == 0, built.stderr[-2000:]
        with tarfile.open(result) as tar:
            return {name.strip("/") for name in tar.getnames()} - {"", "."}

    async def sent(self) -> bytes:
        """What we send of a commit of all that."""
        git(self.tree, "add", "-A")
        git(self.tree, "commit", "-q", "--allow-empty", "-m", "x")
        commit = word(self.tree, "rev-parse", "HEAD")
        stores = GitStores(self.folder / "stores", {"project": self.tree})
        await ensure_commit(self.tree, self.folder / "stores/project.git", commit)
        rules = [await stores.read_file("project", commit, p, 1 << 20) for p in IGNORE_PATHS]
        found = next((data for data in rules if data is not None), b"")
        chunks = stores.build_context(
            "project", commit, ignore=Ignore.parse(found), max_bytes=1 << 20
        )
        return b"".join([chunk async for chunk in chunks])

    def of_the_directory(self) -> set[str]:
        (self.tree / ".git").rename(self.folder / "set aside")
        try:
            return self.taken(str(self.tree))
        finally:
            (self.folder / "set aside").rename(self.tree / ".git")


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
async def test_a_builder_takes_the_same_files(engine: Engine, tmp_path: Path, rules: str) -> None:
    bench = Bench(engine, tmp_path)
    bench.write(COMMON, rules)
    archive = await bench.sent()
    expected = bench.of_the_directory()
    # The Dockerfile is always sent: the builder reads it from there.
    assert bench.taken("-", archive) == expected | {".forge", DOCKERFILE}


@pytest.mark.parametrize("own", ["dir\n", ""], ids=["rules", "empty"])
async def test_the_file_beside_the_dockerfile_counts_alone(
    engine: Engine, tmp_path: Path, own: str
) -> None:
    bench = Bench(engine, tmp_path)
    bench.write(OWN, own)
    bench.write(COMMON, "docs\n")
    archive = await bench.sent()
    expected = bench.of_the_directory()
    assert "docs/a.md" in expected
    assert ("dir/a" in expected) == (own == "")
    assert bench.taken("-", archive) == expected
