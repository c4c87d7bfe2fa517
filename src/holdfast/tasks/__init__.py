"""Tasks: a coordinator whose every decision is in one log (document 003)."""
