"""Cases, plans and records: what is measured, and what came out.

- fields.py: what all readers of cases know of a field, declared once.
- case.py, comm_case.py, train_case.py, replay_case.py: one measurement each, by its identity.
- training.py, train_words.py, recompute.py, flops.py: techniques of training, and FLOPs.
- split_backward.py: what a backward pass in two parts is refused with.
- plan.py: the cases of a run in order. record.py: the outcome of a case.
- kind.py: what a feature does with its cases.
- sweep.py: settings of a sweep, and the outcome of each try.
- message.py, comm_curve.py: histograms of messages; times of a collective by size.
"""
