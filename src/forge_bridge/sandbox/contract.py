"""The project's contract, wherever its attempt runs (B-41, B-52)."""

from __future__ import annotations

from forge_bridge.images.recipe import Approved, approved_contract
from forge_bridge.sandbox.stage import StageContext
from forge_core.contract import CONTRACT_PATH, MAX_CONTRACT_BYTES
from forge_core.contract_grants import require_granted
from forge_core.errors import RefusedError
from forge_core.wire.codes import EventType, WarningCode
from forge_core.wire.events import Warning_


async def adopt_contract(context: StageContext) -> Approved | None:
    """Read the contract that counts, and hold it against what the hub grants.

    :raises RefusedError: ``contract_invalid``: it cannot be read, or asks for more.
    """
    approved = await _approved(context)
    if approved is not None:
        start = context.start
        require_granted(
            approved.contract,
            network=start.network,
            services=start.services,
            secrets=context.secrets,
        )
        context.contract = approved.contract
    return approved


async def _approved(context: StageContext) -> Approved | None:
    """That of the approved commit, and of no other (B-52)."""
    git, start = context.runner.git, context.start
    if start.approved_commit is None:
        await _warn_of_contract(context)
        return None
    if start.approved_commit != start.input_commit:
        await git.ensure_commit(start.repository, start.approved_commit)
    return await approved_contract(git, start.repository, start.approved_commit)


async def _warn_of_contract(context: StageContext) -> None:
    """Whoever wrote one will wonder why it has no effect."""
    git, start = context.runner.git, context.start
    try:
        found = await git.read_file(
            start.repository, start.input_commit, CONTRACT_PATH, MAX_CONTRACT_BYTES
        )
    except RefusedError:
        return
    if found is not None:
        detail = f"{CONTRACT_PATH} has no say: the hub names no approved commit"
        warning = Warning_(code=WarningCode.CONTRACT_NOT_APPROVED, detail=detail)
        await context.tell(EventType.WARNING, warning)
