"""Projects: the sandbox policy that their owners decide on (B-20, B-52, B-53)."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path
from sqlalchemy import Connection, RowMapping

from forge_core.errors import RefusedError
from forge_hub.api.context import AuthorizedBoard
from forge_hub.api.models import SandboxPolicyRequest, SandboxPolicyView
from forge_hub.sandbox_policy import SandboxPolicy
from forge_hub.store import projects

ProjectId = Annotated[str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,127}$")]
"""As ids are on the wire."""

router = APIRouter(prefix="/api/v1/projects", tags=["projects"])


@router.put("/{project_id}/sandbox-policy")
async def save_sandbox_policy(
    board: AuthorizedBoard, project_id: ProjectId, request: SandboxPolicyRequest
) -> SandboxPolicyView:
    """Decide what every session of the project must keep, and whether it may fall back to a host.

    What is left out is taken back: a permission to fall back does not outlive a policy without it.
    """
    policy, now = SandboxPolicy.model_validate(request.model_dump()), board.clock.utc()
    policy.require_sound(now)

    def keep(connection: Connection) -> RowMapping:
        projects.save(connection, project_id, policy, now=now)
        return _find(connection, project_id)

    row = await board.database.write(keep)
    board.alarm.ring()
    return SandboxPolicyView.model_validate(dict(row))


@router.get("/{project_id}/sandbox-policy")
async def read_sandbox_policy(board: AuthorizedBoard, project_id: ProjectId) -> SandboxPolicyView:
    """What was decided."""
    row = await board.database.read(lambda connection: _find(connection, project_id))
    return SandboxPolicyView.model_validate(dict(row))


def _find(connection: Connection, project_id: str) -> RowMapping:
    row = projects.find(connection, project_id)
    if row is None:
        raise RefusedError(
            f"cannot read the sandbox policy of project {project_id}: none was saved",
            code="unknown_project",
        )
    return row
