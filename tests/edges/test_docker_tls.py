"""The door over TCP with TLS: both sides prove who they are, and streams work too."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import anyio.abc
import pytest
from anyio.abc import SocketAttribute
from anyio.streams.tls import TLSStream
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from engines import Engine as BedEngine
from forge_core.errors import EngineUnreachable
from forge_core.labels import Owner
from forge_core.sandbox_spec import ContainerSpec, Hardening, container_request
from forge_edges.docker_context import DockerEndpoint, TlsMaterial, resolve_endpoint
from forge_edges.docker_engine import DockerEngine

BROKEN = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError)
pytestmark = [pytest.mark.engine("d26"), pytest.mark.requirement("B-23")]


class Authority:
    """A certificate authority that exists for one test."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
        certificate = self._build(self._name, self._key, ca=True)
        (folder / "ca.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str) -> Path:
        """A folder with ``ca.pem``, ``cert.pem`` and ``key.pem`` for 127.0.0.1."""
        folder = self.folder / name
        folder.mkdir()
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = self._build(subject, key, ca=False)
        (folder / "ca.pem").write_bytes((self.folder / "ca.pem").read_bytes())
        (folder / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        (folder / "key.pem").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return folder

    def _build(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, *, ca: bool
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([address]), critical=False)
            .add_extension(authority, critical=False)
            .sign(self._key, hashes.SHA256())
        )


async def forward(source: anyio.abc.ByteStream, target: anyio.abc.ByteStream) -> None:
    with suppress(*BROKEN):
        while True:
            await target.send(await source.receive())
    await anyio.aclose_forcefully(target)


@asynccontextmanager
async def tls_in_front_of(engine: BedEngine, material: Path) -> AsyncIterator[int]:
    """A port that asks for a client certificate and passes everything on to the engine."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=material / "ca.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(material / "cert.pem", material / "key.pem")

    async def serve(raw: anyio.abc.SocketStream) -> None:
        try:
            client = await TLSStream.wrap(
                raw, server_side=True, ssl_context=context, standard_compatible=False
            )
        except (ssl.SSLError, *BROKEN):
            await anyio.aclose_forcefully(raw)
            return
        except anyio.get_cancelled_exc_class():
            await anyio.aclose_forcefully(raw)
            raise
        async with (
            client,
            await anyio.connect_unix(engine.socket_path) as daemon,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(forward, client, daemon)
            tasks.start_soon(forward, daemon, client)

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        yield listener.listeners[0].extra(SocketAttribute.local_port)  # noqa: S610 - no ORM
        tasks.cancel_scope.cancel()


def endpoint_of(port: int, material: Path) -> DockerEndpoint:
    host = f"tcp://127.0.0.1:{port}"
    environ = {"DOCKER_HOST": host, "DOCKER_CERT_PATH": str(material), "DOCKER_TLS_VERIFY": "1"}
    return resolve_endpoint(None, environ)


async def test_a_container_lives_and_talks_over_tls(
    engine: BedEngine, tmp_path: Path, runner_id: str
) -> None:
    authority = Authority(tmp_path / "ca")
    owner = Owner(runner_id, "instance", "attempt", 1, "project", "domain")
    spec = ContainerSpec(
        owner=owner,
        role="agent",
        image=engine.busybox_image,
        argv=("/bin/sh", "-c", "read x; echo got $x; exit 4"),
        memory_bytes=64 * 2**20,
        cpu_millis=1000,
        pids=64,
    )
    async with tls_in_front_of(engine, authority.issue("server")) as port:
        endpoint = endpoint_of(port, authority.issue("client"))
        async with DockerEngine.connect(endpoint) as door:
            container = await door.create_container(spec.name, container_request(spec, Hardening()))
            async with door.attach(container) as attachment:
                await door.start_container(container)
                await attachment.send(b"it\n")
                assert await attachment.receive() == (1, b"got it\n")
                assert await attachment.receive() is None
            status = await door.wait_container(container, timeout_ms=20_000)
            await door.remove_container(container)
    assert status.exit_code == 4


@pytest.mark.parametrize("who", ["engine", "client"])
async def test_whoever_cannot_prove_who_it_is_is_not_spoken_to(
    engine: BedEngine, tmp_path: Path, who: str
) -> None:
    real, other = Authority(tmp_path / "ca"), Authority(tmp_path / "other")
    server = (other if who == "engine" else real).issue("server")
    client = real.issue("client")
    material = TlsMaterial(
        str(client / "ca.pem"), str(client / "cert.pem"), str(client / "key.pem")
    )
    if who == "client":
        material = TlsMaterial(str(client / "ca.pem"), None, None)
    async with tls_in_front_of(engine, server) as port:
        endpoint = DockerEndpoint(f"tcp://127.0.0.1:{port}", "test", material)
        async with DockerEngine.connect(endpoint) as door:
            with pytest.raises(EngineUnreachable):
                await door.facts()
