"""How Alembic reaches the database: on the connection that it is handed, or as SQL text."""

from __future__ import annotations

from alembic import context

from forge_hub.store.tables import metadata

if context.is_offline_mode():
    context.configure(
        dialect_name=context.config.get_main_option("forge_dialect"),
        target_metadata=metadata,
        literal_binds=True,
    )
else:
    context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
with context.begin_transaction():
    context.run_migrations()
