"""A whole runner in virtual time: docs/explanation/simulation.md says what is simulated and how."""
