"""The gate tools that the settings name (B-30, B-31)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from forge_bridge.images.gates import GateTools
from forge_bridge.settings import BridgeSettings
from forge_edges.cosign import CosignVerifier
from forge_edges.docker_context import DockerEndpoint
from forge_edges.durable_file import on_disk
from forge_edges.gate_tools import ToolSetting, tool_environment
from forge_edges.scanners import bill_scanner, vulnerability_scanner
from forge_edges.signing_key import load_signing_key, load_verifier_key


async def open_gate_tools(
    settings: BridgeSettings,
    endpoint: DockerEndpoint,
    environ: Mapping[str, str],
    scratch: Path,
) -> GateTools:
    """Read the keys and set the tools up; none of them is run yet.

    :param endpoint: of the engine whose images are looked into.
    :param environ: the bridge's own; the tools see little of it.
    :param scratch: a directory of ours, made when it is missing; swept by whoever owns it.
    :raises RefusedError: code ``configuration``: a key cannot be used.
    """
    asking_engine = ToolSetting(tool_environment(environ, endpoint), scratch)
    asking_registry = ToolSetting(tool_environment(environ), scratch)
    signatures = bill = vulnerabilities = signing_key = None
    if settings.sandbox_signature_executable and settings.sandbox_signature_public_key:
        key = await on_disk(load_verifier_key, settings.sandbox_signature_public_key)
        signatures = CosignVerifier(settings.sandbox_signature_executable, key, asking_registry)
    if settings.sandbox_sbom_executable:
        bill = bill_scanner(settings.sandbox_sbom_executable, asking_engine)
    if settings.sandbox_vulnerability_executable:
        vulnerabilities = vulnerability_scanner(
            settings.sandbox_vulnerability_executable, asking_engine
        )
    if settings.sandbox_provenance_signing_key:
        signing_key = await on_disk(load_signing_key, settings.sandbox_provenance_signing_key)
    return GateTools(
        signatures=signatures,
        bill=bill,
        vulnerabilities=vulnerabilities,
        signing_key=signing_key,
        policy_file=settings.sandbox_image_policy_file,
    )
