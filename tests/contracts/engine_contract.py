"""What every engine behind the port must do, real or simulated (ports.py, Engine).

A test module of one engine subclasses :class:`EngineContract` and gives it a ``subject``
fixture; what is asked here is what the flows rely on, surprises of real engines included.
"""

from __future__ import annotations

import io
import os
import re
import tarfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address, IPv4Network
from typing import Any

import anyio
import pytest

from forge_core.errors import (
    EngineConflict,
    EngineNotFound,
    EngineRefused,
    EngineSubnetTaken,
    EngineTimedOut,
    ForgeError,
)
from forge_core.labels import Owner, attempt_filter, is_ours, runner_filter
from forge_core.ports import Attachment, Engine
from forge_core.read_back import read_back
from forge_core.sandbox_spec import (
    PRELOAD_FILE,
    WORKSPACE_VOLUME,
    ContainerSpec,
    Hardening,
    VolumeMount,
    container_request,
)
from forge_core.wire.codes import ResourceKind

WIRE_TIME = re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}\.\d{3}Z")
LONG_MS = 20_000
SHORT_MS = 300


@dataclass(frozen=True)
class Subject:
    """An engine under contract.

    :param owner: whose everything is; removed after the test.
    :param image: an image in the engine's store whose ``/bin/sh`` understands ``exit``, ``echo``,
        ``read``, ``cat`` and ``sleep``.
    :param make_image: puts an image with these labels into the engine's store; its id.
    """

    engine: Engine
    owner: Owner
    image: str
    make_image: Callable[[Mapping[str, str]], str]
    names: list[str] = field(default_factory=list)

    @property
    def subnet(self) -> IPv4Network:
        """Of this session alone, as long as few run at the same time."""
        number = os.getpid() % (1 << 12)
        return IPv4Network((int(IPv4Address("10.214.0.0")) + number * 16, 28))

    def name_of_image(self, tag: str) -> str:
        """A ``name:tag`` that is taken away after the test."""
        self.names.append(f"forge-test-{self.owner.runner_id}:{tag}")
        return self.names[-1]

    def spec(self, script: str, role: str = "agent") -> ContainerSpec:
        """A hardened container that runs a script."""
        return ContainerSpec(
            owner=self.owner,
            role=role,
            image=self.image,
            argv=("/bin/sh", "-c", script),
            memory_bytes=64 * 2**20,
            cpu_millis=1000,
            pids=64,
            resolves_localhost=False,
        )

    async def create(self, spec: ContainerSpec) -> str:
        """Create it with the default hardening."""
        return await self.engine.create_container(spec.name, container_request(spec, Hardening()))

    async def remove_everything(self) -> None:
        """Whatever the test has made."""
        order = (ResourceKind.CONTAINER, ResourceKind.NETWORK, ResourceKind.VOLUME)
        remove = (
            self.engine.remove_container,
            self.engine.remove_network,
            self.engine.remove_volume,
        )
        found = await self.engine.list_resources(runner_filter(self.owner.runner_id))
        for kind, removal in zip(order, remove, strict=True):
            for item in found:
                if item.kind is kind:
                    await removal(item.id)
        for name in self.names:
            with suppress(EngineNotFound):
                await self.engine.remove_image(name)


def network_request(role: str, owner: Owner, subnet: IPv4Network) -> dict[str, Any]:
    """An internal network with this subnet."""
    return {
        "Driver": "bridge",
        "Internal": True,
        "IPAM": {"Driver": "default", "Config": [{"Subnet": str(subnet)}]},
        "Labels": owner.labels(role),
    }


async def output_of(attachment: Attachment) -> dict[int, bytes]:
    """Everything until the end, by stream."""
    collected = {1: b"", 2: b""}
    while (piece := await attachment.receive()) is not None:
        collected[piece[0]] += piece[1]
    return collected


async def archive_with(**files: bytes) -> AsyncIterator[bytes]:
    """A tar archive with one directory ``tree`` of the sandbox user, in small pieces."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        folder = tarfile.TarInfo("tree")
        folder.type, folder.uid, folder.gid, folder.mode = tarfile.DIRTYPE, 1000, 1000, 0o755
        archive.addfile(folder)
        for name, content in files.items():
            entry = tarfile.TarInfo(f"tree/{name}")
            entry.size, entry.uid, entry.gid = len(content), 1000, 1000
            archive.addfile(entry, io.BytesIO(content))
    data = buffer.getvalue()
    for start in range(0, len(data), 1000):
        yield data[start : start + 1000]


class EngineContract:
    """The tests; ``subject`` comes from the subclass's module."""

    async def test_it_says_who_it_is_and_keeps_saying_so(self, subject: Subject) -> None:
        facts = await subject.engine.facts()
        assert facts.id
        assert (await subject.engine.facts()).id == facts.id
        assert (await subject.engine.info())["ID"] == facts.id

    @pytest.mark.requirement("B-35", "A-03")
    @pytest.mark.parametrize("resolves_localhost", [True, False])
    async def test_a_created_container_reads_back_as_asked(
        self, subject: Subject, resolves_localhost: bool
    ) -> None:
        volume = await subject.engine.create_volume(
            subject.owner.name("workspace"), subject.owner.labels("workspace")
        )
        spec = replace(
            subject.spec("exit 0"),
            resolves_localhost=resolves_localhost,
            environment={"A": "b c"},
            mounts=(VolumeMount(volume, WORKSPACE_VOLUME, read_only=True),),
        )
        container = await subject.create(spec)
        inspected = await subject.engine.inspect_container(container)
        assert read_back(container_request(spec, Hardening()), inspected) == ()
        assert inspected["Id"] == container
        assert inspected["State"]["Status"] == "created"

    @pytest.mark.requirement("A-03")
    async def test_a_missing_image_is_not_pulled(self, subject: Subject) -> None:
        missing = replace(subject.spec("exit 0"), image="sha256:" + "0" * 64)
        with pytest.raises(EngineNotFound):
            await subject.create(missing)
        with pytest.raises(EngineNotFound):
            await subject.engine.inspect_image(missing.image)
        assert await subject.engine.list_resources(attempt_filter(subject.owner)) == []

    async def test_a_name_is_given_once(self, subject: Subject) -> None:
        spec = subject.spec("exit 0")
        container = await subject.create(spec)
        with pytest.raises(EngineConflict):
            await subject.create(spec)
        assert (await subject.engine.inspect_container(spec.name))["Id"] == container

    async def test_the_exit_code_is_told_and_told_again(self, subject: Subject) -> None:
        container = await subject.create(subject.spec("exit 7"))
        await subject.engine.start_container(container)
        for _ in range(2):
            status = await subject.engine.wait_container(container, timeout_ms=LONG_MS)
            assert (status.exit_code, status.oom_killed) == (7, False)

    async def test_starting_twice_runs_once(self, subject: Subject) -> None:
        container = await subject.create(subject.spec("read x; exit 3"))
        async with subject.engine.attach(container) as attachment:
            await subject.engine.start_container(container)
            await subject.engine.start_container(container)
            await attachment.send(b"go\n")
            status = await subject.engine.wait_container(container, timeout_ms=LONG_MS)
        assert status.exit_code == 3

    async def test_waiting_for_what_never_started_is_a_conflict(self, subject: Subject) -> None:
        container = await subject.create(subject.spec("exit 0"))
        with pytest.raises(EngineConflict, match="never started"):
            await subject.engine.wait_container(container, timeout_ms=LONG_MS)

    async def test_a_wait_ends_in_time_and_the_container_goes_on(self, subject: Subject) -> None:
        container = await subject.create(subject.spec("sleep 600"))
        await subject.engine.start_container(container)
        with pytest.raises(EngineTimedOut):
            await subject.engine.wait_container(container, timeout_ms=SHORT_MS)
        inspected = await subject.engine.inspect_container(container)
        assert inspected["State"]["Running"] is True

    async def test_a_cancelled_wait_ends_at_once(self, subject: Subject) -> None:
        container = await subject.create(subject.spec("sleep 600"))
        await subject.engine.start_container(container)
        with anyio.fail_after(LONG_MS / 1000):
            async with anyio.create_task_group() as tasks:

                async def wait() -> None:
                    await subject.engine.wait_container(container, timeout_ms=3_600_000)

                tasks.start_soon(wait)
                await subject.engine.inspect_container(container)
                tasks.cancel_scope.cancel()

    async def test_a_command_that_is_not_there_is_refused_and_leaves_the_container(
        self, subject: Subject
    ) -> None:
        spec = replace(subject.spec(""), argv=("/no/such/program",))
        container = await subject.create(spec)
        with pytest.raises(EngineRefused, match="cannot start container"):
            await subject.engine.start_container(container)
        inspected = await subject.engine.inspect_container(container)
        assert inspected["State"]["Status"] == "created"

    async def test_removal_takes_a_running_container(self, subject: Subject) -> None:
        container = await subject.create(subject.spec("sleep 600"))
        await subject.engine.start_container(container)
        await subject.engine.remove_container(container)
        with pytest.raises(EngineNotFound):
            await subject.engine.remove_container(container)
        assert await subject.engine.list_resources(attempt_filter(subject.owner)) == []

    async def test_removing_twice_at_once_ends_with_it_gone(self, subject: Subject) -> None:
        container = await subject.create(subject.spec("sleep 600"))
        await subject.engine.start_container(container)

        async def remove() -> None:
            try:
                await subject.engine.remove_container(container)
            except EngineNotFound:
                return
            with pytest.raises(EngineNotFound):
                await subject.engine.inspect_container(container)

        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(remove)

    async def test_both_directions_and_both_streams(self, subject: Subject) -> None:
        script = "read x; echo out $x; echo err $x >&2; exit 0"
        container = await subject.create(subject.spec(script))
        async with subject.engine.attach(container) as attachment:
            await subject.engine.start_container(container)
            await attachment.send(b"hello\n")
            assert await output_of(attachment) == {1: b"out hello\n", 2: b"err hello\n"}

    @pytest.mark.requirement("B-72")
    async def test_detaching_does_not_end_the_container(self, subject: Subject) -> None:
        container = await subject.create(subject.spec("read x; read y; exit 5"))
        async with subject.engine.attach(container) as attachment:
            await subject.engine.start_container(container)
            await attachment.send(b"one\n")
        async with subject.engine.attach(container) as attachment:
            await attachment.send(b"two\n")
            status = await subject.engine.wait_container(container, timeout_ms=LONG_MS)
        assert status.exit_code == 5

    async def test_an_archive_lands_in_the_volume_with_its_owner(self, subject: Subject) -> None:
        volume = await subject.engine.create_volume(
            subject.owner.name("workspace"), subject.owner.labels("workspace")
        )
        spec = replace(
            subject.spec(
                f"cd {WORKSPACE_VOLUME}/tree && cat file && echo more >> file && cat file"
            ),
            mounts=(VolumeMount(volume, WORKSPACE_VOLUME, read_only=False),),
        )
        container = await subject.create(spec)
        await subject.engine.put_archive(
            container, WORKSPACE_VOLUME, archive_with(file=b"content\n")
        )
        async with subject.engine.attach(container) as attachment:
            await subject.engine.start_container(container)
            assert (await output_of(attachment))[1] == b"content\ncontent\nmore\n"

    async def test_an_archive_for_nowhere_is_refused(self, subject: Subject) -> None:
        container = await subject.create(subject.spec("exit 0"))
        with pytest.raises(EngineNotFound):
            await subject.engine.put_archive(container, "/nowhere", archive_with(file=b"x"))
        with pytest.raises(EngineRefused):
            await subject.engine.put_archive(container, "/", archive_with(file=b"x"))

    async def test_paths_are_seen_without_running_anything(self, subject: Subject) -> None:
        container = await subject.create(subject.spec("exit 0"))
        assert await subject.engine.path_kind(container, "/bin/sh")
        assert await subject.engine.path_kind(container, "/") == "directory"
        assert await subject.engine.path_kind(container, PRELOAD_FILE) is None

    async def test_a_volume_is_new_or_refused(self, subject: Subject) -> None:
        name, labels = subject.owner.name("workspace"), subject.owner.labels("workspace")
        assert await subject.engine.create_volume(name, labels) == name
        with pytest.raises(EngineConflict):
            await subject.engine.create_volume(name, labels)

    async def test_a_volume_in_use_stays(self, subject: Subject) -> None:
        volume = await subject.engine.create_volume(
            subject.owner.name("workspace"), subject.owner.labels("workspace")
        )
        mount = VolumeMount(volume, WORKSPACE_VOLUME, read_only=False)
        container = await subject.create(replace(subject.spec("exit 0"), mounts=(mount,)))
        with pytest.raises(EngineConflict):
            await subject.engine.remove_volume(volume)
        await subject.engine.remove_container(container)
        await subject.engine.remove_volume(volume)

    async def test_a_network_with_an_endpoint_stays(self, subject: Subject) -> None:
        engine, role = subject.engine, "agent-network"
        request = {"Driver": "bridge", "Internal": True, "Labels": subject.owner.labels(role)}
        network = await engine.create_network(subject.owner.name(role), request)
        with pytest.raises(EngineConflict):
            await engine.create_network(subject.owner.name(role), request)
        spec = replace(subject.spec("sleep 600"), network=subject.owner.name(role))
        container = await subject.create(spec)
        await engine.start_container(container)
        assert list(await engine.network_endpoints(network)) == [spec.name]
        with pytest.raises(EngineConflict):
            await engine.remove_network(network)
        await engine.disconnect_network(network, spec.name)
        assert list(await engine.network_endpoints(network)) == []
        await engine.remove_network(network)

    @pytest.mark.requirement("B-19")
    async def test_a_subnet_belongs_to_one_network(self, subject: Subject) -> None:
        engine, owner = subject.engine, subject.owner
        request = network_request("agent-network", owner, subject.subnet)
        await engine.create_network(owner.name("agent-network"), request)
        part = next(subject.subnet.subnets(new_prefix=29))
        with pytest.raises(EngineSubnetTaken):
            await engine.create_network(
                owner.name("egress-network"), network_request("egress-network", owner, part)
            )

    @pytest.mark.requirement("B-54")
    async def test_a_container_is_in_the_networks_that_it_was_connected_to(
        self, subject: Subject
    ) -> None:
        engine, owner = subject.engine, subject.owner
        first, second = subject.subnet.subnets(new_prefix=29)
        inner, outer = owner.name("agent-network"), owner.name("egress-network")
        for name, role, subnet in (
            (inner, "agent-network", first),
            (outer, "egress-network", second),
        ):
            request = network_request(role, owner, subnet)
            network = await engine.create_network(name, request)
            inspected = await engine.inspect_network(network)
            assert inspected["Internal"] is True
            assert inspected["IPAM"]["Config"][0]["Subnet"] == str(subnet)
        spec = replace(subject.spec("exit 0"), network=outer, address=second[3])
        container = await subject.create(spec)
        await engine.connect_network(inner, container, address=str(first[3]), aliases=("proxy",))
        has = (await engine.inspect_container(container))["NetworkSettings"]["Networks"]
        addresses = {name: one["IPAMConfig"]["IPv4Address"] for name, one in has.items()}
        assert addresses == {inner: str(first[3]), outer: str(second[3])}
        with pytest.raises(EngineNotFound):
            await engine.inspect_network(owner.name("no-network"))

    @pytest.mark.requirement("B-84")
    async def test_the_list_is_exact(self, subject: Subject) -> None:
        engine, owner = subject.engine, subject.owner
        other = replace(owner, attempt_id="another-attempt")
        stopped = await subject.create(subject.spec("exit 0"))
        running = await subject.create(subject.spec("sleep 600", role="helper"))
        await engine.start_container(running)
        volume = await engine.create_volume(owner.name("workspace"), owner.labels("workspace"))
        network = await engine.create_network(
            owner.name("agent-network"),
            {"Driver": "bridge", "Labels": owner.labels("agent-network")},
        )
        strange = await engine.create_volume(other.name("workspace"), other.labels("workspace"))
        listed = await engine.list_resources(attempt_filter(owner))
        assert {(item.kind, item.id) for item in listed} == {
            (ResourceKind.CONTAINER, stopped),
            (ResourceKind.CONTAINER, running),
            (ResourceKind.NETWORK, network),
            (ResourceKind.VOLUME, volume),
        }
        assert all(is_ours(item.name, item.labels) for item in listed)
        assert all(WIRE_TIME.fullmatch(item.created_at) for item in listed)
        everything = await engine.list_resources(runner_filter(owner.runner_id))
        assert {item.id for item in everything} - {item.id for item in listed} == {strange}

    @pytest.mark.requirement("B-89")
    async def test_images_are_listed_by_all_their_labels(self, subject: Subject) -> None:
        engine, mine = subject.engine, {"forge-test": subject.owner.runner_id, "n": "1"}
        image = subject.make_image(mine)
        first, second = subject.name_of_image("first"), subject.name_of_image("second")
        await engine.tag_image(image, first)
        await engine.tag_image(image, second)
        (listed,) = await engine.list_images(mine)
        assert (listed.id, sorted(listed.names)) == (image, sorted([first, second]))
        assert mine.items() <= listed.labels.items()
        assert (await engine.inspect_image(first))["Id"] == image
        assert await engine.list_images({**mine, "n": "2"}) == []

    @pytest.mark.requirement("B-89")
    async def test_an_image_goes_with_its_last_name(self, subject: Subject) -> None:
        engine, mine = subject.engine, {"forge-test": subject.owner.runner_id}
        image = subject.make_image(mine)
        first, second = subject.name_of_image("first"), subject.name_of_image("second")
        await engine.tag_image(image, first)
        await engine.tag_image(image, second)
        await engine.remove_image(first)
        assert (await engine.inspect_image(image))["Id"] == image
        with pytest.raises(EngineNotFound):
            await engine.inspect_image(first)
        await engine.remove_image(second)
        with pytest.raises(EngineNotFound):
            await engine.inspect_image(image)
        assert await engine.list_images(mine) == []

    async def test_an_image_in_use_stays(self, subject: Subject) -> None:
        engine = subject.engine
        image, name = subject.make_image({"forge-test": "in-use"}), subject.name_of_image("used")
        await engine.tag_image(image, name)
        container = await subject.create(replace(subject.spec("exit 0"), image=image))
        with pytest.raises(EngineConflict):
            await engine.remove_image(name)
        await engine.remove_container(container)
        await engine.remove_image(name)

    async def test_a_name_moves_to_the_image_that_got_it_last(self, subject: Subject) -> None:
        engine, name = subject.engine, subject.name_of_image("moves")
        one, other = subject.make_image({"n": "1"}), subject.make_image({"n": "2"})
        keep = subject.name_of_image("stays")
        await engine.tag_image(one, keep)
        await engine.tag_image(one, name)
        await engine.tag_image(other, name)
        assert (await engine.inspect_image(name))["Id"] == other
        assert (await engine.inspect_image(keep))["Id"] == one

    async def test_what_is_not_there_is_not_found(self, subject: Subject) -> None:
        engine, name = subject.engine, subject.owner.name("agent")

        async def attach() -> None:
            async with engine.attach(name):
                pytest.fail("attached to nothing")

        attempts = (
            engine.start_container(name),
            engine.inspect_container(name),
            engine.wait_container(name, timeout_ms=LONG_MS),
            engine.remove_container(name),
            engine.put_archive(name, "/", archive_with(file=b"x")),
            engine.path_kind(name, "/"),
            engine.remove_volume(name),
            engine.remove_network(name),
            engine.inspect_image(f"{name}:none"),
            engine.tag_image(f"{name}:none", f"{name}:one"),
            engine.remove_image(f"{name}:none"),
            attach(),
        )
        for attempt in attempts:
            with pytest.raises(EngineNotFound) as error:
                await attempt
            assert str(error.value).startswith("cannot ")
            assert isinstance(error.value, ForgeError)
