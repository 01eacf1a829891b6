"""Attempts on the host itself, where both sides have agreed to it (B-53).

The agent, its deadlines, its output and its cleanup are those of :mod:`forge_bridge.sandbox`; what
is different is the place: a directory and processes of the service account in place of containers,
and no wall around them (docs/explanation/threat-model.md).
"""
