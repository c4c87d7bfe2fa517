"""Tasks: a task queue that records every decision in one write-ahead log (document 003)."""
