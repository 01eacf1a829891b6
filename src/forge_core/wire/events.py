"""The payloads of dispatch events (wire.md, Payloads of dispatch events; B-84)."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from forge_core.wire.base import Commit, Count, Flag, Integer, Name, Positive, Text, WireModel
from forge_core.wire.codes import EventType, OutputStream
from forge_core.wire.shapes import MAX_LIST, InventoryItem, PublishedPort


class Empty(WireModel):
    """An event that says no more than its type."""


EMPTY: Final = Empty()


class ImageResolved(WireModel):
    """Which image runs, and whether it was there already."""

    image_key: Name
    digest: Name
    cache: Literal["hit", "miss"]


class BuildFailed(WireModel):
    """A failed build: where its log can be found on the runner, never the log (B-90)."""

    stage: Name
    log_digest: Name
    log_bytes: Count
    truncated: Flag


class SecretsRedeemed(WireModel):
    """Names of the secrets that were redeemed; never their values."""

    names: Annotated[tuple[Name, ...], Field(max_length=1024)]


class Inventory(WireModel):
    """Everything that the engine holds for the attempt, or one numbered part of it."""

    containers: Annotated[tuple[InventoryItem, ...], Field(max_length=MAX_LIST)] = ()
    networks: Annotated[tuple[InventoryItem, ...], Field(max_length=MAX_LIST)] = ()
    volumes: Annotated[tuple[InventoryItem, ...], Field(max_length=MAX_LIST)] = ()
    ports: Annotated[tuple[PublishedPort, ...], Field(max_length=MAX_LIST)] = ()
    part: Positive = 1
    parts: Positive = 1


class AgentExited(WireModel):
    """The agent's own status: exactly one of the two."""

    exit_code: Integer | None = None
    signal: Positive | None = None


class OutputImported(WireModel):
    """What came back; no commit when nothing had changed."""

    result_commit: Commit | None = None
    files: Count
    bytes: Count


class Warning_(WireModel):  # noqa: N801 - Warning is Python's own
    """Something that the operator should know and that ended nothing."""

    code: Name
    detail: Text


class Log(WireModel):
    """A chunk of what the agent printed, secrets masked."""

    stream: OutputStream
    text: Annotated[str, Field(max_length=30_000)]
    truncated: Flag = False
    dropped_bytes: Count = 0


class Deadline(WireModel):
    """A deadline that comes near."""

    which: Literal["lease", "hardWall", "idle"]
    remaining_ms: Count


PAYLOADS: Final[dict[EventType, type[WireModel]]] = {
    EventType.OFFER_RESERVED: Empty,
    EventType.IMAGE_RESOLVED: ImageResolved,
    EventType.BUILD_STARTED: Empty,
    EventType.BUILD_FINISHED: Empty,
    EventType.BUILD_FAILED: BuildFailed,
    EventType.SECRETS_REDEEMED: SecretsRedeemed,
    EventType.INVENTORY: Inventory,
    EventType.AGENT_STARTED: Empty,
    EventType.AGENT_EXITED: AgentExited,
    EventType.OUTPUT_IMPORTED: OutputImported,
    EventType.PUBLICATION_STARTED: Empty,
    EventType.TEARDOWN_STARTED: Empty,
    EventType.TEARDOWN_FINISHED: Empty,
    EventType.WARNING: Warning_,
    EventType.LOG: Log,
    EventType.DEADLINE: Deadline,
}
