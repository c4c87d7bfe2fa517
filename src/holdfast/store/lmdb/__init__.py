"""The embedded store: LMDB files, a redo log and one writer process."""
