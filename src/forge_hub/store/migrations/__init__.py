"""The history of the schema; run at start by :func:`forge_hub.store.database.migrate`."""
