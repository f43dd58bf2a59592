"""Measure a plan: start ranks, watch them, time calls, store records.

- measure.py: from a plan to a run directory, ranks, and what they recorded.
- machine.py, delivery.py, progress.py: the device; the end of a verb; the sink of a run.
- supervise.py: detect hangs and deaths, kill ranks, continue with new ones.
- workers.py, local_ranks.py, leader.py, agent.py, channel.py: ranks of this host and of others.
- job.py: the hosts of a job. child.py: commands and their end.
- rank.py: one rank of a run. heartbeat.py: its hang guard.
- ranks.py, run_cases.py, context.py: agreement between ranks; the cases of a plan, one by one.
- clock.py, verify.py: timers and the rule that ends sampling; results against a reference.
- host.py, telemetry.py, nvidia.py, amd.py, environment.py: facts of the machine.
"""
