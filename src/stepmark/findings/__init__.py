"""What is wrong with a job, with the lines that prove it; messages by size.

- finding.py: a finding and its evidence.
- log_facts.py: facts of a debug log, each with the lines that state it.
- expected.py: expected times of messages.
- histogram.py, histogram_figures.py: messages by size as rows and text, and as figures.
"""
