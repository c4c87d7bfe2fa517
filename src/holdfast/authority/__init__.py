"""Who leads a universe, whom it may lead, and whether it can serve (document 000).

lease authority                 who leads: the lease as a value, and its commands
workers placement               whom it may lead, and who shall host what
outcome dispatch dispatch_log   prompts to panes: tables, values, and the log of them
panes replay                    where the leader sits, and how far it was told of them
dispatch_recount                what that log keeps, made again and compared
readiness                       whether it can serve, or exactly why not
"""
