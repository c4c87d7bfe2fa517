"""The PostgreSQL store: statements and rows, local cache, commit, notifications."""
