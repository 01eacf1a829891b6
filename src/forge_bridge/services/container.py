"""What a service's container is: the agent's hardening, the agent's PID 1, an image of its own.

Its password travels in the ``init`` frame over stdin, so that no argument, label, file or
configuration that the engine keeps has it.  The data is in memory: nothing of it reaches a disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forge_bridge.images.tooling import PID_1_ENVIRONMENT, ToolingTree
from forge_bridge.programs import source
from forge_core.labels import Owner
from forge_core.resources import ResourceVector
from forge_core.sandbox_spec import (
    SANDBOX_GID,
    SANDBOX_UID,
    ContainerSpec,
    coverable,
    image_variables,
    image_volumes,
)
from forge_core.services import DATA, PASSWORD_VARIABLE, data_bytes

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
UNUSED_BYTES = 1 << 20
"""Of a directory that the image declares as a volume and that nothing is kept in."""


@dataclass(frozen=True, slots=True)
class ServiceImage:
    """An image of a service, as the engine has it.

    :param path: where its programs are, as its own environment says.
    :param covered: what it declares as ``VOLUME``, at which it gets memory instead.
    :param uid: with ``gid``, the user that it runs as, in numbers.
    :param version: what its server said of itself; empty until it was tried.
    """

    reference: str
    image_id: str
    path: str
    covered: tuple[str, ...]
    variables: tuple[str, ...]
    uid: int = SANDBOX_UID
    gid: int = SANDBOX_GID
    version: str = ""

    @classmethod
    def from_inspect(cls, reference: str, inspected: Mapping[str, Any]) -> ServiceImage:
        """By what the engine says of it."""
        entries = (inspected.get("Config") or {}).get("Env") or ()
        declared = dict(entry.partition("=")[::2] for entry in entries)
        return cls(
            reference=reference,
            image_id=str(inspected["Id"]),
            path=declared.get("PATH") or DEFAULT_PATH,
            covered=coverable(image_volumes(inspected)),
            variables=image_variables(inspected),
        )


def service_spec(
    image: ServiceImage,
    tooling: ToolingTree,
    *,
    owner: Owner,
    role: str,
    share: ResourceVector,
    **more: Any,
) -> ContainerSpec:
    """The container, in which PID 1 runs from the tooling's tree.

    :param more: its network and what belongs to that.
    """
    return ContainerSpec(
        owner=owner,
        role=role,
        image=image.image_id,
        argv=(*tooling.interpreter, "-I", "-S", "-c", source("supervisor")),
        environment=PID_1_ENVIRONMENT,
        blanked=image.variables,
        memory_bytes=share.memory_bytes,
        cpu_millis=share.cpu_millis,
        pids=share.pids,
        shm_bytes=share.memory_bytes // 4,
        mounts=(tooling.mount,),
        uid=image.uid,
        gid=image.gid,
        tmpfs={**dict.fromkeys(image.covered, UNUSED_BYTES), DATA: data_bytes(share)},
        **more,
    )


def service_argv(tooling: ToolingTree, request: str) -> tuple[str, ...]:
    """What PID 1 runs there.

    :param request: of :mod:`forge_core.services`.
    """
    return (*tooling.interpreter, "-I", "-S", "-c", source("service"), request)


def service_environment(image: ServiceImage, password: str) -> dict[str, str]:
    """Of what PID 1 runs; the image's own says no more than where its programs are."""
    return {
        "PATH": image.path,
        "HOME": "/tmp",  # noqa: S108 - inside the container
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        PASSWORD_VARIABLE: password,
    }
