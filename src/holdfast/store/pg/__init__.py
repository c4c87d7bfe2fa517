"""The parts of the PostgreSQL store: rows and statements, the commit, topics."""
