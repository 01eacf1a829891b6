"""Which Debian mirror this machine uses, read from its own apt sources (sources.list(5)).

Both formats are read: deb822 (``*.sources``) and one line (``sources.list``, ``*.list``).  The
mirror is taken verbatim, so a local mirror or a ``mirror+file:`` list keeps working, and no host
name needs to be written down here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lib.layout import BedError

DEBIAN_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


@dataclass(frozen=True)
class Source:
    """One archive: where it is, which suite and components, and the keyring that it names."""

    uri: str
    suite: str
    components: tuple[str, ...]
    signed_by: str | None = None


def parse_deb822(text: str) -> Iterator[Source]:
    """Sources of a ``*.sources`` file; disabled stanzas and inline keys yield what apt would."""
    for stanza in re.split(r"\n[ \t]*\n", text):
        fields = stanza_fields(stanza)
        if "deb" not in fields.get("types", "").split():
            continue
        if fields.get("enabled", "yes").lower() in {"no", "false", "0", "off", "without"}:
            continue
        signed_by = fields.get("signed-by") or None
        for uri in fields.get("uris", "").split():
            for suite in fields.get("suites", "").split():
                yield Source(uri, suite, tuple(fields.get("components", "").split()), signed_by)


def stanza_fields(stanza: str) -> dict[str, str]:
    """Fields of a control stanza (deb822(5)) by lower-case name; continuation lines joined."""
    fields: dict[str, str] = {}
    name = ""
    for line in stanza.splitlines():
        if line.startswith("#") or not line.strip():
            continue
        if line[0] in " \t":
            if name:
                fields[name] += "\n" + line.strip()
            continue
        name, _, value = line.partition(":")
        name = name.strip().lower()
        fields[name] = value.strip()
    return fields


_ONE_LINE = re.compile(r"deb\s+(?:\[(?P<options>[^\]]*)\]\s+)?(?P<uri>\S+)\s+(?P<rest>.+)")


def parse_one_line(text: str) -> Iterator[Source]:
    """Sources of a ``sources.list``."""
    for line in text.splitlines():
        match = _ONE_LINE.fullmatch(line.partition("#")[0].strip())
        if match is None:
            continue
        options = dict(
            option.split("=", 1) for option in (match["options"] or "").split() if "=" in option
        )
        suite, *components = match["rest"].split()
        yield Source(match["uri"], suite, tuple(components), options.get("signed-by"))


def choose_mirror(sources: Iterable[Source], codename: str) -> str:
    """The mirror that carries Debian itself.

    Others may offer a suite of the same name; Debian's is the one signed by Debian's keyring, else
    the one whose path says ``debian``.  A wrong guess is harmless: apt refuses what that keyring
    did not sign.

    :raises BedError: the machine has no Debian source.
    """
    suites = {codename, "stable", "oldstable", "testing"}
    candidates = [
        source
        for source in sources
        if source.suite in suites
        and "main" in source.components
        and not source.uri.startswith("cdrom:")
    ]
    if not candidates:
        raise BedError(
            f"cannot find a Debian mirror: no apt source of this machine offers {codename} main;"
            " add one to /etc/apt/sources.list.d"
        )
    return max(candidates, key=_likeness_to_debian).uri


def _likeness_to_debian(source: Source) -> tuple[bool, bool]:
    return (source.signed_by == DEBIAN_KEYRING, source.uri.rstrip("/").endswith("/debian"))


def machine_sources(etc_apt: Path = Path("/etc/apt")) -> list[Source]:
    """Every source of this machine."""
    sources: list[Source] = []
    for path in [etc_apt / "sources.list", *sorted((etc_apt / "sources.list.d").glob("*"))]:
        if not path.is_file():
            continue
        if path.suffix == ".list":
            sources += parse_one_line(path.read_text())
        elif path.suffix == ".sources":
            sources += parse_deb822(path.read_text())
    return sources
