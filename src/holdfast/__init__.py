"""Holdfast: a durable runtime for work that must happen once."""

__version__ = "0.1.0"
