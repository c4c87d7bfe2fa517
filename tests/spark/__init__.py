"""Stages on Spark: real sessions, a real cluster, real Connect servers."""
