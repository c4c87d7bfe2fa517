"""Store operations for operators: the world operations of document 004, queries, verification and repair."""
