"""Who leads a universe, whom it may lead, and whether it can serve (document 000)."""
