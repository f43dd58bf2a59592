"""Where the time of a step goes: ledgers, breakdowns and timelines.

- ledger.py: lines in integer ns that add up to the step.
- ledger_text.py, ledger_rows.py, ledger_svg.py: a ledger as text, as few rows, as a picture.
- step_sentence.py: a measured step in one sentence.
- step_cost.py, timeline.py: costs of the parts of a step; what runs in it, and when.
- bars.py: a timeline as few bars.
- trace_columns.py, trace_breakdown.py, critical_path.py: a profiled step.
"""
