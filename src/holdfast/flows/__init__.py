"""Flows: durable functions. A flow is an `async def` function whose steps are recorded (workflow)."""
