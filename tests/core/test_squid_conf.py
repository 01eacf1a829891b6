"""The proxy's configuration, read as Squid reads it: what it lets through, and what it looks up."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_core.egress_domains import covers
from forge_core.squid_conf import NOT_PUBLIC, UpstreamProxy, squid_conf

pytestmark = pytest.mark.requirement("B-54")

Address = IPv4Address | IPv6Address
LISTEN, EGRESS = IPv4Address("10.213.0.2"), IPv4Address("10.213.0.18")
PUBLIC = ip_address("192.31.196.10")
LISTED = (".example.org", "only.example.net")
PLAIN = ("GET", "http")


@dataclass
class Request:
    """A request as Squid sees it once it is parsed."""

    host: str
    port: int = 80
    method: str = "GET"
    protocol: str = "http"
    path: str = "/"
    addresses: tuple[Address, ...] = (PUBLIC,)
    lookups: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Conf:
    """The file, and what its rules come to (squid.conf(5): acl, http_access)."""

    lines: tuple[str, ...]

    @classmethod
    def of(cls, domains: Sequence[str] = LISTED, upstream: UpstreamProxy | None = None) -> Conf:
        text = squid_conf(domains, listen_address=LISTEN, egress_address=EGRESS, upstream=upstream)
        assert text.endswith("\n")
        return cls(tuple(text.splitlines()))

    def values(self, directive: str) -> list[str]:
        return [line.split(" ", 1)[1] for line in self.lines if line.split(" ", 1)[0] == directive]

    def allows(self, request: Request) -> bool:
        for rule in self.values("http_access"):
            action, *names = rule.split()
            if all(self._holds(name, request) for name in names):
                return action == "allow"
        raise AssertionError("no rule is the last one")

    def bound_to(self, address: Address) -> str:
        """The address that a connection to this one comes from."""
        request = Request("a.example.org", addresses=(address,))
        for rule in self.values("tcp_outgoing_address"):
            own, *names = rule.split()
            if ip_address(own).version == address.version and all(
                self._holds(name, request) for name in names
            ):
                return own
        return "any"

    def _holds(self, name: str, request: Request) -> bool:
        if name.startswith("!"):
            return not self._holds(name[1:], request)
        if name == "all":
            return True
        if name == "manager":
            return request.protocol == "cache_object" or "/squid-internal-mgr/" in request.path
        found = [acl.split()[1:] for acl in self.values("acl") if acl.split()[0] == name]
        assert found, f"no acl {name}"
        return any(_matches(kind, values, request) for kind, *values in found)


def _matches(kind: str, values: list[str], request: Request) -> bool:
    words = [value for value in values if not value.startswith("-")]
    match kind:
        case "port":
            return str(request.port) in words
        case "method":
            return request.method in words
        case "proto":
            return request.protocol in [word.lower() for word in words]
        case "dstdomain" | "dstdom_regex" if "-n" not in values:
            raise AssertionError("it would ask for the name of an address")
        case "dstdomain":
            return covers(words, request.host)
        case "dstdom_regex":
            return any(re.search(word, request.host, re.IGNORECASE) for word in words)
        case "dst":
            request.lookups.append(request.host)
            return any(
                address in ip_network(word) for word in words for address in request.addresses
            )
    raise AssertionError(kind)


ADDRESSES = st.ip_addresses() | st.sampled_from(
    [network[1] for network in map(ip_network, NOT_PUBLIC)]
)
LABELS = st.sampled_from(("a", "www", "xn--bcher-kva", "1", "0x1", "example", "10"))
HOSTS = st.builds(
    lambda labels, end: ".".join([*labels, end]),
    st.lists(LABELS, max_size=3),
    st.sampled_from(
        ("example.org", "only.example.net", "evil.test", "1", "0x7f", "internal", "localhost")
    ),
) | st.sampled_from(("127.1", "2130706433", "0177.0.0.1", "[::1]", "[fd00:ec2::254]", ""))
REQUESTS = st.builds(
    Request,
    host=HOSTS,
    port=st.sampled_from((22, 25, 80, 443, 3128, 8080)),
    method=st.sampled_from(("GET", "POST", "CONNECT", "TRACE")),
    protocol=st.sampled_from(("http", "https", "ftp", "cache_object")),
    path=st.sampled_from(("/", "/squid-internal-mgr/info")),
    addresses=st.lists(ADDRESSES, max_size=3).map(tuple),
)


def is_public(address: Address) -> bool:
    """Python's own table of the same registries."""
    return address.is_global and not address.is_multicast


@given(REQUESTS)
def test_what_passes_is_listed_public_and_of_the_web(request_: Request) -> None:
    if not Conf.of().allows(request_):
        return
    assert covers(LISTED, request_.host)
    assert request_.addresses
    assert all(is_public(address) for address in request_.addresses)
    assert request_.port == 443 or (request_.port == 80 and request_.method != "CONNECT")
    assert request_.method == "CONNECT" or request_.protocol == "http"
    assert "squid-internal-mgr" not in request_.path


@given(REQUESTS)
def test_what_is_not_listed_is_not_even_looked_up(request_: Request) -> None:
    Conf.of().allows(request_)
    assert not request_.lookups or covers(LISTED, request_.host)


def test_what_is_listed_passes() -> None:
    conf = Conf.of()
    for host in ("example.org", "a.b.example.org", "only.example.net"):
        assert conf.allows(Request(host))
        assert conf.allows(Request(host, port=443, method="CONNECT"))
        assert conf.allows(Request(host, addresses=(ip_address("2600::1"), PUBLIC)))


@pytest.mark.parametrize(
    "changes",
    [
        {"host": "notexample.org"},
        {"host": "example.org.evil.test"},
        {"host": "www.only.example.net"},
        {"port": 8080},
        {"port": 80, "method": "CONNECT"},
        {"port": 22, "method": "CONNECT"},
        {"protocol": "ftp"},
        {"protocol": "https", "port": 443},
        {"protocol": "cache_object"},
        {"path": "/squid-internal-mgr/menu"},
        {"addresses": ()},
        {"addresses": (PUBLIC, ip_address("10.1.2.3"))},
        {"addresses": (PUBLIC, ip_address("fd00:ec2::254"))},
    ],
    ids=str,
)
def test_one_thing_that_is_not_right_is_enough(changes: dict[str, object]) -> None:
    right = Request("www.example.org")
    conf = Conf.of()
    assert conf.allows(right)
    assert not conf.allows(replace(right, **changes))  # type: ignore[arg-type]


def test_nothing_passes_without_a_list() -> None:
    conf = Conf.of(())
    assert not conf.allows(Request("example.org"))
    assert not conf.allows(Request("evil.test", port=443, method="CONNECT"))


@given(ADDRESSES)
def test_a_connection_is_bound_to_where_nothing_is_unless_it_is_public(address: Address) -> None:
    bound = ip_address(Conf.of().bound_to(address))
    assert bound.is_loopback or (bound == EGRESS and is_public(address))


@pytest.mark.parametrize(
    "address",
    [
        *("169.254.169.254", "100.100.100.200", "192.0.0.192", "fd00:ec2::254", "127.0.0.1"),
        *("64:ff9b::7f00:1", "2002:7f00:1::", "::7f00:1", "0.1.2.3", "255.255.255.255", "fe80::1"),
    ],
)
def test_addresses_that_matter_are_among_what_is_not_public(address: str) -> None:
    assert not Conf.of().allows(Request("a.example.org", addresses=(ip_address(address),)))


def test_no_line_can_be_added_by_a_name_or_a_login() -> None:
    plain, more = Conf.of(("a.example",)), Conf.of(("a.example", "b.example"))
    assert len(more.lines) == len(plain.lines) + 1
    upstream = UpstreamProxy("proxy.corp", 3128, "user:p ss\nhttp_access allow all % \"'\\#é")
    with_login = Conf.of(("a.example",), upstream)
    without = Conf.of(("a.example",), replace(upstream, login=None))
    assert len(with_login.lines) == len(without.lines)
    [peer] = with_login.values("cache_peer")
    assert upstream.login == unquote(peer.rpartition("login=")[2])
    assert all(line.isprintable() for line in with_login.lines)


def test_an_upstream_proxy_is_the_only_way_out() -> None:
    conf = Conf.of(LISTED, UpstreamProxy("proxy.corp", 8080))
    assert conf.values("never_direct") == ["allow all"]
    assert conf.values("cache_peer")[0].startswith("proxy.corp parent 8080 0 ")
    assert conf.values("tcp_outgoing_address") == []
    assert conf.allows(Request("www.example.org", addresses=()))
    assert not conf.allows(Request("evil.test", addresses=()))
    assert not conf.allows(Request("www.example.org", addresses=(ip_address("10.0.0.1"),)))


def test_a_login_is_not_printed() -> None:
    assert "secret" not in repr(UpstreamProxy("proxy.corp", 8080, "user:secret"))


def test_nothing_is_kept_and_nobody_is_told_what_was_asked_for() -> None:
    conf = Conf.of()
    assert conf.values("cache") == ["deny all"]
    assert conf.values("cache_store_log") == ["none"]
    [form] = conf.values("logformat")
    assert set(re.findall(r"%\S+", form.replace(":", " "))) == {
        "%>Hs",
        "%Ss",
        "%rm",
        "%>rd",
        "%>rP",
    }
    assert conf.values("http_port") == [f"{LISTEN}:3128"]
    assert conf.values("forwarded_for") == ["delete"]


def _directives(conf: Conf) -> Iterator[str]:
    return (line.split()[0] for line in conf.lines)


def test_rules_end_with_a_refusal() -> None:
    for conf in (Conf.of(), Conf.of(()), Conf.of(LISTED, UpstreamProxy("proxy.corp", 1))):
        assert conf.values("http_access")[-1] == "deny all"
        assert "include" not in _directives(conf)
