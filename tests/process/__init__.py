"""Real processes on one embedded store: killed, stopped, cut off, and given bad files."""
