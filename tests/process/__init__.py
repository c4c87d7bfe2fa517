"""Tests with real processes on one embedded store: kills, stops, disconnections and damaged files."""
