"""The way out that the settings name (B-39, B-54)."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from forge_bridge.egress.trial import EgressTrial
from forge_bridge.egress.trust import MAX_CA_BYTES, require_certificates
from forge_bridge.services.images import SignatureCheck
from forge_bridge.settings import BridgeSettings
from forge_core.errors import RefusedError
from forge_core.redaction import MIN_SECRET
from forge_core.squid_conf import UpstreamProxy
from forge_edges.durable_file import on_disk
from forge_edges.trusted_file import UntrustedFile, read_trusted_file

MAX_LOGIN_BYTES: Final = 1_024


async def egress_trial(
    settings: BridgeSettings, check_signature: SignatureCheck
) -> EgressTrial | None:
    """What ``public_allowlist`` would run; None: it is not to be offered.

    :param check_signature: of the proxy's image, before it runs for the first time.
    :raises RefusedError: code ``configuration``: the login cannot be read.
    """
    if not settings.sandbox_egress_enforced or settings.sandbox_egress_proxy_image is None:
        return None
    return EgressTrial(
        settings.sandbox_egress_proxy_image,
        settings.sandbox_subnet_pool,
        check_signature,
        await _upstream(settings),
    )


async def custom_ca(settings: BridgeSettings) -> bytes | None:
    """The certificates that agents are to trust.

    :raises RefusedError: code ``configuration``: it cannot be read, or holds none.
    """
    path = settings.sandbox_custom_ca
    if path is None:
        return None
    content = await _read(path, "FORGE_SANDBOX_CUSTOM_CA", MAX_CA_BYTES)
    return require_certificates(content)


async def _upstream(settings: BridgeSettings) -> UpstreamProxy | None:
    if settings.sandbox_upstream_proxy is None:
        return None
    host, _, port = settings.sandbox_upstream_proxy.removeprefix("http://").rpartition(":")
    path, login = settings.sandbox_upstream_proxy_login_file, None
    if path is not None:
        login = await _login(path)
    return UpstreamProxy(host, int(port), login)


async def _login(path: Path) -> str:
    variable = "FORGE_SANDBOX_UPSTREAM_PROXY_LOGIN_FILE"
    content = await _read(path, variable, MAX_LOGIN_BYTES, private=True)
    try:
        login = content.decode("utf-8").strip()
    except UnicodeDecodeError:
        login = ""
    user, colon, password = login.partition(":")
    if not user or not colon or not login.isprintable():
        raise _unusable(variable, f"{path} does not hold user:password")
    if len(password.strip()) < MIN_SECRET:
        raise _unusable(variable, f"the password in {path} is too short to be masked")
    return login


async def _read(path: Path, variable: str, max_bytes: int, *, private: bool = False) -> bytes:
    try:
        return await on_disk(read_trusted_file, path, max_bytes=max_bytes, private=private)
    except UntrustedFile as error:
        raise _unusable(variable, str(error)) from None


def _unusable(variable: str, why: str) -> RefusedError:
    return RefusedError(f"cannot use {variable}: {why}", code="configuration", field=variable)
