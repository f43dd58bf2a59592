"""Logs of trainers: the time of a step, its outliers and trend, throughput, loss, memory.

- log_formats.py: what each trainer prints, one entry per format.
- step_lines.py, starts.py, training_log.py: the steps and the facts of a file, by starts.
- steady_state.py: warm-up, median, outliers, trend.
- training_flops.py: FLOP/s and MFU of a known model.
- training_log_text.py, training_log_figures.py: the answer, tables, findings; figures.
"""
