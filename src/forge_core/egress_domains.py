"""Entries of an egress allowlist (sandbox.md, Network; B-54)."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Annotated, Final

import idna
from pydantic import AfterValidator, Field

MAX_DOMAIN_CHARACTERS: Final = 253
"""RFC 1035, 2.3.4, without the root's dot."""

NEVER_PUBLIC: Final = ("internal", "local", "localhost")
"""RFC 6761, RFC 6762, and what ICANN reserved for private use in 2024."""

_NEVER_PUBLIC: Final = "|".join(NEVER_PUBLIC)

_OUTER: Final = r"[^\x00-\x2f\x3a-\x60\x7b-\x7f]"
_INNER: Final = r"[^\x00-\x2c\x2e\x2f\x3a-\x60\x7b-\x7f]"
_LABEL: Final = rf"{_OUTER}(?:{_INNER}*{_OUTER})?"
DOMAIN_PATTERN: Final = (
    rf"^(?!.*\.(?:{_NEVER_PUBLIC}|[0-9]+|0x[0-9a-f]*)$)(?!(?:.*\.)?[^.]{{64}})(?![^.].{{253}})"
    rf"\.?(?:{_LABEL}\.)+{_LABEL}$"
)
"""Lets through whatever :func:`egress_domain` does, and a little more: it knows nothing of IDNA.
The same to Python and to ECMA 262."""

_REFUSED_FORMS: Final = (
    (re.compile(r"://"), "it is a URL; write the name of the host alone"),
    (re.compile(r"@"), "it has a user before the name; write the name of the host alone"),
    (re.compile(r"\[|:.*:"), "it is an IPv6 address; name the host"),
    (re.compile(r":"), "it has a port; every name is reached on 80 and 443 alone"),
    (re.compile(r"/"), "it has a path; write the name of the host alone"),
    (re.compile(r"\*"), "it has a wildcard; .example.org is a domain and all below it"),
    (
        re.compile(r"(?:^|\.)(?:[0-9]+|0x[0-9a-f]*)\.?\Z", re.IGNORECASE),
        "it is an IP address; name the host",
    ),
    (re.compile(r"\.\Z"), "it ends with a dot; leave that out"),
    (re.compile(r"[A-Z]"), "it has capitals; write it in lower case"),
    (re.compile(rf"(?:^|\.)(?:{_NEVER_PUBLIC})\Z"), "it is never a public name"),
    (re.compile(r"^\.?[^.]*\Z"), "it has one label only; a whole top-level domain is too much"),
)


def egress_domain(entry: str) -> str:
    """``entry`` as the proxy takes it: ASCII; with a dot in front, all names below count too.

    A name in another script is taken when IDNA turns it into ASCII and back into itself
    (RFC 5891, 4 and 5; no mapping), so that what was read by people is what is reached.

    :param entry: ``example.org``, that host alone; ``.example.org``, that and all below it.
    :raises ValueError: anything else; the text says what it is and what to write.
    """
    for form, why in _REFUSED_FORMS:
        if form.search(entry):
            raise ValueError(why)
    dot, name = ("." if entry.startswith(".") else ""), entry.removeprefix(".")
    if len(name) > MAX_DOMAIN_CHARACTERS:
        raise ValueError(f"it has more than {MAX_DOMAIN_CHARACTERS} characters")
    try:
        return dot + idna.encode(name, strict=True, std3_rules=True).decode("ascii")
    except idna.IDNAError as error:
        raise ValueError(f"it is no domain name: {error}") from None


Domain = Annotated[
    str,
    Field(max_length=MAX_DOMAIN_CHARACTERS + 1),
    AfterValidator(egress_domain),
    Field(json_schema_extra={"pattern": DOMAIN_PATTERN}),
]
"""An entry as contracts and starts carry it, taken by :func:`egress_domain`."""


def covers(entries: Collection[str], wanted: str) -> bool:
    """Whether whatever ``wanted`` lets through, ``entries`` let through too.

    :param entries: as :func:`egress_domain` returns them; likewise ``wanted``.
    """
    name = wanted.removeprefix(".")
    if wanted in entries or f".{name}" in entries:
        return True
    labels = name.split(".")
    return any(f".{'.'.join(labels[n:])}" in entries for n in range(1, len(labels)))


def without_covered(entries: Iterable[str]) -> tuple[str, ...]:
    """The same names with as few entries as possible, sorted; Squid takes no others.

    :param entries: as :func:`egress_domain` returns them.
    """
    every = frozenset(entries)
    return tuple(sorted(one for one in every if not covers(every - {one}, one)))
