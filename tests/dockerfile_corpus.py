"""The corpus of nasty Dockerfiles in ``core/dockerfiles``, with what must become of each."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "core" / "dockerfiles"
BASE = "registry.invalid/base"
OTHER = "registry.invalid/other"
DIGESTS = {BASE: "a" * 64, OTHER: "b" * 64}


@dataclass(frozen=True)
class Case:
    """One file.

    :param external: of an accepted file: everything that it fetches.
    :param refused: of a refused one: parts of the message.
    :param fetches: part of the name of what a real builder would fetch unasked.
    """

    name: str
    content: bytes
    external: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    fetches: str = ""

    def __str__(self) -> str:
        return self.name


def _pinned(name: str) -> str:
    repository = BASE if name.startswith("base") else OTHER
    return f"registry.invalid/{name}@sha256:{DIGESTS[repository]}"


def cases() -> list[Case]:
    """All of them; a file without a verdict, or a verdict without a file, is an error."""
    verdicts = tomllib.loads((FOLDER / "verdicts.toml").read_text("utf-8"))
    files = {path.name.removesuffix(".Dockerfile"): path for path in FOLDER.glob("*.Dockerfile")}
    assert verdicts.keys() == files.keys()
    return [
        Case(
            name,
            files[name].read_bytes(),
            tuple(map(_pinned, verdict.get("external", ()))),
            tuple(verdict.get("refused", ())),
            verdict.get("fetches", ""),
        )
        for name, verdict in sorted(verdicts.items())
    ]
