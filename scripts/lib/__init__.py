"""Standard-library code behind the executables in ``scripts/``."""
