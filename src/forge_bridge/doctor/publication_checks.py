"""Whether results can be pushed from here, by trying this host's Git (B-37, B-51, B-62)."""

from __future__ import annotations

from pathlib import Path

from forge_bridge.doctor.policy_checks import PUBLICATION
from forge_bridge.doctor.proofs import Proofs
from forge_bridge.repositories import list_repositories
from forge_core.errors import ForgeError
from forge_core.wire.codes import PublicationMode
from forge_edges.durable_file import on_disk
from forge_edges.git_push import git_version, missing_for_push


async def prove_publication(mode: PublicationMode, state_root: Path) -> Proofs:
    """What a push needs besides a remote and a credential; raises nothing that is expected."""
    if mode is not PublicationMode.BRIDGE_PUSH:
        return Proofs()
    try:
        version, missing = await git_version(), await missing_for_push()
    except ForgeError as error:
        return Proofs.ended_by(error, PUBLICATION.id)
    if missing is not None:
        return Proofs(failed={PUBLICATION.id: f"{version or 'Git'}: {missing}"})
    able = f"{version} takes a credential from its environment and speaks https"
    return Proofs(shown={PUBLICATION.id: f"{able}; {await _remotes(state_root)}"})


async def _remotes(state_root: Path) -> str:
    try:
        known = await on_disk(list_repositories, state_root)
    except ForgeError as error:
        return str(error)
    without = sorted(name for name, entry in known.items() if entry.remote is None)
    if not without:
        return f"{len(known)} repositories have a remote"
    named = ", ".join(without[:10]) + (", …" if len(without) > 10 else "")
    return f"no remote is recorded for {named} (forge-bridge add-repo NAME PATH --remote URL)"
