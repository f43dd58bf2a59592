"""Check this machine and all hosts of a job: `stepmark doctor`.

- node_options.py, doctor.py, bench_doctor.py: the verb; what can be measured here.
- node_check_verb.py, device_check.py, bench_node_check.py: each device in its process.
- node_check.py, node_verdict.py: results and their files, and the verdict on them.
"""
