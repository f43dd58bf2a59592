"""Profiler traces of training steps: `stepmark trace`.

- trace_options.py, trace_files.py: options; traces of one job.
- step_groups.py: steps whose durations fall in two groups.
- kineto/: read a trace into columns and attribute its time.
- trace_cache.py: columns of large traces, kept for the next question.
- trace.py, trace_breakdown.py, trace_page.py: `breakdown`, its text and its page.
- trace_kernels_verb.py, trace_kernels_text.py, trace_comparison.py: `kernels` and `compare`.
- trace_messages_verb.py, trace_messages_text.py: `messages`.
- trace_path_verb.py, trace_path_text.py: `critical-path`.
- trace_workload.py: a step as a workload; traces for other tools.
"""
