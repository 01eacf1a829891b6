"""Raises the version by one and notes it in the change log."""

from pathlib import Path

version_file, log = Path("VERSION"), Path("CHANGES.md")
version = int(version_file.read_text()) + 1
version_file.write_text(f"{version}\n")
log.write_text(f"## {version}\n\n- released from a sandbox\n\n{log.read_text()}")
print(f"released version {version}")
