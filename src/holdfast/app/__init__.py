"""The public API: App, World, Event, on, effect, task, and the runtime that runs them."""
