"""Effect workers: admission, the call, its receipt and its cost."""
