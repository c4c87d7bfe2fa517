"""The HTTP server: `server` accepts connections, `connection` reads requests, `task_routes` handles them."""
