"""Generate, read, show and convert workloads of training steps.

- workload.py, workload_options.py, workload_flags.py: the verb and its options.
- configured.py: options that a framework's file gives, and those that describe a workload.
- workload_model.py, models.py, user_function.py: the model that is named.
- job.py, rules/: a training job; the rules of each framework.
- architecture.py, published.py, datasets.py: models that are no decoders.
- messages.py, operators.py, pipeline.py: parts that rules share.
- formats/, workload_files.py: formats of files; from files and to files.
- fold.py, shrink.py: find repeats; a workload on fewer ranks.
- durations.py, workload_times.py, file_times.py: times of computation.
- workload_show.py, workload_tables.py, workload_text.py, workload_page.py: what is shown.
- workload_pipeline.py: stages over time.
"""
