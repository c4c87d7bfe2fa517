"""Leadership of a universe: its leader, its workers, and its readiness (document 000).

leader_lease         the leader lease and its logged commands
leader_lease_state   the leader lease as a value: transition table and fold of events
worker_registry      live workers and their roles
declarations         the world types and causes that the code of workers declares
placement            assignment of worlds to workers
readiness            whether the universe can serve, with all blockers

The package `dispatch` has the prompts to tmux panes.
"""
