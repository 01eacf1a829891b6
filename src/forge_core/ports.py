"""The doors through which decisions become effects.

Flows and stages see these Protocols only; ``forge_bridge.app`` hands in the edges that keep
them.  Every method may raise the errors of :mod:`forge_core.errors` and nothing else that is
expected; waiting is bounded by each edge itself.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from forge_core.dockerignore import Ignore
from forge_core.errors import ForgeError
from forge_core.publication import Pushed, Remote, Seen
from forge_core.ready import Message
from forge_core.wire.codes import ResourceKind
from forge_core.wire.shapes import EngineFacts

PayloadHandler = Callable[[object], None]
"""Takes one decoded JSON argument in the receive path: validates and queues, never waits."""


class BridgeConnection(Protocol):
    """One connection to the hub, from negotiate to close; never reused (B-01)."""

    async def start(self) -> None:
        """Connect; raises HubRefused or HubUnavailable."""

    async def stop(self) -> None:
        """Close in order, bounded in time; idempotent."""

    def on_close(self, handler: Callable[[ForgeError | None], None]) -> None:
        """Called exactly once; None after :meth:`stop`."""

    def on_dispatch(self, handler: PayloadHandler) -> None: ...
    def on_offer(self, handler: PayloadHandler) -> None: ...
    def on_start(self, handler: PayloadHandler) -> None: ...
    def on_lease_update(self, handler: PayloadHandler) -> None: ...
    def on_cancel(self, handler: PayloadHandler) -> None: ...
    def on_reap(self, handler: PayloadHandler) -> None: ...
    def on_runner_settings(self, handler: PayloadHandler) -> None: ...

    async def invoke(
        self, method: str, payload: Mapping[str, object], *, timeout_ms: int | None = None
    ) -> object:
        """The hub's answer; raises HubUnavailable, HubConnectionLost or HubError."""


class Clock(Protocol):
    """Time and chance; the core takes both as arguments."""

    def now_ms(self) -> int:
        """CLOCK_BOOTTIME in milliseconds: counts suspend, ignores the wall clock's steps."""

    def utc(self) -> str:
        """The wall clock as RFC 3339 UTC with milliseconds; for people, never for deadlines."""

    async def sleep_until_ms(self, deadline_ms: int) -> None:
        """Return once :meth:`now_ms` has reached the deadline, also across a suspend."""

    def unix_seconds(self) -> int:
        """The wall clock, for commit dates."""

    def jitter(self) -> float:
        """Uniform in [0, 1)."""

    def new_id(self) -> str:
        """A fresh random id, valid as a wire id."""


@dataclass(frozen=True, slots=True)
class EngineResource:
    """A container, network or volume as the engine lists it."""

    kind: ResourceKind
    id: str
    name: str
    labels: Mapping[str, str]
    created_at: str


@dataclass(frozen=True, slots=True)
class EngineImage:
    """An image as the engine lists it.

    :param id: ``sha256:…`` of its configuration.
    :param names: every ``name:tag`` under which the engine keeps it; none: nothing but its id.
    """

    id: str
    names: tuple[str, ...]
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """How a container's PID 1 ended, in the engine's words.

    One that did not see the end says 0, 137 or 255 all the same.
    """

    exit_code: int
    oom_killed: bool


PathKind = Literal["directory", "link", "other"]
"""What is found at a path."""


class Attachment(Protocol):
    """Both directions of a container's standard streams, attached before start."""

    async def send(self, data: bytes) -> None:
        """Write to the container's stdin; waits while the container does not read."""

    async def receive(self) -> tuple[int, bytes] | None:
        """The next piece: (1 = stdout | 2 = stderr, bytes); None at the end."""


class ResourceHolder(Protocol):
    """What holds the resources of dispatches and can give them up: the engine, or the host."""

    async def remove_container(self, container: str) -> None:
        """Kill if need be and remove, anonymous volumes too; raises EngineNotFound if gone."""

    async def remove_volume(self, name: str) -> None: ...
    async def remove_network(self, network: str) -> None: ...

    async def network_endpoints(self, network: str) -> Sequence[str]:
        """The names of what is connected; :meth:`disconnect_network` takes them."""

    async def disconnect_network(self, network: str, container: str) -> None:
        """Take a container off a network by force, also one that is gone and left its endpoint."""

    async def list_resources(self, labels: Mapping[str, str]) -> Sequence[EngineResource]:
        """Every container (running or not), network and volume that carries all these labels.

        Raises instead of answering with a partial list, or with that of another engine than
        :meth:`facts` named first: nothing is ever deleted, or believed gone, on the strength of
        half an answer.
        """


class ProgramRunner(ResourceHolder, Protocol):
    """Where a program runs that was put there, and how one speaks with it."""

    async def start_container(self, container: str) -> None: ...
    async def inspect_container(self, container: str) -> Mapping[str, Any]: ...
    async def wait_container(self, container: str, *, timeout_ms: int) -> ExitStatus: ...
    def attach(self, container: str) -> AbstractAsyncContextManager[Attachment]: ...


class Engine(ProgramRunner, Protocol):
    """The one door to the Docker Engine (sandbox.md, One engine door)."""

    async def facts(self) -> EngineFacts: ...

    async def info(self) -> Mapping[str, Any]:
        """The engine's ``info`` as it is: settings, which are no evidence that they work."""

    async def inspect_image(self, reference: str) -> Mapping[str, Any]: ...

    async def list_images(self, labels: Mapping[str, str]) -> Sequence[EngineImage]:
        """Every image that carries all these labels; raises like :meth:`list_resources`."""

    async def tag_image(self, image: str, name: str) -> None:
        """Give an image one more ``name:tag``; takes it away from an image that had it."""

    async def remove_image(self, name: str) -> None:
        """Take a ``name:tag`` away, and with its last name the image; never by force.

        :raises EngineConflict: it is the last name, and a container uses the image.
        """

    async def create_container(self, name: str, request: Mapping[str, Any]) -> str: ...

    async def put_archive(
        self, container: str, path: str, archive: AsyncIterable[bytes]
    ) -> None: ...

    async def path_kind(self, container: str, path: str) -> PathKind | None:
        """What the container's filesystem has at this path; None: nothing.  Nothing is run.

        A link at its end is told of, not followed.
        """

    async def create_volume(
        self, name: str, labels: Mapping[str, str], *, size_bytes: int | None = None
    ) -> str:
        """A new volume, with a quota where one is asked for; EngineRefused if unsupported."""

    async def create_network(self, name: str, request: Mapping[str, Any]) -> str:
        """A new network; raises EngineSubnetTaken where its subnet is another's."""

    async def inspect_network(self, network: str) -> Mapping[str, Any]: ...

    async def connect_network(
        self, network: str, container: str, *, address: str, aliases: Sequence[str] = ()
    ) -> None:
        """Connect a container to one more network, under this IPv4 address and these names."""


@dataclass(frozen=True, slots=True)
class HostProgram:
    """What is started on the host, and whose it is.

    :param environment: all of it; a value may be a secret.
    :param labels: as those of a container.
    :param memory_bytes: address space of each of its processes; None: no limit of ours.
    """

    argv: Sequence[str]
    directory: str
    environment: Mapping[str, str] = field(repr=False)
    labels: Mapping[str, str]
    memory_bytes: int | None = None


class HostRuntime(ProgramRunner, Protocol):
    """Dispatches on the host itself, in the engine's words (B-53).

    A *volume* is a directory that only the service account may enter, and a *container* is a
    process with everything that it leaves; networks there are none.
    """

    def environment(self) -> Mapping[str, str]:
        """What a program may see of the bridge's own environment."""

    def path(self, volume: str) -> str:
        """Where the directory of a volume is."""

    async def create_volume(self, name: str, labels: Mapping[str, str]) -> str: ...

    async def unpack(self, volume: str, archive: AsyncIterable[bytes]) -> None:
        """Unpack a tar of ours; raises DiskUnusable, or what the archive raises."""

    async def create_container(self, name: str, program: HostProgram) -> str:
        """Start a program, which waits on its standard input; raises RefusedError if it cannot."""


class Ledger(Protocol):
    """The append-only record of one attempt (storage.md)."""

    async def append_all(self, records: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        """All durable when it returns; raises DiskUnusable when none is."""


@dataclass(frozen=True, slots=True)
class ImportedOutput:
    """What an accepted output bundle held; no commit when nothing had changed."""

    result_commit: str | None
    files: int
    size_bytes: int


class GitStore(Protocol):
    """Commits in and out of the bare stores under the state root (sandbox.md, Output).

    ``repository`` is the name under which the operator registered the clone.
    """

    async def ensure_commit(self, repository: str, commit: str) -> None:
        """Have the commit and its tree in the store; raises RefusedError workspace_invalid."""

    def workspace_archive(
        self, repository: str, commit: str, *, uid: int, gid: int, directory: str
    ) -> AsyncGenerator[bytes]:
        """A tar of the tree and of a shallow ``.git``, every blob exactly as committed.

        To be closed.  Everything is in ``directory``, which has the owner too.
        """

    async def tree_listing(self, repository: str, commit: str) -> bytes:
        """What ``git ls-tree -r -t -z`` says of the commit."""

    async def tree_id(self, repository: str, commit: str) -> str:
        """The id of the commit's root tree."""

    async def read_file(
        self, repository: str, commit: str, path: str, max_bytes: int
    ) -> bytes | None:
        """A file exactly as committed; None when there is none of that name (B-52).

        Raises RefusedError workspace_invalid: no plain file, too large, or no such commit.
        """

    async def read_files(
        self, repository: str, commit: str, max_bytes: Mapping[str, int]
    ) -> Mapping[str, bytes | None]:
        """Several files at once, by path; as :meth:`read_file`."""

    def build_context(
        self, repository: str, commit: str, *, ignore: Ignore | None, max_bytes: int
    ) -> AsyncGenerator[bytes]:
        """A tar of the commit's files, without what is ignored; the same bytes every time.

        To be closed.  The Dockerfile is never left out.  Raises RefusedError workspace_invalid.
        """

    async def import_bundle(
        self,
        repository: str,
        bundle: AsyncIterable[bytes],
        *,
        input_commit: str,
        bundle_ref: str,
        claimed_commit: str,
        target_ref: str,
    ) -> ImportedOutput:
        """Validate a hostile bundle in quarantine and fetch it; raises output_invalid."""

    async def remote_branch(self, remote: Remote, branch: str) -> Seen:
        """Look at a branch of a remote; raises RemoteUnreachable, or remote_refused."""

    async def push(
        self,
        repository: str,
        remote: Remote,
        *,
        branch: str,
        commit: str,
        expected: Seen,
        timeout_ms: int,
    ) -> Pushed:
        """Move a branch to the commit if it is as expected; no push goes on once this has ended.

        Raises RemoteUnreachable when it was ended at its deadline: nobody knows what came of it.
        """


class Outbox(Protocol):
    """Durable messages that the hub has not acknowledged yet (storage.md)."""

    @property
    def pending_reports(self) -> int:
        """How many cleanup reports wait for their acknowledgement."""

    @property
    def is_full(self) -> bool:
        """Whether so much waits for the hub that no new work should be taken on."""

    async def put(self, message: Message) -> None:
        """On disk when it returns; raises DiskUnusable when it is not.

        A message whose id is already there is not stored again.
        """

    def holds_result(self, attempt_id: str, fence: int) -> bool:
        """Whether a result of this dispatch waits for its acknowledgement."""

    async def wait_empty(self) -> None:
        """Return once everything was acknowledged or set aside."""


@dataclass(frozen=True, slots=True)
class DiskUsage:
    """How full the filesystem is that holds what sandboxes write."""

    used_percent: int
    free_bytes: int


class Disk(Protocol):
    """The disk that admission watches (B-25)."""

    async def usage(self) -> DiskUsage: ...


@dataclass(frozen=True, slots=True)
class HostResult:
    """How a host command ended; ``output`` is stdout and stderr as they came."""

    exit_code: int | None
    output: bytes
    truncated: bool
    timed_out: bool


class HostCommands(Protocol):
    """Runs one command as the service account and leaves no process behind."""

    async def run(
        self,
        argv: Sequence[str],
        *,
        directory: str,
        environment: Mapping[str, str],
        timeout_ms: int,
        max_output_bytes: int,
    ) -> HostResult: ...
