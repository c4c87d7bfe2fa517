"""Delivery of messages between universes and stores."""
