"""A stand-in for the Internet behind a real engine, and what has arrived there.

A network namespace with addresses of its own is linked to that of the engine by a pair of virtual
interfaces; whatever leaves a container by the engine's bridges then gets there, and nowhere else.
The name servers that the engine asks are in it too.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from engines import BedCommandError, Engine

PROGRAM = Path(__file__).parent / "e2e/inside/stand_in_site.py"
PUBLIC = ("192.31.196.10", "192.31.196.11")
"""AS112-v4 (RFC 7535): public, and nobody's."""

PRIVATE, METADATA = "10.99.0.1", "169.254.169.254"
UPSTREAM = (PRIVATE, 3129)
LINK = ("198.18.0.1", "198.18.0.2")
"""Of the engine's side, and of the site's."""

EVERYWHERE = "0.0.0.0"  # noqa: S104 - the host's own service is what must not be reached
READY_S = 10.0

_numbers = itertools.count()


@dataclass(slots=True)
class PublicSite:
    """What runs, and what it has seen.

    On the engine's host the same servers listen on every address of that.

    :ivar certificate: of its TLS servers, signed by itself.
    """

    resolver: str
    certificate: bytes
    seen: list[dict[str, Any]] = field(default_factory=list)

    def arrived(self, kind: str) -> list[dict[str, Any]]:
        """Everything of a kind (``http``, ``dns``, ``tcp``, ``udp``), in order."""
        return [one for one in self.seen if one["kind"] == kind]

    def mentions(self, text: str) -> list[dict[str, Any]]:
        """Everything in which a text occurs, but for the addresses where it arrived."""
        return [one for one in self.seen if text in json.dumps(one)]


@contextmanager
def public_site(
    engine: Engine, directory: Path, names: Mapping[str, Sequence[Sequence[str] | None]]
) -> Iterator[PublicSite]:
    """A site behind this engine, as the only one at a time.

    :param names: see ``stand_in_site.py``.
    :raises BedCommandError: no name server of this engine can be stood in for.
    """
    resolver = _resolver(engine)
    directory.mkdir(exist_ok=True)
    certificate = _certificate(directory)
    site = PublicSite(resolver, certificate)
    listen = [*PUBLIC, PRIVATE, METADATA]
    orders = {
        "listen": listen,
        "names": names,
        "resolver": resolver,
        "upstream": UPSTREAM,
        "certificate": str(directory / "site.pem"),
        "key": str(directory / "site.key"),
    }
    with ExitStack() as stack:
        stack.enter_context(_alone(engine))
        namespace = stack.enter_context(_linked(engine, [*listen, resolver]))
        stack.enter_context(_running(namespace, orders, site))
        here = Path(engine.network_namespace)
        stack.enter_context(_running(here, {"listen": [EVERYWHERE]}, site))
        yield site


@contextmanager
def _alone(engine: Engine) -> Iterator[None]:
    """Addresses and routes in the engine's namespace are one test's at a time."""
    with Path(f"/run/lock/forge-test-site-{engine.name}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _linked(engine: Engine, addresses: Sequence[str]) -> Iterator[Path]:
    name, pid = f"forge-test-{os.getpid()}-{secrets.token_hex(2)}", str(engine.daemon_pid)
    inside = ("nsenter", f"--net={engine.network_namespace}", "ip")
    number = next(_numbers)
    near, far = f"fs{os.getpid()}-{number}a", f"fs{os.getpid()}-{number}b"
    _run("ip", "netns", "add", name)
    try:
        site = ("ip", "-netns", name)
        _run("ip", "link", "add", far, "netns", name, "type", "veth", "peer", "name", near)
        _run("ip", "link", "set", near, "netns", pid)
        _run(*site, "link", "set", "lo", "up")
        _run(*site, "address", "add", f"{LINK[1]}/30", "dev", far)
        _run(*site, "link", "set", far, "up")
        for address in addresses:
            _run(*site, "address", "add", f"{address}/32", "dev", "lo")
        _run(*site, "route", "add", "default", "via", LINK[0])
        _run(*inside, "address", "add", f"{LINK[0]}/30", "dev", near)
        _run(*inside, "link", "set", near, "up")
        for address in addresses:
            _run(*inside, "route", "replace", f"{address}/32", "via", LINK[1], "dev", near)
        yield Path("/run/netns") / name
    finally:
        # With the namespace it would go as well, some time later.
        subprocess.run([*inside, "link", "delete", near], capture_output=True, check=False)
        _run("ip", "netns", "delete", name)


@contextmanager
def _running(namespace: Path, orders: Mapping[str, Any], site: PublicSite) -> Iterator[None]:
    program = ["nsenter", f"--net={namespace}", sys.executable, "-I", str(PROGRAM)]
    process = subprocess.Popen(
        [*program, json.dumps(orders)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    is_ready = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            one = json.loads(line)
            if one["kind"] == "ready":
                is_ready.set()
            else:
                site.seen.append(one)

    reading = threading.Thread(target=read)
    reading.start()
    try:
        assert is_ready.wait(READY_S), "the stand-in for the Internet did not come up"
        yield
    finally:
        process.kill()
        process.wait()
        reading.join()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()


def _resolver(engine: Engine) -> str:
    """The first name server that this engine's containers ask."""
    lines = Path(f"/proc/{engine.daemon_pid}/root/etc/resolv.conf").read_text().splitlines()
    servers = [line.split()[1] for line in lines if line.startswith("nameserver ")]
    for server in servers:
        address = ip_address(server)
        if address.version == 4 and not address.is_loopback:
            return server
    raise BedCommandError(f"no name server of {engine.name} can be stood in for: {servers}")


def _certificate(directory: Path) -> bytes:
    """One for the site, signed by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "www.example.org")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("www.example.org")]), False)
        .sign(key, hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
    )
    (directory / "site.pem").write_bytes(certificate)
    (directory / "site.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return certificate


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
