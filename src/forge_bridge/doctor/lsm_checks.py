"""Whether the kernel enforces SELinux: a label in a container does not say so (B-35, B-51)."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import anyio

from forge_bridge.doctor.proofs import Proofs
from forge_core.blockers import Blocker

ENFORCE: Final = Path("/sys/fs/selinux/enforce")
"""``1`` or ``0`` (selinux(8)); of this host, so that an engine elsewhere shows nothing."""


async def prove_enforcing(lsm_security_opt: str | None, enforce: Path = ENFORCE) -> Proofs:
    """Evidence that configured SELinux labels confine anything.

    AppArmor needs none: inside, its profile's name says whether it is enforced.
    """
    if lsm_security_opt is None or not lsm_security_opt.startswith("label"):
        return Proofs()
    try:
        mode = (await anyio.Path(enforce).read_text("ascii")).strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        return Proofs(failed={Blocker.LSM: f"cannot read {enforce} on this host: {why}"})
    if mode != "1":
        return Proofs(failed={Blocker.LSM: f"{enforce} is {mode[:16]!r}: SELinux only reports"})
    return Proofs(shown={Blocker.LSM: f"{enforce} is 1"})
