"""The demo: `holdfast demo` or `make demo`. It runs from a checkout of the repository.

command            the demo: its parts in order, its claims and its output
orders             part 1: the work;  worker, worker_processes: its workers
accounts_part      part 2: worlds that pay each other;  bank: the application
spark_part         part 3: a Spark job that pays per row;  labels: its processes
agent_part         part 4: the agent of `examples/agent`
tasks_part         part 5: tasks;  print_app: the application
child_process      what all child processes share;  up_process: `holdfast up`
"""
