"""Task workers: leases, executors, attempts and isolated processes."""
