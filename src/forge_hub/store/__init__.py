"""What the hub remembers: one relational database, SQLite or PostgreSQL (B-95).

``database`` owns the engine and its transactions, ``tables`` the schema, ``migrations`` its
history; each other module holds the statements of one subject.  They take the connection of a
running transaction, so that a caller decides what happens together.  State changes are
conditional updates ("… where state = 'offered'") that say whether they won, so correctness rests
on the database and not on a lock of this process.

Never in here: a lease key, a token, a secret.
"""
