"""Runs, plans and sweeps on disk.

- codec.py: records and runs to JSON and back.
- runs.py, plans.py, sweeps.py: a run's folder; its plan; the folder of a sweep.
- ledgers.py, predictions.py: ledgers of measured steps; predictions written before measuring.
- reader.py: the only reader of runs. query.py: SQL over all of them.
- commands.py, view.py: the command of a case; a run with all that its rows need.
- run_export.py: a run's rows to a file or a tracker.
"""
