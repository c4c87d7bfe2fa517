"""The simulator's oracle: checkers, models, planted bugs and workloads. `python -m tests.simulation` runs it.

workloads         the actors: hosts, producers, workers, runners, ledger services and their tasks,
                  task submitters and workers, operators, the fault injector
colocated_process several services in one process with its threads, for fused commits
external_service  what the effects of simulated worlds call, and how it fails
ledger_process    a process of the ledger service: the shipped core and log, and its connections
sample_app        the application of the simulated worlds;  model_app: its independent model
checkers          one per line of INVARIANTS.md;  model_*: expected state, check_*: comparison
seed_run          runs a seed and checks it;  crash_points: every single crash point of a scenario
mutants           planted bugs that the checkers must catch;  source_edits: how they are planted
command           `holdfast sim`
"""
