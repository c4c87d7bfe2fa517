"""The dispatcher: abandons stale dispatch requests and notifies the leader's pane."""
