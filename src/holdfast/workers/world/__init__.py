"""World workers: host worlds, run their cycles, fuse commits with co-located workers."""
