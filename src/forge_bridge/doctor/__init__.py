"""Preflight: what this host can really contain, by evidence from a running probe container.

``forge sandbox doctor``, the advertisement to the hub and admission read the same findings, so
that there is one truth (sandbox.md, *Preflight*).
"""

from forge_bridge.doctor.checks import Preflight, run_checks
from forge_bridge.doctor.from_settings import preflight, read_hardening
from forge_bridge.doctor.preflight_settings import PreflightSettings
from forge_bridge.doctor.results import CheckResult, Verdict, exit_code

__all__ = [
    "CheckResult",
    "Preflight",
    "PreflightSettings",
    "Verdict",
    "exit_code",
    "preflight",
    "read_hardening",
    "run_checks",
]
