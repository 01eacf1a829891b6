"""What a project's Dockerfile would fetch, said before anything is built (B-31, B-52)."""

from forge_core.dockerfile.analysis import DockerfileAnalysis, analyse_dockerfile

__all__ = ["DockerfileAnalysis", "analyse_dockerfile"]
