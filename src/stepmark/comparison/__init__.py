"""Compare runs, accept machines, race settings: `compare`, `check`, `sweep`.

- compare_options.py, check_options.py, sweep_options.py: options.
- comparison.py: measurements of several sources, side by side.
- series.py, launch_noise.py, compare.py: from records and tables to verdicts.
- compare_verb.py, comparison_text.py, comparison_page.py: `compare` and what it shows.
- acceptance.py, check.py: `check`, which accepts a machine.
- sweep.py, sweep_run.py, sweep_race.py, racing.py, sweep_budget.py, sweep_results.py: `sweep`.
- recommendation.py: a setting by size. tuner_verb.py, tuner_text.py: NCCL's tuner file.
"""
