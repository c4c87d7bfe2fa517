"""The simulator: the product's own code under a seeded scheduler, simulated clocks and faults.

tape         every random decision, recorded, replayed, shrunk
scheduler    one actor at a time, chosen by the tape
store        the real engine on real rows, and every way it can fail its callers
postgres     the engine of PostgreSQL in the same place;  outcomes: what it is asked for and does not keep
workloads    the actors: hosts, producers, workers, runners, ledger services and their tasks, submitters and
             workers of tasks, operators, fate
processes    the product's roles under the scheduler: world workers, orchestrators, pools, timers
household    several of them in one process, threads and all: what is done or due goes on in one commit
outside      what effects of simulated worlds find, and how it fails;  inplace: effects without threads
ledger_process a process of the ledger service: its shipped core and log, and lines to it
world_app    what the simulated worlds do;  check_app: the same, stated once more
history      what happened;  audit: what the rows say, decoded independently
checkers     one per line of INVARIANTS.md;  model_*: what should be, check_*: what is
run          a seed → its verdict;  exhaustive: every single crash point of a small scenario
mutants      planted bugs that the checkers must catch;  edits: how they are planted
session      a simulation that a user drives (`hf.simulate`);  stand_ins: its effects;  parity: its verdict
command      `holdfast sim`
"""
