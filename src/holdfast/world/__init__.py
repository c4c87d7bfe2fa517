"""Worlds: durable, event-sourced objects with deterministic reducers (document 004)."""
