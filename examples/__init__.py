"""Examples: one directory each. `demo` is what `holdfast demo` runs, the others have a README."""
