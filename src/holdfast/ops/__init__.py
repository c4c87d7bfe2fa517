"""Operate a store from outside: the operations of document 004, what there is, and verification."""
