"""Workers: the services that a process runs. Each has `tick` (one bounded step) and `run` (until
stopped).
"""
