"""Replays of workloads on real ranks: `stepmark replay`.

- replay_options.py, replay_verb.py: options and the verb.
- replay_compute.py: what runs in the place of computation.
- bench/: the engines that run a rank's program, with torch.
- workload_fill.py: times of a workload's computation.
- replay_log_verb.py, replay_log_text.py, replay_rows.py: what a replay measured.
- replay_columns.py, replay_page.py: its columns and its page.
"""
