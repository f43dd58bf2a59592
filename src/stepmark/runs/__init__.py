"""The main job and earlier runs: `stepmark run`, `runs` and `report`.

- run_options.py, run.py: calibrate, predict, measure. dry_run.py, op_table.py: print a plan.
- op_run.py: what is shown of a run of operators.
- step_report.py, step_ledger.py, suggestions.py: the predicted step beside the measured one.
- first_screen.py, summary.py: the end of a run on a terminal.
- runs_options.py, runs.py, run_page.py: list, show, export and query; the page of a run.
"""
