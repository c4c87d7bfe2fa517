"""Durable data structures: lease, journal, inbox, queue, dedupe, snapshot.

Each module owns one key space and consists of functions over a transaction. Contended actions (grants,
claims, deliveries) are operations, which the writer runs when it applies a commit. Actions of a single
lease holder (append, advance, save) are plain functions, so that one transaction can contain them all.
"""
