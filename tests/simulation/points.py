"""The points at which a life of the bridge can be killed; named as in tests/crash."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from forge_core.outbox import Entry

LOOKS: Final = frozenset(
    {
        "attach",
        "inspect_container",
        "inspect_image",
        "inspect_network",
        "list_images",
        "list_resources",
        "network_endpoints",
        "path_kind",
        "read the engine's facts",
        "read the engine's info",
        "wait_container",
    }
)
"""What changes nothing in the engine, so that a death at it is one at the point before it."""

CALLS: Final = frozenset(
    {"RegisterRunner", "ReadAttemptSnapshot", "RedeemPublishGrant", "SubmitOfferDecision"}
)
"""The calls that are not made durable first."""

Reach = Callable[[str], None]
Names = Mapping[str, Callable[..., str | None]]


class Surrounded:
    """A port of which some methods have a point before and one after.

    :param names: of those, by method, from what it is called with; None: none this time.
    """

    def __init__(self, port: Any, reach: Reach, names: Names) -> None:
        self._port = port
        self._reach = reach
        self._names = names

    def __getattr__(self, method: str) -> Any:
        effect, name_of = getattr(self._port, method), self._names.get(method)
        if name_of is None:
            return effect

        async def surrounded(*arguments: Any, **named: Any) -> Any:
            name = name_of(*arguments)
            if name is None:
                return await effect(*arguments, **named)
            self._reach(f"{name}:before")
            answer = await effect(*arguments, **named)
            self._reach(f"{name}:after")
            return answer

        return surrounded


def _always(name: str) -> Callable[..., str]:
    return lambda *_: name


def _message(verb: str) -> Callable[[Entry], str]:
    return lambda entry, *_: f"{verb} {entry.method} {entry.position or ''}".rstrip()


GIT_POINTS: Final[Names] = {
    name: _always(name) for name in ("ensure_commit", "import_bundle", "push")
}
LEDGER_POINTS: Final[Names] = {
    name: _always(f"{name} ledger") for name in ("create", "reopen", "remove", "mark_suspect")
}
MESSAGE_POINTS: Final[Names] = {
    "write": _message("store"),
    "remove": _message("forget"),
    "set_aside": _message("set_aside"),
}
CALL_POINTS: Final[Names] = {
    "invoke": lambda method, *_: method if method in CALLS else None,
}


def _on_host(request: str) -> Callable[..., str]:
    return lambda name, *_: f"{request} {'-'.join(name.split('-')[1:3])}"


BUILDER_POINTS: Final[Names] = {"build": _always("build")}
RECORD_POINTS: Final[Names] = {name: _always(f"{name} record") for name in ("put", "remove")}
EVIDENCE_POINTS: Final[Names] = {
    name: _always(f"{name} evidence") for name in ("put", "put_set", "remove")
}
HOST_POINTS: Final[Names] = {
    name: _on_host(name)
    for name in (
        "create_volume",
        "unpack",
        "create_container",
        "remove_container",
        "remove_volume",
    )
}


def engine_point(request: str, name: str) -> str:
    """A request to the engine, with the role of what it is about."""
    role = name.split("-")[1] if name.startswith("forge-") else ""
    return f"{request} {role}".rstrip()
