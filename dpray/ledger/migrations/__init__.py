"""The ledger's tables from one revision to the next, as Alembic runs them (`ledger_schema`)."""
