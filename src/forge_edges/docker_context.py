"""Which Docker Engine: the Docker CLI's context store, read as the CLI reads it (B-23).

The store is ``<config dir>/contexts/meta/<sha256 of the name>/meta.json`` with TLS material in
``<config dir>/contexts/tls/<sha256 of the name>/docker``; the config dir is ``$DOCKER_CONFIG``
or ``~/.docker`` (docs.docker.com, *Docker contexts*).
"""

from __future__ import annotations

import hashlib
import json
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

from forge_core.errors import RefusedError

DEFAULT_HOST: Final = "unix:///var/run/docker.sock"
INVALID: Final = "docker_context_invalid"
_MAX_FILE_BYTES: Final = 1 << 20
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.+-]+\Z")


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """Paths of PEM files; ``verify`` is whether the engine must prove who it is."""

    ca: str | None
    certificate: str | None
    key: str | None
    verify: bool = True

    def context(self) -> ssl.SSLContext:
        """For the connections that do not go through the SDK.

        :raises RefusedError: a file cannot be used.
        """
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if not self.verify:
                context.check_hostname = False
                context.verify_mode = ssl.CERT_NONE
            if self.certificate is not None:
                context.load_cert_chain(self.certificate, self.key)
        except (OSError, ssl.SSLError) as error:
            raise _invalid(f"cannot use the TLS material of the Docker endpoint: {error}") from None
        return context


@dataclass(frozen=True, slots=True)
class DockerEndpoint:
    """Where the engine listens.

    :param host: ``unix:///path`` or ``tcp://host:port``.
    :param source: which setting named it, for people.
    """

    host: str
    source: str
    tls: TlsMaterial | None = None

    @property
    def socket_path(self) -> str | None:
        """The path of a Unix socket; None for TCP."""
        parts = urlsplit(self.host)
        return parts.path if parts.scheme == "unix" else None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of a TCP endpoint, which :func:`resolve_endpoint` has checked."""
        parts = urlsplit(self.host)
        return parts.hostname or "", parts.port or 0

    @property
    def environment(self) -> dict[str, str]:
        """How other clients are told of it (docs.docker.com, *Protect the Docker socket*)."""
        environment = {"DOCKER_HOST": self.host}
        if self.tls is not None and (material := self.tls.ca or self.tls.certificate):
            # Context stores and DOCKER_CERT_PATH name the files alike: ca.pem, cert.pem, key.pem.
            environment["DOCKER_CERT_PATH"] = str(Path(material).parent)
            environment["DOCKER_TLS_VERIFY" if self.tls.verify else "DOCKER_TLS"] = "1"
        return environment

    def __str__(self) -> str:
        return f"{self.host} ({self.source})"


def resolve_endpoint(context: str | None, environ: Mapping[str, str]) -> DockerEndpoint:
    """The engine that the settings mean.

    In this order: the named context (``FORGE_DOCKER_CONTEXT``); ``DOCKER_HOST`` with
    ``DOCKER_TLS_VERIFY`` and ``DOCKER_CERT_PATH``; the Docker CLI's current context; the
    default socket.  Reads a few small files.

    :raises RefusedError: code ``docker_context_invalid``: no such context, a corrupt store, an
        endpoint that we cannot speak to, or one that is neither local nor authenticated.
    """
    config_dir = config_directory(environ)
    if context:
        return _from_store(context, config_dir, f"FORGE_DOCKER_CONTEXT={context}")
    if host := environ.get("DOCKER_HOST", "").strip():
        return _endpoint(host, "DOCKER_HOST", _tls_from_environment(environ, config_dir))
    if current := environ.get("DOCKER_CONTEXT") or _current_context(config_dir):
        return _from_store(current, config_dir, f"current Docker context {current}")
    return _endpoint(DEFAULT_HOST, "default", None)


def plugin_directories(config_dir: Path) -> tuple[Path, ...]:
    """Where the CLI looks for plugins besides the system's own places; absolute paths.

    :raises RefusedError: code ``docker_context_invalid``: the configuration is corrupt.
    """
    config = _read_json(config_dir / "config.json", "the Docker CLI's configuration") or {}
    extra = config.get("cliPluginsExtraDirs")
    names = extra if isinstance(extra, list) else ()
    named = [Path(name) for name in names if isinstance(name, str)]
    return tuple(path for path in (config_dir / "cli-plugins", *named) if path.is_absolute())


def _from_store(name: str, config_dir: Path, source: str) -> DockerEndpoint:
    if name == "default":
        return _endpoint(DEFAULT_HOST, source, None)
    if not _NAME.match(name):
        raise _invalid(f"cannot use the Docker context {name[:200]!r}: that is no context name")
    digest = hashlib.sha256(name.encode()).hexdigest()
    meta_path = config_dir / "contexts" / "meta" / digest / "meta.json"
    meta = _read_json(meta_path, f"the Docker context {name}")
    if meta is None:
        raise _invalid(
            f"cannot use the Docker context {name}: it is not in {config_dir}/contexts; "
            f"see docker context ls, or make it: docker context create {name} --docker host=..."
        )
    endpoint = _mapping(_mapping(meta.get("Endpoints")).get("docker"))
    host = endpoint.get("Host")
    if meta.get("Name") != name or not isinstance(host, str):
        raise _invalid(f"cannot use the Docker context {name}: {meta_path} is not its metadata")
    tls = _tls_from_folder(
        config_dir / "contexts" / "tls" / digest / "docker",
        verify=endpoint.get("SkipTLSVerify") is not True,
    )
    return _endpoint(host, source, tls)


def _current_context(config_dir: Path) -> str | None:
    config = _read_json(config_dir / "config.json", "the Docker CLI's configuration")
    current = (config or {}).get("currentContext")
    return current if isinstance(current, str) and current else None


def _tls_from_environment(environ: Mapping[str, str], config_dir: Path) -> TlsMaterial | None:
    # As the CLI has it: a certificate path alone means TLS without verification.
    verify = bool(environ.get("DOCKER_TLS_VERIFY"))
    cert_path = environ.get("DOCKER_CERT_PATH")
    if not verify and not cert_path:
        return None
    return _tls_from_folder(Path(cert_path) if cert_path else config_dir, verify=verify)


def _tls_from_folder(folder: Path, *, verify: bool) -> TlsMaterial | None:
    ca, certificate, key = (
        str(path) if (path := folder / f"{name}.pem").is_file() else None
        for name in ("ca", "cert", "key")
    )
    if (certificate is None) != (key is None):
        raise _invalid(f"cannot use the TLS material in {folder}: it needs cert.pem and key.pem")
    if ca is None and certificate is None:
        return None
    return TlsMaterial(ca, certificate, key, verify)


def _endpoint(host: str, source: str, tls: TlsMaterial | None) -> DockerEndpoint:
    parts = urlsplit(host)
    match parts.scheme:
        case "unix" if parts.path and not parts.netloc:
            return DockerEndpoint(f"unix://{parts.path}", source)
        case "tcp" if _has_port(parts):
            if not _is_loopback(parts.hostname) and (tls is None or not tls.verify):
                raise _invalid(
                    f"cannot use the Docker endpoint {host} ({source}): it is neither local nor "
                    "verified by TLS, so whoever sits between owns this engine; give it a "
                    "context with ca.pem, cert.pem and key.pem"
                )
            return DockerEndpoint(f"tcp://{parts.netloc}", source, tls)
        case _:
            raise _invalid(
                f"cannot use the Docker endpoint {host[:200]!r} ({source}): only unix:///path and "
                "tcp://host:port are supported; for ssh:// forward the socket: "
                "ssh -L /run/user/1000/engine.sock:/run/user/1000/docker.sock HOST"
            )


def _has_port(parts: SplitResult) -> bool:
    try:
        return bool(parts.hostname and parts.port and not parts.username and not parts.password)
    except ValueError:
        return False


def _is_loopback(hostname: str | None) -> bool:
    try:
        return hostname == "localhost" or ip_address(hostname or "").is_loopback
    except ValueError:
        return False


def config_directory(environ: Mapping[str, str]) -> Path:
    """Where the Docker CLI keeps its configuration (docs.docker.com, *docker*: DOCKER_CONFIG)."""
    if explicit := environ.get("DOCKER_CONFIG"):
        return Path(explicit)
    return Path(environ.get("HOME") or Path.home()) / ".docker"


def _read_json(path: Path, what: str) -> dict[str, Any] | None:
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_FILE_BYTES + 1)
        if len(text) > _MAX_FILE_BYTES:
            raise ValueError(f"it is larger than {_MAX_FILE_BYTES} bytes")
        return _mapping(json.loads(text))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise _invalid(f"cannot read {what} from {path}: {error}") from None


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _invalid(message: str) -> RefusedError:
    return RefusedError(message, code=INVALID, field="FORGE_DOCKER_CONTEXT")
