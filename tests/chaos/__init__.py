"""Faults from outside, under load: servers, connections and links that fail while separate processes work."""
