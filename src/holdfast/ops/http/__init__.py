"""The HTTP server: `server` listens, `connection` carries requests, `tasks` serves them."""
