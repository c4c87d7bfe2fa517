"""Jobs: actions of an operator on a selection of subjects, run by a server in bounded commits (batch operations)."""
