"""Metrics of a store and of a worker process, in the text format of Prometheus."""
