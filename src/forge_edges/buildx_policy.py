"""What BuildKit itself may fetch, whatever a Dockerfile says (BuildKit, *Source policy*).

The Dockerfile's analysis decides what is allowed; this makes the builder refuse the rest, so
that a file which builds otherwise than it reads gets nothing by it.  Rules are tried in order
and the last one that matches decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from forge_core.sandbox_spec import without_tag

DOCKER_HUB: Final = "docker.io"
_OLD_DOCKER_HUB: Final = "index.docker.io"
CONTEXT: Final = "http://buildkit-session/*"
"""How a context that comes through the client's own session is called; nothing is fetched."""


def source_policy(allowed: Iterable[str]) -> dict[str, Any]:
    """Deny every source but the build's own context and ``allowed``.

    :param allowed: identifiers such as ``docker-image://registry.example/python@sha256:…``.
    """
    rules: list[dict[str, Any]] = [
        {"action": "DENY", "selector": {"identifier": "*"}},
        {"action": "ALLOW", "selector": {"identifier": CONTEXT}},
    ]
    rules += [
        {"action": "ALLOW", "selector": {"identifier": identifier, "matchType": "EXACT"}}
        for identifier in allowed
    ]
    return {"rules": rules}


def image_identifiers(reference: str) -> tuple[str, ...]:
    """How BuildKit calls an image that the engine or a registry has."""
    return tuple(f"docker-image://{name}" for name in _names(reference))


def layout_identifiers(reference: str, digest: str) -> tuple[str, ...]:
    """How BuildKit calls a named context ``reference`` that is an OCI layout.

    :param digest: of the layout's manifest, which takes the place of the reference's own.
    """
    names = _names(reference.partition("@")[0])
    return tuple(f"oci-layout://{name}@{digest}" for name in names)


def _names(reference: str) -> tuple[str, ...]:
    """The full name, with its tag and without; a tag beside a digest decides nothing."""
    full = canonical(reference)
    if "@" in full:
        return tuple(dict.fromkeys((full, without_tag(full))))
    return (full, f"{full}:latest") if full == repository_of(full) else (full,)


def canonical(reference: str) -> str:
    """The reference with its registry, as distribution/reference normalises it."""
    first, slash, rest = reference.partition("/")
    if not slash or not ("." in first or ":" in first or first == "localhost"):
        first, rest = DOCKER_HUB, reference
    if first == _OLD_DOCKER_HUB:
        first = DOCKER_HUB
    if first == DOCKER_HUB and "/" not in rest:
        rest = f"library/{rest}"
    return f"{first}/{rest}"


def repository_of(reference: str) -> str:
    """The full name without tag and digest."""
    head, slash, last = canonical(reference.partition("@")[0]).rpartition("/")
    return f"{head}{slash}{last.partition(':')[0]}"
