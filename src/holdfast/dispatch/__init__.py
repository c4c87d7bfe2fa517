"""Dispatch: prompts to terminal panes, their log and their outcomes (document 000)."""
