"""Nouns that survive a crash: lease, journal, inbox, queue, dedupe, snapshot.

Each module owns one key space and is functions over a transaction. What many contend for (grants,
claims, deliveries) is an operation, run where commits are applied; what one holder does under its
lease (append, advance, save) is a plain function, so that all of it fits into one transaction.
"""
