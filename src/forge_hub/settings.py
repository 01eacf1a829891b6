"""The hub's settings: one frozen object, read once from ``FORGE_HUB_*`` (B-95)."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from forge_core.errors import RefusedError


class HubSettings(BaseSettings):
    """Durations in milliseconds; options of ``forge-hub serve`` win over the environment.

    :param host: address to listen on.
    :param port: TCP port; 0: one that is free.
    :param database_url: ``sqlite:///<path>`` or ``postgresql+asyncpg://…``.
    :param api_token: bearer token of the API, next to those of ``token_file``.
    :param runner_token: bearer token of any runner, next to those of ``token_file``.
    :param token_file: digests of tokens, made by ``forge-hub token create``; read again when it
        changes.
    :param heartbeat_interval_ms: what runners are told to keep.
    :param offer_ttl_ms: how long a runner may take to answer an offer.
    :param secrets_directory: where secrets are, as `<project>/<NAME>`; none: no session has any.
    :param credentials_directory: where publish credentials are, as `<project>/<repository>.json`;
        none: no session is published.
    :param publish_ttl_ms: how long a publish credential may be used once it was given out, and how
        long an unseen push is waited for.
    :param decline_backoff_ms: how long a runner that declined is not asked about the same attempt.
    :param kill_grace_ms: how long a runner may take to end an attempt whose lease is over; nothing
        is dispatched again before the last renewal + 2 ttl + this.
    """

    model_config = SettingsConfigDict(
        env_prefix="FORGE_HUB_", frozen=True, extra="ignore", hide_input_in_errors=True
    )

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65_535)] = 8080
    database_url: SecretStr = SecretStr("sqlite:///forge-hub.sqlite3")
    api_token: SecretStr | None = None
    runner_token: SecretStr | None = None
    token_file: Path | None = None
    heartbeat_interval_ms: Annotated[int, Field(ge=100, le=600_000)] = 15_000
    offer_ttl_ms: Annotated[int, Field(ge=1_000, le=600_000)] = 30_000
    kill_grace_ms: Annotated[int, Field(ge=0, le=3_600_000)] = 30_000
    secrets_directory: Path | None = None
    credentials_directory: Path | None = None
    publish_ttl_ms: Annotated[int, Field(ge=1_000, le=3_600_000)] = 300_000
    decline_backoff_ms: Annotated[int, Field(ge=0, le=3_600_000)] = 15_000

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the hub."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def asks_for_tokens(self) -> bool:
        """Whether anything is asked of a caller."""
        return not (self.api_token is None and self.runner_token is None and not self.token_file)


def load_settings(**options: object) -> HubSettings:
    """The environment's settings, with the options that are not None on top.

    :raises RefusedError: code ``invalid_settings``, naming the field, never its value.
    """
    given = {name: value for name, value in options.items() if value is not None}
    try:
        settings = HubSettings.model_validate({**HubSettings().model_dump(), **given})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise RefusedError(
            f"cannot use the settings: FORGE_HUB_{field.upper()}: {first['msg']}",
            code="invalid_settings",
            field=field,
        ) from None
    require_safe(settings)
    return settings


def require_safe(settings: HubSettings) -> None:
    """Refuse to be open to a network.

    :raises RefusedError: code ``open_to_network``.
    """
    if not settings.is_loopback and not settings.asks_for_tokens:
        raise RefusedError(
            f"cannot listen on {settings.host} without tokens: anybody could run commands on the"
            " runners; make some with `forge-hub token create` and name their file in"
            " FORGE_HUB_TOKEN_FILE",
            code="open_to_network",
            field="host",
        )
