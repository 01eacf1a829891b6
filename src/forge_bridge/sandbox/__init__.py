"""The stages of an attempt, in the order in which ``flows/start.py`` runs them.

``prepare`` (secrets, the commit) → ``image`` → ``workspace`` → ``agent`` → ``output`` →
``publish``.  What a stage creates is an intent in the ledger before the engine is asked and a
fact after; undoing is ``flows/teardown.py``'s, from the ledger and the engine's own list, never
from memory.
"""
