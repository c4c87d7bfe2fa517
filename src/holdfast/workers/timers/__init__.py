"""The timer worker: delivers due timers to their worlds."""
