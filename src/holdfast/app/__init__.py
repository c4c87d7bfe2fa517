"""What users import: App, World, Event, on, effect, and the runtime that runs them."""
