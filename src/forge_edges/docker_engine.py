"""The one door to the Docker Engine: :class:`forge_core.ports.Engine` (sandbox.md).

Short requests go through the ``docker`` SDK in worker threads; streams (attach, wait, archives)
through :mod:`forge_edges.docker_stream`.  Every failure leaves here as an engine error of
:mod:`forge_core.errors`.  Works with Engine 20.10 (API 1.41) and later, rootful and rootless.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from typing import Any, Final, NamedTuple, Self, TypeVar
from urllib.parse import quote, urlencode

import anyio
import requests.adapters
import structlog
from docker import APIClient
from docker.tls import TLSConfig

from forge_core.errors import (
    EngineConflict,
    EngineNotFound,
    EngineRefused,
    EngineTimedOut,
    EngineUnreachable,
)
from forge_core.ports import EngineImage, EngineResource, ExitStatus, PathKind
from forge_core.wire.codes import ResourceKind
from forge_core.wire.shapes import EngineFacts
from forge_edges.docker_attach import DockerAttachment, attach
from forge_edges.docker_calls import EngineCalls
from forge_edges.docker_context import DockerEndpoint
from forge_edges.docker_errors import short
from forge_edges.docker_facts import (
    OLDEST_API,
    agree_on_api,
    engine_facts,
    engine_image,
    engine_resource,
    path_kind,
)
from forge_edges.docker_stream import CHUNK_BYTES, Exchange, exchange
from forge_edges.docker_transport import UnixSocketAdapter

DEFAULT_TIMEOUT_MS: Final = 30_000

_NETWORK_ARGUMENTS: Final = {
    "Driver": "driver",
    "EnableIPv6": "enable_ipv6",
    "IPAM": "ipam",
    "Internal": "internal",
    "Labels": "labels",
    "Options": "options",
}

T = TypeVar("T")
log = structlog.get_logger(__name__)


class _Client(NamedTuple):
    api: APIClient
    version: str


class DockerEngine:
    """Keeps :class:`forge_core.ports.Engine`; made by :meth:`connect`."""

    def __init__(self, endpoint: DockerEndpoint, *, timeout_ms: int, max_calls: int) -> None:
        self.endpoint = endpoint
        self._timeout_ms = timeout_ms
        self._max_calls = max_calls
        self._calls = EngineCalls(timeout_ms=timeout_ms, max_calls=max_calls)
        self._negotiation = anyio.Lock()
        self._client: _Client | None = None
        self._id: str | None = None

    @classmethod
    @asynccontextmanager
    async def connect(
        cls,
        endpoint: DockerEndpoint,
        *,
        timeout_ms: int = DEFAULT_TIMEOUT_MS,
        max_calls: int = 32,
    ) -> AsyncIterator[Self]:
        """A door that is open for the block.

        The engine need not be up yet: the first call negotiates the API version.

        :param timeout_ms: how long any one request may take; waiting for a container has its
            own limit, and an archive's counts per chunk.
        :param max_calls: how many SDK calls, hence threads, run at once.
        """
        engine = cls(endpoint, timeout_ms=timeout_ms, max_calls=max_calls)
        try:
            yield engine
        finally:
            if engine._client is not None:
                engine._client.api.close()

    async def facts(self) -> EngineFacts:
        """Who the engine is; negotiates anew, since it may have been replaced meanwhile."""
        _, version = await self._negotiate()
        facts = engine_facts(version, await self.info())
        self._id = self._id or facts.id
        return facts

    async def info(self) -> Mapping[str, Any]:
        """The engine's ``info`` as it is (Engine API, SystemInfo)."""
        return await self._call("read the engine's info", lambda api: api.info())

    async def inspect_image(self, reference: str) -> Mapping[str, Any]:
        """:raises EngineNotFound: it is not in the engine's store; nothing is pulled."""
        return await self._call(
            f"inspect image {reference}",
            lambda api: api.inspect_image(reference),  # type: ignore[no-untyped-call]
        )

    async def list_images(self, labels: Mapping[str, str]) -> Sequence[EngineImage]:
        """All images with all of these labels; raises like :meth:`list_resources`."""
        filters = {"label": _label_filter(labels)}
        images = await self._call("list images", lambda api: api.images(filters=filters))
        await self._require_same_engine("list the images")
        found = map(engine_image, images)
        return [image for image in found if labels.items() <= image.labels.items()]

    async def tag_image(self, image: str, name: str) -> None:
        """:raises EngineNotFound: no such image."""
        repository, _, tag = name.rpartition(":")
        what = f"tag image {image} as {name}"
        if not await self._call(what, lambda api: api.tag(image, repository, tag)):
            raise EngineRefused(f"cannot {what}: the engine answered without doing it")

    async def remove_image(self, name: str) -> None:
        """:raises EngineNotFound: no such image.  :raises EngineConflict: a container uses it."""
        await self._call(
            f"remove image {name}",
            lambda api: api.remove_image(name),
        )

    async def create_container(self, name: str, request: Mapping[str, Any]) -> str:
        """Create under exactly this name; the id.  Never pulls.

        The engine's word is not evidence: compare :meth:`inspect_container` with the request
        (:func:`forge_core.read_back.read_back`).

        :raises EngineNotFound: no such image.
        :raises EngineConflict: the name is taken.
        :raises EngineTimedOut: it may still come into being, under this name.
        """

        def create(api: APIClient) -> dict[str, Any]:
            post = api.create_container_from_config
            return dict(post(dict(request), name))  # type: ignore[no-untyped-call]

        created = await self._call(f"create container {name}", create)
        for warning in created.get("Warnings") or ():
            log.warning("engine_warning", container=name, warning=str(warning)[:500])
        return str(created["Id"])

    async def start_container(self, container: str) -> None:
        """No error when it is running already.

        :raises EngineRefused: its command cannot be run; the container stays ``created``.
        """
        await self._call(f"start container {short(container)}", lambda api: api.start(container))

    async def inspect_container(self, container: str) -> Mapping[str, Any]:
        """:raises EngineNotFound: no such container."""
        return await self._call(
            f"inspect container {short(container)}", lambda api: api.inspect_container(container)
        )

    async def wait_container(self, container: str, *, timeout_ms: int) -> ExitStatus:
        """Wait until a started container is no longer running; holds no thread.

        :raises EngineTimedOut: after ``timeout_ms``; the container goes on.
        :raises EngineUnreachable: the engine went away; the container may go on.
        :raises EngineConflict: it was never started.
        """
        what = f"wait for container {short(container)}"
        answer = await self._wait(what, container, "not-running", timeout_ms)
        code = answer.get("StatusCode")
        if not isinstance(code, int):
            raise EngineUnreachable(f"cannot {what}: the engine ended without its exit code")
        try:
            state = (await self.inspect_container(container)).get("State") or {}
        except EngineNotFound:
            return ExitStatus(code, oom_killed=False)
        if state.get("Status") == "created":
            raise EngineConflict(f"cannot {what}: it was never started")
        return ExitStatus(code, bool(state.get("OOMKilled")))

    async def remove_container(self, container: str) -> None:
        """Kill if need be and remove, anonymous volumes too; gone when this returns.

        :raises EngineNotFound: no such container.
        """
        what = f"remove container {short(container)}"
        try:
            await self._call(what, lambda api: api.remove_container(container, v=True, force=True))
        except EngineConflict as conflict:
            if "already in progress" not in str(conflict):
                raise
            try:
                await self._wait(what, container, "removed", self._timeout_ms)
            except EngineNotFound:
                return

    @asynccontextmanager
    async def _attach(self, container: str) -> AsyncIterator[DockerAttachment]:
        version = (await self._agreed()).version
        async with attach(
            self.endpoint, version, container, timeout_ms=self._timeout_ms
        ) as attachment:
            yield attachment

    def attach(self, container: str) -> AbstractAsyncContextManager[DockerAttachment]:
        """Attach to the standard streams, best before start; holds no thread."""
        return self._attach(container)

    async def put_archive(self, container: str, path: str, archive: AsyncIterable[bytes]) -> None:
        """Unpack a tar stream below ``path``; memory stays flat.

        Into a container with a read-only root, ``path`` must lie on a volume.  The engine holds
        the container meanwhile: it neither starts it nor says anything of it, so it is not asked
        before there is something to unpack.

        :raises EngineOutOfDisk: the engine's disk is full; part of it may be there.
        """
        what = f"put an archive into {path} of container {short(container)}"
        target = await self._target(container, "archive", path=path)
        headers = {"Content-Type": "application/x-tar", "Transfer-Encoding": "chunked"}
        pieces = aiter(archive)
        first = await anext(pieces, b"")
        async with exchange(self.endpoint, what, timeout_ms=self._timeout_ms) as raw:
            await raw.send_head("PUT", target, headers)
            try:
                await _send_chunks(raw, first, pieces)
            except (EngineUnreachable, EngineTimedOut):
                # An engine that refuses stops reading before the end, and says why.
                await raw.raise_for_error(await raw.read_head())
                raise
            await raw.raise_for_error(await raw.read_head())

    async def path_kind(self, container: str, path: str) -> PathKind | None:
        """What the container's root filesystem has at this path; None: nothing.  Nothing is run.

        :raises EngineNotFound: no such container.
        """
        what = f"look for {path} in container {short(container)}"
        target = await self._target(container, "archive", path=path)
        async with exchange(self.endpoint, what, timeout_ms=self._timeout_ms) as raw:
            await raw.send_head("GET", target, {"Connection": "close"})
            head = await raw.read_head()
            try:
                await raw.raise_for_error(head)
            except EngineNotFound as error:
                if "could not find the file" in str(error).lower():
                    return None
                raise
            return path_kind(head.headers.get("x-docker-container-path-stat", ""), what)

    async def create_volume(
        self, name: str, labels: Mapping[str, str], *, size_bytes: int | None = None
    ) -> str:
        """A new local volume; its name.

        The engine hands out an existing volume of that name, data and all, as if it were new:
        that is refused here.

        :param size_bytes: a quota, where the engine's storage can keep one.
        :raises EngineConflict: there is one already.
        :raises EngineRefused: no quota support.
        """
        what = f"create volume {name}"
        options = None if size_bytes is None else {"size": str(size_bytes)}
        try:
            await self._call(what, lambda api: api.inspect_volume(name))
        except EngineNotFound:
            created = await self._call(
                what, lambda api: api.create_volume(name, "local", options, dict(labels))
            )
            return str(created["Name"])
        raise EngineConflict(f"cannot {what}: there is one already; its data may be another's")

    async def remove_volume(self, name: str) -> None:
        """:raises EngineConflict: a container uses it.  :raises EngineNotFound: it is gone."""
        await self._call(f"remove volume {name}", lambda api: api.remove_volume(name))

    async def create_network(self, name: str, request: Mapping[str, Any]) -> str:
        """Create under exactly this name; the id.

        :param request: the body of ``POST /networks/create``: ``Driver``, ``Internal``,
            ``Options``, ``IPAM``, ``Labels``, ``EnableIPv6``.
        :raises EngineConflict: the name is taken; :class:`EngineSubnetTaken`: the subnet is.
        :raises EngineRefused: the engine has no subnet left.
        """
        arguments = {_NETWORK_ARGUMENTS[key]: value for key, value in request.items()}
        created = await self._call(
            f"create network {name}",
            lambda api: api.create_network(name, check_duplicate=True, **arguments),
        )
        return str(created["Id"])

    async def inspect_network(self, network: str) -> Mapping[str, Any]:
        """:raises EngineNotFound: no such network."""
        return await self._call(
            f"inspect network {network}", lambda api: api.inspect_network(network)
        )

    async def connect_network(
        self, network: str, container: str, *, address: str, aliases: Sequence[str] = ()
    ) -> None:
        """Connect a container to one more network, running or not.

        :raises EngineNotFound: no such network, or no such container.
        """
        await self._call(
            f"connect container {short(container)} to network {short(network)}",
            lambda api: api.connect_container_to_network(
                container, network, ipv4_address=address, aliases=list(aliases)
            ),
        )

    async def remove_network(self, network: str) -> None:
        """:raises EngineConflict: it still has endpoints.  :raises EngineNotFound: it is gone."""
        await self._call(f"remove network {network}", lambda api: api.remove_network(network))

    async def network_endpoints(self, network: str) -> Sequence[str]:
        """The names under which containers, also ones that are gone, are connected.

        :raises EngineNotFound: no such network.
        """
        found = await self.inspect_network(network)
        endpoints = (found.get("Containers") or {}).values()
        return sorted({str(endpoint["Name"]) for endpoint in endpoints})

    async def disconnect_network(self, network: str, container: str) -> None:
        """Take a container off a network, running or not.

        A name whose container is gone takes its stale endpoint off (Engine API, ``Force``).
        """
        await self._call(
            f"disconnect container {short(container)} from network {network}",
            lambda api: api.disconnect_container_from_network(container, network, force=True),
        )

    async def list_resources(self, labels: Mapping[str, str]) -> Sequence[EngineResource]:
        """All containers, networks and volumes with all of these labels; never a partial list.

        :raises EngineUnreachable: also when it is not the engine any more that :meth:`facts`
            named first: what that one holds is not gone because another does not have it.
        """
        filters = {"label": _label_filter(labels)}
        containers = await self._call(
            "list containers", lambda api: api.containers(all=True, filters=filters)
        )
        networks = await self._call("list networks", lambda api: api.networks(filters=filters))
        volumes = await self._call("list volumes", lambda api: api.volumes(filters=filters))
        if warnings := volumes.get("Warnings"):
            raise EngineUnreachable(f"cannot list volumes: the list is partial: {warnings}")
        await self._require_same_engine("list the resources")
        found = [
            *(engine_resource(ResourceKind.CONTAINER, item) for item in containers),
            *(engine_resource(ResourceKind.NETWORK, item) for item in networks),
            *(engine_resource(ResourceKind.VOLUME, item) for item in volumes.get("Volumes") or ()),
        ]
        return [item for item in found if labels.items() <= item.labels.items()]

    async def _require_same_engine(self, what: str) -> None:
        if self._id is not None and (other := str((await self.info()).get("ID"))[:256]) != self._id:
            raise EngineUnreachable(
                f"cannot {what} of engine {self._id}: engine {other} stands in its"
                " place; bring the first one back, or restart the bridge to serve this one"
            )

    async def _call(self, what: str, call: Callable[[APIClient], T]) -> T:
        api = (await self._agreed()).api
        return await self._calls.run(what, lambda: call(api))

    async def _agreed(self) -> _Client:
        if self._client is None:
            return (await self._negotiate())[0]
        return self._client

    async def _wait(
        self, what: str, container: str, condition: str, timeout_ms: int
    ) -> Mapping[str, Any]:
        target = await self._target(container, "wait", condition=condition)
        with anyio.move_on_after(timeout_ms / 1000):
            async with exchange(self.endpoint, what, timeout_ms=self._timeout_ms) as raw:
                await raw.send_head("POST", target, {"Content-Length": "0"})
                head = await raw.read_head()
                await raw.raise_for_error(head)
                return await raw.read_json(head)
        raise EngineTimedOut(f"cannot {what}: it has not happened in {timeout_ms} ms")

    async def _target(self, container: str, action: str, **query: str) -> str:
        version = (await self._agreed()).version
        path = f"/v{version}/containers/{quote(container, safe='')}/{action}"
        return f"{path}?{urlencode(query)}"

    async def _negotiate(self) -> tuple[_Client, Mapping[str, Any]]:
        """Ask the engine which API versions it speaks."""
        what = f"reach the Docker Engine at {self.endpoint}"
        async with self._negotiation:
            version = await self._calls.run(what, self._ask_version)
            agreed = agree_on_api(version)
            if self._client is None or self._client.version != agreed:
                client = await self._calls.run(what, lambda: self._new_client(agreed))
                if self._client is not None:
                    self._client.api.close()
                self._client = _Client(client, agreed)
            return self._client, version

    def _ask_version(self) -> dict[str, Any]:
        with closing(self._new_client(OLDEST_API)) as client:
            return dict(client.version(api_version=False))

    def _new_client(self, api_version: str) -> APIClient:
        tls = self.endpoint.tls
        timeout_s: Any = self._timeout_ms / 1000  # fractions are fine, whatever the stubs say
        client = APIClient(
            base_url=self.endpoint.host,
            version=api_version,
            timeout=timeout_s,
            tls=False
            if tls is None
            else TLSConfig(
                client_cert=(tls.certificate, tls.key) if tls.certificate and tls.key else None,
                ca_cert=tls.ca,
                verify=tls.verify,
            ),
        )
        client.trust_env = False  # a proxy from the environment must not see this traffic
        pool_size = 2 * self._max_calls  # as many threads as there can be
        if path := self.endpoint.socket_path:
            client.mount("http+docker://", UnixSocketAdapter(path, timeout_s, 1, pool_size))
        else:
            pooled = requests.adapters.HTTPAdapter(pool_maxsize=pool_size)
            client.mount("http://", pooled)
            client.mount("https://", pooled)
        return client


def _label_filter(labels: Mapping[str, str]) -> list[str]:
    assert labels, "an unfiltered list names what belongs to others"
    return [f"{name}={value}" for name, value in labels.items()]


async def _send_chunks(raw: Exchange, first: bytes, more: AsyncIterator[bytes]) -> None:
    await _send_piece(raw, first)
    async for piece in more:
        await _send_piece(raw, piece)
    await raw.send_chunk(b"")


async def _send_piece(raw: Exchange, piece: bytes) -> None:
    for start in range(0, len(piece), CHUNK_BYTES):
        await raw.send_chunk(piece[start : start + CHUNK_BYTES])
