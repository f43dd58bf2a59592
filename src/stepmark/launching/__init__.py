"""Start a verb on several hosts: `stepmark launch`.

- launch_options.py, launch.py: options and the verb.
- scripts.py: texts that start one process per host or per rank.
- steps.py: what these texts run: one verb, or the steps of a node check.
- slurm.py: submits a script and follows its job.
"""
