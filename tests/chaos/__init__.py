"""External faults under load: servers, connections and network links that fail while processes work."""
