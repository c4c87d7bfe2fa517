"""Rows of a stage: input, calls, results and figures. No test needs a JVM."""
