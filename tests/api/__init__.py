"""Tests of the endpoints under `/v1`, called without a server."""
