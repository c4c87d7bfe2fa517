"""Outputs of a stage and the spool: files, objects and tables. No test needs a JVM."""
