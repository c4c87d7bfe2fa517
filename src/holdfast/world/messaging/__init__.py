"""Messages between worlds: sending, the outbox, delivery at the destination."""
