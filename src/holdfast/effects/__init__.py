"""Limits of effects that hold across worker pools: budgets and rates."""
