"""Roles: what a process does. Each has the same shape: `tick` once, or `run` until told to stop."""
