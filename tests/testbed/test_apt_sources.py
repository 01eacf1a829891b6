"""The mirror comes from the machine's own apt sources, in either of apt's formats."""

from __future__ import annotations

from pathlib import Path

import pytest
from lib.aptsources import (
    DEBIAN_KEYRING,
    Source,
    choose_mirror,
    machine_sources,
    parse_deb822,
    parse_one_line,
)
from lib.layout import BedError

DEB822 = f"""\
# comment
Types: deb deb-src
# a comment between fields
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main non-free-firmware
Signed-By: {DEBIAN_KEYRING}

Types: deb
URIs: http://mirror.example/debian-security
Suites: bookworm-security
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 mDMEY865UxYJKwYBBAHaRw8BAQdAd7Z0srwuhlB6JKFkcf4HU4SSS
 -----END PGP PUBLIC KEY BLOCK-----

Types: deb
Enabled: no
URIs: http://disabled.example/debian
Suites: bookworm
Components: main

Types: deb-src
URIs: http://source.example/debian
Suites: bookworm
Components: main
"""

ONE_LINE = f"""\
# deb http://commented.example/debian bookworm main
deb cdrom:[Debian GNU/Linux 12]/ bookworm main
deb [arch=amd64 signed-by={DEBIAN_KEYRING}] http://mirror.example/debian bookworm main contrib # own
deb-src http://mirror.example/debian bookworm main
deb http://mirror.example/debian-security bookworm-security main
"""


def test_deb822_stanzas_yield_one_source_for_each_suite() -> None:
    sources = list(parse_deb822(DEB822))
    assert sources[:2] == [
        Source("http://mirror.example/debian", suite, ("main", "non-free-firmware"), DEBIAN_KEYRING)
        for suite in ("bookworm", "bookworm-updates")
    ]
    assert [source.suite for source in sources[2:]] == ["bookworm-security"]


def test_one_line_entries_keep_their_options_and_drop_comments() -> None:
    sources = list(parse_one_line(ONE_LINE))
    expected = Source(
        "http://mirror.example/debian", "bookworm", ("main", "contrib"), DEBIAN_KEYRING
    )
    assert expected in sources
    assert "http://commented.example/debian" not in {source.uri for source in sources}


@pytest.mark.parametrize("sources", [parse_deb822(DEB822), parse_one_line(ONE_LINE)])
def test_the_mirror_is_the_main_archive(sources: list[Source]) -> None:
    assert choose_mirror(sources, "bookworm") == "http://mirror.example/debian"


def test_a_vendor_with_the_same_suite_is_not_taken_for_debian() -> None:
    vendor = Source("https://vendor.example/packages", "bookworm", ("main",), "/etc/vendor.gpg")
    debian = Source("mirror+file:/etc/apt/mirrors/debian.list", "bookworm", ("main",))
    signed = Source(debian.uri, "bookworm", ("main",), DEBIAN_KEYRING)
    assert choose_mirror([vendor, signed], "bookworm") == debian.uri
    by_path = Source("http://mirror.example/debian/", "bookworm", ("main",))
    assert choose_mirror([vendor, by_path], "bookworm") == by_path.uri


def test_a_machine_without_a_debian_source_is_told_so() -> None:
    with pytest.raises(BedError, match="cannot find a Debian mirror"):
        choose_mirror([Source("https://vendor.example/p", "any", ("main",))], "bookworm")


def test_both_formats_are_read_from_the_machine(tmp_path: Path) -> None:
    parts = tmp_path / "sources.list.d"
    parts.mkdir()
    (tmp_path / "sources.list").write_text("deb http://one.example/debian trixie main\n")
    (parts / "two.sources").write_text(DEB822)
    (parts / "three.list.save").write_text("deb http://backup.example/debian trixie main\n")
    uris = {source.uri for source in machine_sources(tmp_path)}
    assert "http://one.example/debian" in uris
    assert "http://mirror.example/debian" in uris
    assert "http://backup.example/debian" not in uris
