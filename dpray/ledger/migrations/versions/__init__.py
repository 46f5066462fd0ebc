"""A file for each revision. One that a ledger may have run is never changed."""
