"""``python -m forge_hub``."""

from forge_hub.cli import main

main()
