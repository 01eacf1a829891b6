"""Entries of an egress allowlist: what is taken, and that the rest is refused by name."""

from __future__ import annotations

import re
from collections.abc import Collection

import idna
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_core.egress_domains import DOMAIN_PATTERN, covers, egress_domain, without_covered
from forge_core.errors import RefusedError
from forge_core.wire.base import parse
from forge_core.wire.from_hub import Network

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


NAMES = st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map(
    lambda labels: ".".join([*labels, "example"])
)
ENTRIES = st.builds(lambda dot, name: dot + name, st.sampled_from(("", ".")), NAMES)


def lets_through(entries: Collection[str], name: str) -> bool:
    """What the entries mean, said once more."""
    return any(
        name == entry or (entry.startswith(".") and (name == entry[1:] or name.endswith(entry)))
        for entry in entries
    )


@given(st.sets(ENTRIES), ENTRIES)
def test_an_entry_is_covered_when_no_name_of_it_is_missing(entries: set[str], wanted: str) -> None:
    bare = wanted.removeprefix(".")
    meant = [bare, f"zz.{bare}", f"y.zz.{bare}"] if wanted.startswith(".") else [bare]
    assert covers(entries, wanted) == all(lets_through(entries, name) for name in meant)


@given(st.lists(ENTRIES), NAMES)
def test_fewer_entries_say_the_same(entries: list[str], name: str) -> None:
    fewer = without_covered(entries)
    assert lets_through(fewer, name) == lets_through(entries, name)
    assert set(fewer) <= set(entries)
    assert not any(covers(set(fewer) - {one}, one) for one in fewer)


def test_a_start_that_names_no_public_name_is_malformed() -> None:
    wanted = {"policy": "public_allowlist", "domains": ["example.org", "169.254.169.254"]}
    with pytest.raises(RefusedError, match="IP address") as refusal:
        parse(Network, wanted, what="a network")
    assert (refusal.value.code, refusal.value.field) == ("malformed", "domains.1")
