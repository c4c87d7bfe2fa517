"""Blockers: why a subject does not move. `explain` has the one implementation of `why` for every kind of subject."""
