"""Entries of an egress allowlist: what is taken, and that the rest is refused by name."""

from __future__ import annotations

import re

import idna
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_core.egress_domains import DOMAIN_PATTERN, egress_domain

pytestmark = pytest.mark.requirement("B-54")

ASCII_NAME = re.compile(r"\.?(?:[a-z0-9](?:[a-z0-9-]*[a-z0-9])?\.)+[a-z0-9](?:[a-z0-9-]*[a-z0-9])?")


@pytest.mark.parametrize(
    ("entry", "taken"),
    [
        ("example.org", "example.org"),
        (".example.org", ".example.org"),
        ("a-b.c1.example", "a-b.c1.example"),
        ("1.example", "1.example"),
        ("example.1x", "example.1x"),
        ("bücher.example", "xn--bcher-kva.example"),
        (".straße.example", ".xn--strae-oqa.example"),
        ("xn--bcher-kva.example", "xn--bcher-kva.example"),
        (".".join(["a" * 60] * 4), ".".join(["a" * 60] * 4)),
    ],
)
def test_names_are_taken_as_the_proxy_needs_them(entry: str, taken: str) -> None:
    assert egress_domain(entry) == taken
    assert re.search(DOMAIN_PATTERN, entry)


@pytest.mark.parametrize(
    ("why", "entries"),
    [
        ("IP address", ["10.0.0.1", "1.1", "0x7f.1", "2130706433", "a.0x7F", "a.10", "1.2.3.4."]),
        ("IPv6", ["[::1]", "fd00:ec2::254", "::"]),
        ("wildcard", ["*.example.org", "a.*.org", "*"]),
        ("port", ["example.org:443", "example.org:"]),
        ("user", ["user@example.org", "user:password@example.org"]),
        ("URL", ["https://example.org", "https://user@example.org:1/x"]),
        ("path", ["example.org/x", "/"]),
        ("ends with a dot", ["example.org.", "."]),
        ("lower case", ["Example.org", "EXAMPLE.ORG", "Übung.Example"]),
        ("never a public name", ["localhost", "metadata.google.internal", ".local"]),
        ("one label", ["org", ".org", "", "example。org"]),
        ("no domain name", ["..a.org", "a..org", "-a.org", "a_b.org", "a b.org", "a.org\n"]),
        ("no domain name", ["xn--a.org", "ab--cd.org", "☃.example", "\uff45xample.org"]),
        ("no domain name", ["ex\u00adample.org", "Übung.example", f"{'a' * 64}.org", "٣.example"]),
        ("253", [".".join(["a" * 60] * 5)]),
    ],
)  # fmt: skip
def test_what_is_no_public_name_is_refused_by_name(why: str, entries: list[str]) -> None:
    for entry in entries:
        with pytest.raises(ValueError, match=re.escape(why)):
            egress_domain(entry)


@given(
    st.text(st.sampled_from("a1.-_:/@*[]xXÜü。\u0663\u00ad 0\n"), max_size=20)
    | st.text(max_size=300)
)
def test_what_is_taken_is_an_ascii_name_and_stays_itself(entry: str) -> None:
    try:
        taken = egress_domain(entry)
    except ValueError as error:
        assert str(error)  # noqa: PT017 - either is right
        return
    assert ASCII_NAME.fullmatch(taken)
    assert egress_domain(taken) == taken
    assert entry.strip(".") in (taken.strip("."), idna.decode(taken.strip(".")))
    assert re.search(DOMAIN_PATTERN, entry)
    assert re.search(DOMAIN_PATTERN, taken)
