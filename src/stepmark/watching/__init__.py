"""Watch a user's own job, unmodified: `stepmark watch`.

- watch_options.py, watch.py: options and the verb.
- watch_site/: what Python processes of the job import.
- output_copy.py: a copy of the output of the job, which reaches its reader unchanged.
- watch_cost.py: step times without and with the profiler.
"""
