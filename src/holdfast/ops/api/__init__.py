"""The HTTP API under `/v1`: endpoints as data, one module for each kind of subject. `endpoint` has the interface."""
