"""Which service images can be used: each is tried once, as an attempt would use it (B-38, B-51).

::

    inspect ─▶ signature ─▶ look its account up ─▶ run the server ─▶ a client is answered,
                                                                      a stranger is not

What was shown of an image holds for as long as this process lives: a digest stands for the same
bytes for ever.  Only that the engine still has it is looked at again.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Protocol

import anyio

from forge_bridge.containers import create_as_asked
from forge_bridge.images.tooling import Tooling, ToolingTree
from forge_bridge.programs import source
from forge_bridge.services.container import (
    ServiceImage,
    service_argv,
    service_environment,
    service_spec,
)
from forge_bridge.services.process import ServiceProcess
from forge_core.errors import EngineNotFound, ForgeError, RefusedError, RetryableError
from forge_core.labels import Owner
from forge_core.ports import Engine
from forge_core.redaction import Masker
from forge_core.resources import ResourceVector
from forge_core.sandbox_spec import PRELOAD_FILE, Hardening, container_request, image_faults
from forge_core.services import (
    CATALOGUE,
    ServiceKind,
    look_request,
    read_account,
    read_ready,
    serve_request,
)
from forge_core.supervisor_frames import init_frame
from forge_core.wire.codes import ServiceName

PROBE_MS: Final = 60_000
REMOVE_S: Final = 30.0
WHOLE: Final = ResourceVector(pids=256, memory_bytes=1 << 30, cpu_millis=2_000)
"""Of this, a service that is tried gets what it would get of an attempt's."""

_NOBODY: Final = 65_534


class SignatureCheck(Protocol):
    """Says whether an image carries a good signature; see ``ImageGates.before_build``."""

    async def __call__(self, references: tuple[str, ...], /) -> None: ...


@dataclass(frozen=True, slots=True)
class Trial:
    """Where services are tried, and whose it is, should a crash leave something behind."""

    engine: Engine
    owner: Owner
    tooling_image: str
    hardening: Hardening


class ServiceImages:
    """The configured images.

    :param check_signature: raises RefusedError ``signature_invalid``.
    :ivar references: as they are configured.
    :ivar usable: what can be used as things are; changes with every verdict of :meth:`prove`.
    """

    def __init__(
        self, references: Mapping[ServiceName, str], check_signature: SignatureCheck
    ) -> None:
        self.references = dict(references)
        self.usable: dict[ServiceName, ServiceImage] = {}
        self._check_signature = check_signature
        self._tried: dict[str, tuple[ServiceImage, str]] = {}

    async def prove(self, trial: Trial) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
        """Try what has not been tried; raises nothing that is expected.

        :returns: evidence of what can be used, why the rest cannot, and why of some nobody knows
            yet, by check id.
        """
        shown: dict[str, str] = {}
        failed: dict[str, str] = {}
        unseen: dict[str, str] = {}
        tooling = Tooling(
            trial.engine, trial.owner, trial.tooling_image, source("supervisor"), trial.hardening
        )
        try:
            for name, reference in self.references.items():
                kind = CATALOGUE[name]
                try:
                    image, evidence = await self._prove(trial, kind, reference, tooling)
                except RetryableError as error:
                    unseen[kind.check_id] = str(error)
                except ForgeError as error:
                    failed[kind.check_id] = str(error)
                    self.usable.pop(name, None)
                else:
                    shown[kind.check_id] = evidence
                    self.usable[name] = image
        finally:
            with anyio.move_on_after(REMOVE_S, shield=True), suppress(ForgeError):
                await tooling.remove()
        return shown, failed, unseen

    async def _prove(
        self, trial: Trial, kind: ServiceKind, reference: str, tooling: Tooling
    ) -> tuple[ServiceImage, str]:
        image = await fit_image(trial.engine, reference)
        if reference not in self._tried:
            await self._check_signature((reference,))
            self._tried[reference] = await _try(trial, kind, image, await tooling.provide())
        return self._tried[reference]


async def fit_image(engine: Engine, reference: str) -> ServiceImage:
    """The image as the engine has it, when nothing that it declares speaks against it.

    :raises RefusedError: code ``image_policy_denied``.
    """
    try:
        inspected = await engine.inspect_image(reference)
    except EngineNotFound as error:
        raise _denied(
            reference,
            "the engine does not have it, and nothing is ever pulled for an attempt; pull it on "
            "the runner host",
        ) from error
    image = ServiceImage.from_inspect(reference, inspected)
    if faults := image_faults(inspected, covered=image.covered):
        raise _denied(reference, "; ".join(faults))
    return image


async def _try(
    trial: Trial, kind: ServiceKind, image: ServiceImage, tooling: ToolingTree
) -> tuple[ServiceImage, str]:
    if kind.account is not None:
        nobody = replace(image, uid=_NOBODY, gid=_NOBODY)
        line = await _ask(trial, kind, nobody, tooling, look_request(kind.account))
        if (user := read_account(line)) is not None:
            image = replace(image, uid=user[0], gid=user[1])
    began_s = anyio.current_time()
    line = await _ask(trial, kind, image, tooling, serve_request(kind, kind.share(WHOLE)))
    took_ms = round((anyio.current_time() - began_s) * 1000)
    image = replace(image, version=read_ready(line).version)
    strangers = ", and nobody without the password" if kind.has_password else ""
    return image, (
        f"{kind.name.value} {image.version} of {image.reference} answered a client within "
        f"{took_ms} ms{strangers}; it runs as user {image.uid}"
    )


async def _ask(
    trial: Trial, kind: ServiceKind, image: ServiceImage, tooling: ToolingTree, request: str
) -> str:
    """Run the image once; the line that it prints."""
    spec = service_spec(image, tooling, owner=trial.owner, role=kind.role, share=kind.share(WHOLE))
    asked, password = container_request(spec, trial.hardening), secrets.token_hex(16)
    orders = partial(
        init_frame,
        attempt_id=trial.owner.attempt_id,
        fence=1,  # PID 1 knows no dispatch but a hub's
        key=secrets.token_bytes(32),
        sequence=0,
        lease_ms=PROBE_MS,
        hard_wall_ms=PROBE_MS,
        idle_ms=PROBE_MS,
        grace_ms=0,
        argv=service_argv(tooling, request),
        environment=service_environment(image, password),
        directory="/",
        max_output_bytes=1 << 20,
    )
    try:
        with anyio.move_on_after(PROBE_MS / 1000):
            return await _run(trial.engine, spec.name, asked, image, orders, Masker((password,)))
        raise _denied(image.reference, f"it did not answer within {PROBE_MS} ms")
    finally:
        with anyio.move_on_after(REMOVE_S, shield=True), suppress(EngineNotFound):
            await trial.engine.remove_container(spec.name)


async def _run(
    engine: Engine,
    name: str,
    asked: Mapping[str, Any],
    image: ServiceImage,
    orders: Callable[[], bytes],
    masker: Masker,
) -> str:
    container = await create_as_asked(engine, name, asked)
    if await engine.path_kind(container, PRELOAD_FILE):
        raise _denied(image.reference, f"it has {PRELOAD_FILE}")
    async with engine.attach(container) as stream:
        process = ServiceProcess(stream, orders, masker)
        await engine.start_container(container)
        line = await process.first_line()
        if line is None:
            how = process.ended.in_words if process.ended else "said nothing"
            raise _denied(image.reference, f"it {how}; its last words: {process.last_words}")
        return line


def _denied(reference: str, why: str) -> RefusedError:
    return RefusedError(f"cannot use image {reference}: {why}", code="image_policy_denied")
