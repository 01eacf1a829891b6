"""Which engine is meant: the Docker CLI's context store, its variables and their order (B-23)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from forge_core.errors import RefusedError
from forge_edges.docker_context import DEFAULT_HOST, TlsMaterial, resolve_endpoint

pytestmark = pytest.mark.requirement("B-23")


class Store:
    """A ``~/.docker`` as the CLI writes it."""

    def __init__(self, home: Path) -> None:
        self.config = home / ".docker"
        self.config.mkdir()
        self.environ = {"HOME": str(home)}

    def folder(self, kind: str, name: str) -> Path:
        folder = self.config / "contexts" / kind / hashlib.sha256(name.encode()).hexdigest()
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def context(self, name: str, host: str, **endpoint: object) -> Path:
        meta = self.folder("meta", name) / "meta.json"
        content = {
            "Name": name,
            "Metadata": {},
            "Endpoints": {"docker": {"Host": host, "SkipTLSVerify": False, **endpoint}},
        }
        meta.write_text(json.dumps(content))
        return meta

    def tls(self, name: str, *files: str) -> Path:
        folder = self.folder("tls", name) / "docker"
        folder.mkdir()
        for file in files:
            (folder / file).write_text("PEM")
        return folder

    def current(self, name: str) -> None:
        (self.config / "config.json").write_text(json.dumps({"currentContext": name}))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def test_a_named_context_wins_over_everything(store: Store) -> None:
    store.context("forge", "unix:///run/user/1000/docker.sock")
    store.context("other", "unix:///other.sock")
    store.current("other")
    environ = {**store.environ, "DOCKER_HOST": "unix:///elsewhere.sock"}
    endpoint = resolve_endpoint("forge", environ)
    assert endpoint.host == "unix:///run/user/1000/docker.sock"
    assert endpoint.socket_path == "/run/user/1000/docker.sock"
    assert "forge" in endpoint.source


def test_then_docker_host_then_the_current_context_then_the_default(store: Store) -> None:
    assert resolve_endpoint(None, store.environ).host == DEFAULT_HOST
    store.context("mine", "unix:///mine.sock")
    store.current("mine")
    assert resolve_endpoint(None, store.environ).host == "unix:///mine.sock"
    store.context("chosen", "unix:///chosen.sock")
    chosen = {**store.environ, "DOCKER_CONTEXT": "chosen"}
    assert resolve_endpoint(None, chosen).host == "unix:///chosen.sock"
    hosted = {**chosen, "DOCKER_HOST": "unix:///hosted.sock"}
    assert resolve_endpoint(None, hosted).host == "unix:///hosted.sock"
    assert resolve_endpoint("", hosted).host == "unix:///hosted.sock"


def test_the_name_default_is_the_default_socket_whatever_docker_host_says(store: Store) -> None:
    environ = {**store.environ, "DOCKER_HOST": "unix:///elsewhere.sock"}
    assert resolve_endpoint("default", environ).host == DEFAULT_HOST
    store.current("default")
    assert resolve_endpoint(None, store.environ).host == DEFAULT_HOST


def test_docker_config_names_another_store(store: Store, tmp_path: Path) -> None:
    store.context("forge", "unix:///forge.sock")
    environ = {"HOME": "/nonexistent", "DOCKER_CONFIG": str(store.config)}
    assert resolve_endpoint("forge", environ).host == "unix:///forge.sock"


def test_tls_material_belongs_to_its_context(store: Store) -> None:
    store.context("far", "tcp://engine.example:2376")
    folder = store.tls("far", "ca.pem", "cert.pem", "key.pem")
    endpoint = resolve_endpoint("far", store.environ)
    assert endpoint.address == ("engine.example", 2376)
    assert endpoint.socket_path is None
    assert endpoint.tls == TlsMaterial(
        str(folder / "ca.pem"), str(folder / "cert.pem"), str(folder / "key.pem"), verify=True
    )


def test_tls_of_the_environment(store: Store, tmp_path: Path) -> None:
    certs = tmp_path / "certs"
    certs.mkdir()
    for name in ("ca.pem", "cert.pem", "key.pem"):
        (certs / name).write_text("PEM")
    environ = {**store.environ, "DOCKER_HOST": "tcp://engine.example:2376"}
    verified = {**environ, "DOCKER_CERT_PATH": str(certs), "DOCKER_TLS_VERIFY": "1"}
    tls = resolve_endpoint(None, verified).tls
    assert tls is not None
    assert tls.verify
    with pytest.raises(RefusedError, match="neither local nor verified"):
        resolve_endpoint(None, {**environ, "DOCKER_CERT_PATH": str(certs)})


@pytest.mark.parametrize("host", ["tcp://10.0.0.5:2375", "tcp://engine.example:2375"])
def test_an_engine_across_the_network_needs_tls(store: Store, host: str) -> None:
    with pytest.raises(RefusedError, match="neither local nor verified"):
        resolve_endpoint(None, {**store.environ, "DOCKER_HOST": host})
    store.context("plain", host)
    with pytest.raises(RefusedError, match="neither local nor verified"):
        resolve_endpoint("plain", store.environ)
    store.context("lax", host, SkipTLSVerify=True)
    store.tls("lax", "ca.pem", "cert.pem", "key.pem")
    with pytest.raises(RefusedError, match="neither local nor verified"):
        resolve_endpoint("lax", store.environ)


@pytest.mark.parametrize("host", ["tcp://127.0.0.1:2375", "tcp://[::1]:2375", "tcp://localhost:1"])
def test_an_engine_on_loopback_does_not(store: Store, host: str) -> None:
    assert resolve_endpoint(None, {**store.environ, "DOCKER_HOST": host}).tls is None


@pytest.mark.parametrize(
    "host",
    [
        "ssh://me@host",
        "npipe:////./pipe/docker_engine",
        "fd://",
        "unix://",
        "unix://relative.sock",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:99999",
        "tcp://me:secret@127.0.0.1:2375",
        "http://127.0.0.1:2375",
        "/var/run/docker.sock",
    ],
)
def test_an_endpoint_that_is_no_socket_and_no_port_is_refused_by_name(
    store: Store, host: str
) -> None:
    with pytest.raises(RefusedError, match="only unix:///path and tcp://host:port") as refused:
        resolve_endpoint(None, {**store.environ, "DOCKER_HOST": host})
    assert refused.value.code == "docker_context_invalid"


def test_a_missing_context_says_where_it_was_looked_for(store: Store) -> None:
    with pytest.raises(RefusedError, match="docker context create forge") as refused:
        resolve_endpoint("forge", store.environ)
    assert str(store.config) in str(refused.value)
    assert refused.value.field == "FORGE_DOCKER_CONTEXT"


@pytest.mark.parametrize("name", ["../../etc", "a/b", "-x", "x", ""])
def test_a_name_never_becomes_a_path(store: Store, name: str) -> None:
    environ = {**store.environ, "DOCKER_CONTEXT": name}
    if name:
        with pytest.raises(RefusedError, match="no context name"):
            resolve_endpoint(name, store.environ)
        with pytest.raises(RefusedError, match="no context name"):
            resolve_endpoint(None, environ)
    else:
        assert resolve_endpoint(None, environ).host == DEFAULT_HOST


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"Name": "forge", "Endpoints": null}',
        b'{"Name": "forge", "Endpoints": {"docker": []}}',
        b'{"Name": "forge", "Endpoints": {"docker": {"Host": 7}}}',
        b'{"Name": "other", "Endpoints": {"docker": {"Host": "unix:///x"}}}',
        b" " * ((1 << 20) + 1),
        b"\xff\xfe\x00",
    ],
)
def test_a_corrupt_store_is_refused_by_path(store: Store, content: bytes) -> None:
    meta = store.context("forge", "unix:///forge.sock")
    meta.write_bytes(content)
    with pytest.raises(
        RefusedError, match=r"cannot (use|read) the Docker context forge"
    ) as refused:
        resolve_endpoint("forge", store.environ)
    assert str(meta) in str(refused.value)


def test_half_a_key_pair_is_refused(store: Store) -> None:
    store.context("far", "tcp://engine.example:2376")
    store.tls("far", "ca.pem", "cert.pem")
    with pytest.raises(RefusedError, match=r"cert\.pem and key\.pem"):
        resolve_endpoint("far", store.environ)


def test_material_that_is_no_pem_is_refused_when_it_is_used(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.write_text("no certificate")
    with pytest.raises(RefusedError, match="TLS material"):
        TlsMaterial(str(ca), None, None).context()
