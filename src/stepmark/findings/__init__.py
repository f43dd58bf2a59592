"""What is wrong with a job, with the lines that prove it; messages by size.

- finding.py: a finding and its evidence.
- wait_graph.py: which rank waits in which call, and for whom, by what each source knows.
- disagreement.py: calls that must agree between ranks and do not.
- stalls.py: why ranks do not go on: a missing rank, a deadlock, calls that differ.
- log_facts.py: facts of a debug log, each with the lines that state it.
- expected.py: expected times of messages.
- histogram.py, histogram_figures.py: messages by size as rows and text, and as figures.
"""
