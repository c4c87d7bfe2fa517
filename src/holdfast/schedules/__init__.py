"""Schedules: tasks and flows that start at the times of a cron rule."""
