"""What every folder may use: units, errors, options, statistics, files.

- units.py, dtypes.py: parse and format numbers; element types.
- errors.py: exceptions that a user can see.
- options.py, option_groups.py: options of a verb as dataclasses; groups that verbs share.
- option_grid.py: options with lists of values, and their combinations.
- stats.py, fit.py: order statistics of samples; latency and bandwidth from times.
- launches.py, variance.py, spread.py, ratio.py, verdicts.py: from launches to verdicts.
- packages.py, package_data.py: packages that a plain install leaves out; its own data.
- redaction.py: remove secrets from what is stored or printed.
- files.py, read_text.py, json_text.py, reading.py: write files, read text, JSON and tables.
- grouping.py: items by a key.
- host_names.py: names of hosts, with ranges.
- processes.py, signals.py, outer_launcher.py: processes, Ctrl-C, torchrun and srun.
- workers.py: work in several processes of the program.
- streams.py: standard streams that are closed, full or broken.
- waiting.py, garbage.py: progress on stderr; no search for reference cycles while much is read.
"""
