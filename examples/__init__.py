"""Examples: one directory each. `holdfast demo` runs `demo`. The other directories have a README."""
