"""From the server's base URL to the hub's URL."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_core.errors import RefusedError
from forge_edges.hub_url import HUB_PATH, resolve_bridge_runner_hub_url

pytestmark = pytest.mark.requirement("B-02")


@pytest.mark.parametrize(
    ("base", "hub"),
    [
        ("http://localhost", "http://localhost/hubs/runner"),
        ("https://forge.example.org/", "https://forge.example.org/hubs/runner"),
        ("https://example.org/forge", "https://example.org/forge/hubs/runner"),
        ("https://example.org/a/b//", "https://example.org/a/b/hubs/runner"),
        ("ws://localhost:8000", "http://localhost:8000/hubs/runner"),
        ("wss://Example.ORG:8443/x/", "https://example.org:8443/x/hubs/runner"),
        ("HTTP://LOCALHOST", "http://localhost/hubs/runner"),
        ("http://[::1]:8000", "http://[::1]:8000/hubs/runner"),
        ("http://[0:0:0::1]/", "http://[::1]/hubs/runner"),
        ("http://192.0.2.7:80", "http://192.0.2.7:80/hubs/runner"),
        ("http://forge_hub:8000", "http://forge_hub:8000/hubs/runner"),
        ("http://localhost:", "http://localhost/hubs/runner"),
        ("https://example.org/hubs/runner", "https://example.org/hubs/runner"),
        ("https://example.org/hubs/runner/", "https://example.org/hubs/runner"),
        ("https://example.org/xhubs/runner", "https://example.org/xhubs/runner/hubs/runner"),
    ],
)
def test_base_url_becomes_hub_url(base: str, hub: str) -> None:
    assert resolve_bridge_runner_hub_url(base) == hub


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "empty"),
        ("forge.example.org", "scheme"),
        ("forge.example.org:8000", "scheme"),
        ("ftp://forge.example.org", "scheme"),
        ("file:///etc/passwd", "scheme"),
        ("http://", "no host"),
        ("http:///hubs", "no host"),
        ("http://:8000", "no host"),
        ("http://user:hunter2@host", "user name"),
        ("http://@host", "user name"),
        ("http://host?x=1", "query"),
        ("http://host/?", "query"),
        ("http://host/#", "query or a fragment"),
        ("http://host:0", "port"),
        ("http://host:65536", "port"),
        ("http://host:eighty", "port"),
        ("http://ho st", "space"),
        ("http://host\n", "control"),
        ("http://host\x00", "control"),
        (" http://host", "space"),
        ("http://bücher.example", "xn--"),
        ("http://host\\@evil", "backslash"),
        ("http://host/a/../b", "segment"),
        ("http://[::1", "not valid"),
        ("http://[::zz]", "not valid"),
        ("http://a..b", "host"),
        ("http://-a", "host"),
        ("http://a%41", "host"),
        ("http://" + "a" * 64, "host"),
        ("http://host/" + "a" * 2048, "longer"),
    ],
)
def test_bad_url_is_refused_by_name(url: str, says: str) -> None:
    with pytest.raises(RefusedError) as caught:
        resolve_bridge_runner_hub_url(url)
    assert caught.value.field == "FORGE_SERVER_URL"
    assert caught.value.code == "invalid_url"
    assert says in str(caught.value)
    assert "hunter2" not in str(caught.value)


hosts = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?(\.[a-z]{1,10}){0,3}", fullmatch=True)
paths = st.lists(st.from_regex(r"[A-Za-z0-9_~-]{1,12}", fullmatch=True), max_size=4)
ports = st.none() | st.integers(1, 65535)


@given(st.sampled_from(["http", "https", "ws", "wss"]), hosts, ports, paths, st.booleans())
def test_every_base_url_leads_to_its_own_origin(
    scheme: str, host: str, port: int | None, path: list[str], slash: bool
) -> None:
    base = f"{scheme}://{host}" + (f":{port}" if port else "") + "".join(f"/{p}" for p in path)
    hub = resolve_bridge_runner_hub_url(base + "/" * slash)
    parts = urlsplit(hub)
    assert (parts.hostname, parts.port) == (host, port)
    assert parts.scheme == ("https" if scheme in {"https", "wss"} else "http")
    assert parts.path.endswith(HUB_PATH)
    assert resolve_bridge_runner_hub_url(hub) == hub


@given(st.text(max_size=60) | st.text(max_size=40).map("http://".__add__))
def test_anything_else_is_refused_and_never_crashes(text: str) -> None:
    try:
        hub = resolve_bridge_runner_hub_url(text)
    except RefusedError:
        return
    assert resolve_bridge_runner_hub_url(hub) == hub
    assert urlsplit(hub).hostname
