"""Operators on one device: `stepmark op`.

- op_options.py, op_plan.py: options, and the cases that follow from them.
- op.py: the verb.
- custom_op.py: what a user's own function returns.
- bench/: implementations and their timing, with torch.
- op_columns.py, op_printing.py, op_figures.py: rows, how they are printed, figures.
- styles.py: the columns of other benchmarks.
"""
