"""The ledger service of a stage and its clients: protocol, requests, children. No test needs a JVM."""
