"""Collectives between ranks: `stepmark comm`.

- comm_options.py, comm_plan.py, comm_workload.py: options, and the cases that follow from them.
- comm.py: the verb.
- bench/: communicators, data, timing, with torch and NCCL.
- comm_columns.py, comm_remarks.py, comm_figures.py: rows and what they show.
- nccl_tests.py, peer_formats.py: the forms of nccl-tests and PARAM.
- measured_curves.py, network_fit.py: times by size, and a network's constants from them.
- judgement.py, table_curve.py, reference_ranges.py: whether a table of results is normal.
"""
