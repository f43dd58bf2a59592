"""Training steps on ranks, with torch: `stepmark train`.

- train_options.py, train_plan.py, train_refusals.py, model_refusals.py: options, cases,
  and what cannot run.
- framework_options.py, framework_table.py: a framework's file as options of a step.
- remedies.py: options with which a step fits in memory.
- train.py: the verb.
- transformer.py, layers.py, fp8_bias.py, triton_kernels.py: the decoder.
- attention.py, masked_attention.py, scores.py, scans.py: mixers of tokens.
- parallelize.py, model_parallel.py, precision.py: a model on ranks, and its number formats.
- trainer.py, optimizer.py, data.py: one step.
- bench.py, loop.py, profiling.py, messages.py, results.py: measure steps.
- train_columns.py, training_rates.py, training_words.py: rows and what they mean.
- training_memory.py: memory of a step by kind, measured beside predicted.
- training_printing.py, training_figures.py: on a terminal and on a page.
"""
