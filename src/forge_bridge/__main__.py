"""``python -m forge_bridge``."""

from forge_bridge.cli import main

if __name__ == "__main__":
    main()
