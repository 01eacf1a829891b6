"""The configuration of the proxy of one attempt (sandbox.md, Network; B-54; squid.conf(5)).

The rules in the order of the file, and why in this order:

1. what is never allowed whatever the name: the manager, other ports, other protocols, literals;
2. names that are not listed, before anything is resolved: a lookup alone carries data out;
3. names that resolve to what is not public, be it one address of several;
4. the rest, as soon as one public address is known: a name that did not resolve is no exception.

A name may resolve otherwise a moment later, between the check and the connection.  So each
connection is checked once more, by the address that it is bound to: to a destination that is not
known to be public it is bound to the loopback address, from where nothing is reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address
from typing import Final
from urllib.parse import quote

from forge_core.egress_domains import NEVER_PUBLIC, without_covered

PROXY_PORT: Final = 3128
WEB_PORTS: Final = (80, 443)
TUNNEL_PORT: Final = 443

NOT_PUBLIC: Final = (
    *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16"),
    *("172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16"),
    *("198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"),
    *("::/96", "64:ff9b::/96", "64:ff9b:1::/48", "100::/64", "100:0:0:1::/64"),
    *("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20", "5f00::/16"),
    *("fc00::/7", "fe80::/10", "fec0::/10", "ff00::/8"),
)
"""What IANA's special-purpose registries (RFC 6890) do not call globally reachable, multicast, and
what embeds an IPv4 address (64:ff9b::/96, 2001::/32, 2002::/16).  Metadata services are among them:
169.254.169.254, 100.100.100.200, 192.0.0.192, fd00:ec2::254.  IPv4-mapped IPv6 is IPv4 to Squid."""

PUBLIC: Final = ("0.0.0.0/1", "128.0.0.0/1", "2000::/3")
"""All that :data:`NOT_PUBLIC` is taken from.  As two halves, since Squid reads 0.0.0.0/0 as
"anything", a name without an address included."""

METADATA_NAMES: Final = ("metadata.goog", "metadata.tencentyun.com")
"""Names of metadata services that do not end in one of the names that are never public."""

_LITERALS: Final = (r"^[0-9.]+$", r"(^|\.)0x[0-9a-f]*$", r"(^|\.)[0-9]+$", ":", "%")
"""An address in any spelling that a resolver may take for one (inet_aton(3), RFC 3986 3.2.2)."""


@dataclass(frozen=True, slots=True)
class UpstreamProxy:
    """The only way out, where a network has its own proxy.

    :param login: ``user:password`` for it (RFC 7617); a secret.
    """

    host: str
    port: int
    login: str | None = None

    @property
    def secrets(self) -> tuple[str, ...]:
        """What nobody may be told: the login, and its password alone."""
        return () if self.login is None else (self.login, self.login.partition(":")[2])

    def __repr__(self) -> str:
        return f"UpstreamProxy({self.host!r}, {self.port})"


def squid_conf(
    domains: Sequence[str],
    *,
    listen_address: IPv4Address,
    egress_address: IPv4Address,
    upstream: UpstreamProxy | None = None,
) -> str:
    """The whole file.

    With an upstream proxy, that one resolves the names: what they resolve to here is still
    refused when it is not public, but a name that does not resolve here is passed on.

    :param domains: entries as :func:`forge_core.egress_domains.egress_domain` returns them.
    :param listen_address: the proxy's own address in the agent's network.
    :param egress_address: its address in the network that leads out.
    """
    lines = [
        f"http_port {listen_address}:{PROXY_PORT}",
        *_PROCESS,
        *_BEHAVIOUR,
        *_DIAGNOSTICS,
        *_rules(domains, resolves_elsewhere=upstream is not None),
        *(_binding(egress_address) if upstream is None else _peer(upstream)),
    ]
    return "".join(f"{line}\n" for line in lines)


_PROCESS: Final = (
    "visible_hostname egress-proxy",
    "pid_filename none",
    "coredump_dir none",
    "pinger_enable off",
    "shutdown_lifetime 0 seconds",
    "logfile_rotate 0",
    "cache_mem 0 MB",
    "cache_store_log none",
    "netdb_filename none",
)

_BEHAVIOUR: Final = (
    "cache deny all",
    "client_db off",
    "digest_generation off",
    "global_internal_static off",
    "half_closed_clients off",
    "quick_abort_min 0 KB",
    "quick_abort_max 0 KB",
    "uri_whitespace deny",
    # Nothing about the sandbox goes out.
    "via off",
    "forwarded_for delete",
    "httpd_suppress_version_string on",
    "connect_timeout 10 seconds",
    # Names come from the resolver of the engine alone: not from files, not from the agent.
    "hosts_file none",
    "udp_incoming_address 127.0.0.1",
    "dns_timeout 10 seconds",
    "positive_dns_ttl 60 seconds",
    "negative_dns_ttl 5 seconds",
)

_DIAGNOSTICS: Final = (
    "cache_log stdio:/dev/stderr",
    # Of what failed, method, host and port; never a path, a query or a header.
    "logformat failed %>Hs %Ss %rm %>rd:%>rP",
    "acl answered has response",
    "acl failed http_status 400-599",
    "access_log stdio:/dev/stdout logformat=failed answered failed",
)


def _rules(domains: Sequence[str], *, resolves_elsewhere: bool) -> list[str]:
    never = (*(f".{name}" for name in NEVER_PUBLIC), *METADATA_NAMES)
    listed = without_covered(domains)
    ports = " ".join(map(str, WEB_PORTS))
    return [
        f"acl web_port port {ports}",
        f"acl tunnel_port port {TUNNEL_PORT}",
        "acl tunnel method CONNECT",
        "acl plain_http proto HTTP",
        *(f"acl literal dstdom_regex -n -i {pattern}" for pattern in _LITERALS),
        f"acl never dstdomain -n {' '.join(never)}",
        *(f"acl listed dstdomain -n {domain}" for domain in listed),
        *(f"acl not_public dst {network}" for network in NOT_PUBLIC),
        f"acl public dst {' '.join(PUBLIC)}",
        "http_access deny manager",
        "http_access deny !web_port",
        "http_access deny tunnel !tunnel_port",
        "http_access deny !tunnel !plain_http",
        "http_access deny literal",
        "http_access deny never",
        *(("http_access deny !listed",) if listed else ("http_access deny all",)),
        "http_access deny not_public",
        "http_access allow all" if resolves_elsewhere else "http_access allow public",
        "http_access deny all",
    ]


def _binding(egress_address: IPv4Address) -> list[str]:
    return [
        f"tcp_outgoing_address {egress_address} public !not_public",
        "tcp_outgoing_address 127.0.0.1",
        "tcp_outgoing_address ::1",
    ]


def _peer(upstream: UpstreamProxy) -> list[str]:
    # Squid undoes URL escapes in a login, and only those.
    login = "" if upstream.login is None else f" login={quote(upstream.login, safe=':')}"
    options = f"no-query no-digest no-netdb-exchange proxy-only name=upstream{login}"
    return [
        f"cache_peer {upstream.host} parent {upstream.port} 0 {options}",
        "never_direct allow all",
    ]
