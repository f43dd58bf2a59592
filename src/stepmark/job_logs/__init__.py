"""Logs and dumps of jobs: `stepmark logs` says what hangs or fails, and why.

- log_options.py, logs.py, log_sources.py: the verb, and its files sorted by content.
- answers.py, endings.py: failed, finished or unknown; lines that show an end.
- nccl_log/: debug logs of NCCL and RCCL.
- flight_recorder/: dumps of torch's flight recorder.
- job_output/, failures.py: tracebacks, time-outs, signals; the meaning of each.
- training_log/: steps that trainers print: time, outliers, trend, throughput.
- inspector.py, ras_report.py: lines of NCCL's inspector, reports of its RAS subsystem.
- reports.py: what reports of RAS and of torch's analyzer of dumps show of the ranks.
- job_stalls.py: why ranks do not go on, by all files of a job together.
- log_summary.py: facts and findings as lines and rows.
"""
