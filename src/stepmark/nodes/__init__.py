"""Check this machine and all hosts of a job: `stepmark doctor`.

- node_options.py, doctor.py: the verb.
- doctor_findings.py, bench_doctor.py: what can be measured here, without and with torch.
- node_check_verb.py, device_check.py, bench_node_check.py: each device in its process.
- node_check.py, node_verdict.py: results and their files, and the verdict on them.
"""
