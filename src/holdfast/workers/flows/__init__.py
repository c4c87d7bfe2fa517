"""The execution of flows in a worker process."""
