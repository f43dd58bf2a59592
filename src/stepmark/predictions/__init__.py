"""Predict the time of a training step: `stepmark predict`.

- predict_options.py, predict.py: options, and the verb.
- framework_job.py: the verb with a framework's flags.
- prediction_grid.py: predictions of all combinations of options with lists, as a table.
- inputs.py, predict_inputs.py: what a step is predicted from; by options, a case, a workload.
- calibration.py, calibrate.py: measured parts, and the verb that measures them.
- hosts.py, host_times.py: the host's time for an operation, by data sheet and as measured.
- costs.py, comm.py, contention.py: costs of operations and messages.
- factors.py, anchored_steps.py, anchor_fit.py: factors on costs, fitted to measured steps.
- plan_columns.py: columns of `stepmark plan` in a table of anchors.
- step.py, power.py: a step in a fixed point with its clock.
- interval.py, calibrated_errors.py, sheet_errors.py: its interval, by errors of others.
- simulation.py, step_events.py, free_steps.py: simulate the stages.
- program.py, works.py, regions.py, compiler.py: what of a workload they simulate.
- stage_times.py: when each operation runs, and the lines that it adds to.
- prediction.py: the prediction of a step, its figures and its memory.
- note.py, prediction_notes.py, prediction_text.py, prediction_page.py: its notes, text, page.
- training_run.py, measured_step.py: days and cost of a run; a measured step and its gap.
- predicted_steps.py, ledger_page.py: predicted and measured steps of a run.
"""
