"""The cases of blocker codes. A case is a generator: it causes the condition of its code, yields the subject, then
mends it. All cases run on a memory store with simulated time."""

from __future__ import annotations
