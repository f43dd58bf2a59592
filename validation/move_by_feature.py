"""Move the package into a folder per feature: `git mv`, imports, names in text, documents.

    python validation/move_by_feature.py          from the root of a clean checkout

Folders are listed lowest first: a folder imports only folders above it in FOLDERS. The script
moves files and rewrites what names them, so that it can run again on a later tree; then ruff
sorts the imports and formats. It prints modules whose base name changes.
"""

# ruff: noqa: E501 - it has lines of other files

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "stepmark"
PACKAGE = "stepmark"
ROOMS = ("core", "app", "bench", "workload", "predict", "trace", "store", "report", "launch")

# Subpackages that move as a whole, by their new name.
SUBPACKAGES = {
    "core.ops": "model.ops",
    "trace.kineto": "traces.kineto",
    "trace.nccl_log": "job_logs.nccl_log",
    "trace.flight_recorder": "job_logs.flight_recorder",
    "trace.job_output": "job_logs.job_output",
    "trace.tables": "text_tables",
    "workload.rules": "workloads.rules",
    "workload.formats": "workloads.formats",
    "bench.watch_site": "watching.watch_site",
    "bench.operators": "operators.bench",
    "bench.collectives": "collectives.bench",
    "bench.replay": "replays.bench",
    "bench.training": "training",
    "bench.capture": "capture",
}
# Modules with a new base name, or outside the folder of their subpackage.
MODULES = {
    "workload.formats.native": "step.native",
    "workload.formats.source_file": "step.source_file",
    "bench.capture.file": "workloads.user_function",
    "bench.node_check": "nodes.bench_node_check",
    "bench.doctor": "nodes.bench_doctor",
}
# Patterns of modules by new folder; the first that matches holds.
PLACES: list[tuple[str, str]] = [
    (
        "ground",
        r"core\.(launches|units|stats|errors|dtypes|garbage|fit|ratio|variance|verdicts)",
    ),
    ("ground", r"core\.(options|option_groups|reading)|store\.files"),
    ("ground", r"launch\.(processes|signals|outer_launcher)|app\.waiting|trace\.read_text"),
    ("model", r"core\.(model_names|model|parallel|device|collectives|kernel_groups|fabrics)"),
    (
        "cases",
        r"core\.(kind|message|case|comm_case|comm_curve|train_case|train_words|recompute)",
    ),
    ("cases", r"core\.(replay_case|training|sweep|plan|record|flops)"),
    ("tables", r"core\.columns|report\.(page|row_tables|figures|outcomes|launches)"),
    ("tables", r"store\.export"),
    ("step", r"core\.(workload|workload_check|workload_stages|rank_program|fold_items)"),
    ("step", r"core\.(trace_ops|module|roofline)|workload\.(tree|layout)"),
    ("timeline", r"core\.(ledger|critical_path|trace_breakdown|trace_timeline|trace_columns)"),
    ("timeline", r"core\.(prediction|step_cost)"),
    ("timeline", r"report\.(ledger|ledger_rows|ledger_svg|step_timeline)"),
    ("findings", r"core\.(finding|log_facts)|report\.(histogram.*|expected)"),
    ("store", r"store\.(run_export|codec|reader|runs|plans|sweeps|ledgers|predictions|query)"),
    ("store", r"app\.view|core\.commands"),
    ("launching", r"launch\.(slurm|scripts)|app\.(follow|launch)|core\.launch_options"),
    ("measuring", r"launch\.\w+|app\.(measure|delivery|machine|progress|rank)"),
    ("measuring", r"bench\.(clock|context|environment|host_load|nvidia|amd|ranks|run_cases)"),
    ("measuring", r"bench\.(telemetry|verify)"),
    ("replays", r"core\.(replay_options|stand_in)|app\.(replay|replay_log|workload_fill)"),
    ("replays", r"report\.replay.*"),
    ("capture", r"app\.workload_capture"),
    ("workloads", r"core\.workload_options|app\.(file_times|workload.*|models|aicb_models)"),
    ("workloads", r"workload\.\w+|report\.workload_.*"),
    ("operators", r"core\.op_options|app\.(op|op_plan)|report\.(op_columns|styles)"),
    ("text_tables", r"core\.profiler_table|app\.profiler_tables|report\.profiler_tables"),
    ("collectives", r"core\.comm_options|app\.(comm|comm_plan|comm_workload|measured_curves)"),
    ("collectives", r"report\.(comm_.*|nccl_tests|peer_formats)"),
    ("job_logs", r"core\.log_options|app\.(logs|log_sources)|report\.log_summary"),
    ("job_logs", r"trace\.(failures|inspector|one_cause)"),
    ("traces", r"core\.trace_options|app\.trace.*|report\.trace_.*"),
    ("step_memory", r"predict\.(memory|step_memory|step_tensors|fsdp_memory|allocator)"),
    ("training", r"core\.train_options|app\.(train|train_plan|train_refusals)"),
    ("training", r"report\.(train_columns|training_.*)"),
    ("predictions", r"core\.predict_options|app\.(predict|predict_target|parts|likeness)"),
    ("predictions", r"app\.(comm_contention|calibrate)|predict\.\w+"),
    ("predictions", r"report\.(prediction.*|predicted_steps|ledger_page)"),
    ("comparison", r"core\.(comparison|acceptance|racing)"),
    ("comparison", r"core\.(check_options|compare_options|sweep_options)"),
    ("comparison", r"app\.(compare|check|sweep.*|tuner|interpreters|table_series)"),
    ("comparison", r"store\.(compare|compare_notes|series)"),
    ("comparison", r"report\.(comparison.*|recommendation|tuner)"),
    ("nodes", r"core\.node_.*|app\.(node_check|device_check|doctor)"),
    ("nodes", r"store\.node_checks|report\.node_check"),
    ("watching", r"core\.watch_options|app\.watch|report\.watch_cost"),
    ("runs", r"core\.(run_options|runs_options)|app\.(run|runs|dry_run|suggestions)"),
    ("runs", r"app\.(step_report|step_ledger)|report\.(first_screen|summary|run_page)"),
]

# Tests go to the folder of what they test. Those of the command line, of Python's functions, of
# launchers, hosts and damaged files stay.
TEST_ROOMS = ("core", "app", "bench", "workload", "predict", "trace", "store", "report")
TEST_PACKAGES = {
    "bench.capture": "capture",
    "bench.collectives": "collectives",
    "bench.replay": "replays",
    "bench.training": "training",
    "workload.formats": "workloads.formats",
    "workload.rules": "workloads.rules",
}
TEST_MODULES = {
    "report.test_ledger": "timeline.test_ledger_text",
    "report.test_replay": "replays.test_replay_text",
    "report.test_trace_kernels": "traces.test_trace_kernels_text",
    "report.test_trace_messages": "traces.test_trace_messages_text",
    "workload.test_tree": "step.test_tree",
}
TEST_PLACES = [
    ("ground", r"core\.test_(errors|fit|ratio|shorthand|stats|steady|units|variance|verdicts)"),
    ("ground", r"core\.test_options|store\.(test_files|devices)|app\.test_waiting"),
    (
        "model",
        r"core\.(test_(collectives|device|kernel_groups|model|model_names|ops)|ops_samples)",
    ),
    ("cases", r"core\.(test_(case|comm_case|flops|message|recompute|kind)|comm_samples)"),
    (
        "step",
        r"core\.(test_(fold_items|rank_program|workload|workload_check)|workload_samples)",
    ),
    ("tables", r"core\.test_columns|store\.test_export|report\.(records|test_figures)"),
    ("timeline", r"core\.test_ledger|report\.test_ledger_rows"),
    ("findings", r"report\.test_histogram"),
    (
        "comparison",
        r"core\.test_(acceptance|racing)|store\.test_(compare|levels)|app\.test_check",
    ),
    ("comparison", r"report\.(test_recommendation|test_tuner|tuner_file)"),
    ("store", r"store\..*"),
    ("nodes", r"core\.test_node_verdict|bench\.test_(doctor|node_check)"),
    ("replays", r"core\.test_stand_in"),
    ("step_memory", r"predict\.test_(allocator|memory|memory_measured)"),
    (
        "predictions",
        r"predict\..*|app\.(conftest|predicted_runs|test_(calibrate|parts|predict.*))",
    ),
    ("predictions", r"app\.test_damaged_calibrations"),
    ("workloads", r"app\.(flag_layouts|test_flags|test_generate)|workload\.\w+"),
    ("workloads", r"report\.test_workload_(page|pipeline)"),
    ("measuring", r"app\.(sleeping|test_(machine|measure|rank_loop))"),
    (
        "measuring",
        r"bench\.(fakes|two_ranks|test_(amd|clock|environment|host_load|nvidia|release))",
    ),
    ("measuring", r"bench\.test_(run_cases|stopping|telemetry|verify)"),
    ("runs", r"app\.test_(run_plan|step_ledger|suggestions)"),
    ("runs", r"report\.test_(browser|first_screen|page|published_rows)"),
    ("traces", r"app\.test_trace_(breakdown|files|workload)|bench\.test_trace_gpu"),
    ("watching", r"app\.test_watch|bench\.test_watch_window|report\.test_watch_cost"),
    ("operators", r"bench\.test_operators|report\.test_(op_columns|styles)"),
    ("collectives", r"report\.(comm_records|test_(comm_.*|nccl_tests|p2p_matrix|param_comms))"),
    ("collectives", r"report\.test_validity"),
    ("training", r"report\.(train_records|test_training|test_training_page)"),
    (
        "job_logs",
        r"trace\.(nccl_lines|flight_.*|gloo_faults|varied_log|test_(diagnose|faults))",
    ),
    ("job_logs", r"trace\.test_(flight_.*|inspector|job_output|log_.*|lost_lines|nccl_log)"),
    ("job_logs", r"trace\.test_torn_lines"),
    ("text_tables", r"trace\.(nccl_samples|table_samples|test_(generic_units|nccl_tests.*))"),
    ("text_tables", r"trace\.test_(profiler_tables|reader_limits|round_trip|tables|validate)"),
    ("text_tables", r"trace\.test_throughput_tables"),
    ("traces", r"trace\.(big_trace|comm_traces|cut_trace|peer_figures|time_analysers)"),
    ("traces", r"trace\.(trace_scripts|trace_truth|test_.*)|report\.test_trace_page"),
]

# Folders, lowest first: the docstring of each is its map.
FOLDERS = {
    "ground": """What every folder may use: units, errors, options, statistics, files.

- units.py, dtypes.py: parse and format numbers; element types.
- errors.py: exceptions that a user can see.
- options.py, option_groups.py: options of a verb as dataclasses; groups that verbs share.
- stats.py, fit.py: order statistics of samples; latency and bandwidth from times.
- launches.py, variance.py, ratio.py, verdicts.py: from launches to verdicts on rows.
- files.py, read_text.py, reading.py: write files, read text and tables.
- processes.py, signals.py, outer_launcher.py: processes, Ctrl-C, torchrun and srun.
- waiting.py, garbage.py: progress on stderr; no search for reference cycles while much is read.
""",
    "model": """Models and machines: what is known of them without running anything.

- model.py, model_names.py: widths and parameter counts of a transformer; names of models.
- parallel.py: the degree of each axis of a layout.
- ops/: operators by shape, with FLOPs and bytes.
- collectives.py: the sizes and bus bandwidths of collectives, and which ranks take part.
- device.py, fabrics.py: data sheets of devices; variables for kinds of networks.
- kernel_groups.py: groups of GPU kernels by name.
""",
    "cases": """Cases, plans and records: what is measured, and what came out.

- case.py, comm_case.py, train_case.py, replay_case.py: one measurement each, by its identity.
- training.py, train_words.py, recompute.py, flops.py: techniques of training, and FLOPs.
- plan.py: the cases of a run in order. record.py: the outcome of a case.
- kind.py: what a feature does with its cases.
- sweep.py: settings of a sweep, and the outcome of each try.
- message.py, comm_curve.py: histograms of messages; times of a collective by size.
""",
    "tables": """Tables of declared columns, and the files, pages and figures that show them.

- columns.py: a column is declared once for CSV, JSON, console, HTML and SQL.
- launches.py, outcomes.py: launches of a case pooled; figures that kinds of rows share.
- row_tables.py: rows as tables on a terminal, in a pipe or on a page.
- export.py: rows to CSV, JSON and Parquet.
- page.py, figures.py: an HTML page that needs no network; plotly figures and their style.
""",
    "step": """The workload of a training step: a tree of modules, and a program per stage.

- module.py, layout.py, tree.py: a module on one rank; its sharding; the tree of a model.
- workload.py: operations and messages of a step, as one program per stage.
- workload_check.py, workload_stages.py: consistency of a workload; what its stages share.
- fold_items.py: long lists become blocks that repeat.
- rank_program.py: what each rank issues in order, and what each operation waits for.
- native.py, source_file.py: our file of a workload; files from elsewhere.
- roofline.py: lower bounds of times. trace_ops.py: operations as a profiler measured them.
""",
    "timeline": """Where the time of a step goes: ledgers, breakdowns and timelines.

- ledger.py: lines in integer ns that add up to the step.
- ledger_text.py, ledger_rows.py, ledger_svg.py: a ledger as text, as few rows, as a picture.
- step_cost.py, prediction.py: costs of the parts of a step; a predicted step.
- step_timeline.py: operations over time, for Perfetto and as few bars.
- trace_columns.py, trace_breakdown.py, trace_timeline.py, critical_path.py: a profiled step.
""",
    "findings": """What is wrong with a job, with the lines that prove it; messages by size.

- finding.py: a finding and its evidence.
- log_facts.py: facts of a debug log, each with the lines that state it.
- expected.py: expected times of messages.
- histogram.py, histogram_figures.py: messages by size as rows and text, and as figures.
""",
    "store": """Runs, plans and sweeps on disk.

- codec.py: records and runs to JSON and back.
- runs.py, plans.py, sweeps.py: a run's folder; its plan; the folder of a sweep.
- ledgers.py, predictions.py: ledgers of measured steps; predictions written before measuring.
- reader.py: the only reader of runs. query.py: SQL over all of them.
- commands.py, view.py: the command of a case; a run with all that its rows need.
- run_export.py: a run's rows to a file or a tracker.
""",
    "measuring": """Measure a plan: start ranks, watch them, time calls, store records.

- measure.py: from a plan to a run directory, ranks, and what they recorded.
- machine.py, delivery.py, progress.py: the device; the end of a verb; the sink of a run.
- supervise.py: detect hangs and deaths, kill ranks, continue with new ones.
- workers.py, local_ranks.py, leader.py, agent.py, channel.py: ranks of this host and of others.
- job.py, hosts.py: the hosts of a job. child.py, foreground.py: commands with a time limit.
- rank.py: one rank of a run. heartbeat.py: its hang guard.
- ranks.py, run_cases.py, context.py: agreement between ranks; the cases of a plan, one by one.
- clock.py, verify.py: timers and the rule that ends sampling; results against a reference.
- telemetry.py, nvidia.py, amd.py, host_load.py, environment.py: facts of the machine.
""",
    "workloads": """Generate, read, show and convert workloads of training steps.

- workload.py, workload_options.py, workload_flags.py: the verb and its options.
- workload_model.py, models.py, aicb_models.py, user_function.py: the model that is named.
- job.py, rules/: a training job; the rules of each framework.
- architecture.py, published.py, datasets.py: models that are no decoders.
- messages.py, operators.py, pipeline.py, pipeline_schedules.py: parts that rules share.
- formats/, workload_files.py: formats of files; from files and to files.
- fold.py, shrink.py: find repeats; a workload on fewer ranks.
- durations.py, workload_times.py, file_times.py: times of computation.
- workload_show.py, workload_tables.py, workload_text.py, workload_page.py: what is shown.
- workload_lanes.py, workload_pipeline.py: stages over time.
""",
    "operators": """Operators on one device: `stepmark op`.

- op_options.py, op_plan.py: options, and the cases that follow from them.
- op.py: the verb.
- bench/: implementations and their timing, with torch.
- op_columns.py, styles.py: rows; the columns of other benchmarks.
""",
    "text_tables": """Find the tables of results in a file by its content, whatever its name.

- nccl_text.py, nccl_lines.py, nccl_notes.py, nccl_json.py: nccl-tests and rccl-tests.
- result_csv.py, slide_tables.py, printed_figures.py: CSVs, slides, printed numbers.
- validate.py: figures of a table against each other.
- profiler_table.py, profiler_text.py, perftools.py, profiler_checks.py: tables of profilers.
- profiler_tables_verb.py, profiler_tables_text.py: `stepmark trace breakdown FILE`.
""",
    "collectives": """Collectives between ranks: `stepmark comm`.

- comm_options.py, comm_plan.py, comm_workload.py: options, and the cases that follow from them.
- comm.py: the verb.
- bench/: communicators, data, timing, with torch and NCCL.
- comm_columns.py, comm_remarks.py, comm_summary.py, comm_figures.py: rows and what they show.
- nccl_tests.py, peer_formats.py: the forms of nccl-tests and PARAM.
- measured_curves.py: times by size from runs and files.
""",
    "job_logs": """Logs and dumps of jobs: `stepmark logs` says what hangs or fails, and why.

- log_options.py, logs.py, log_sources.py: the verb, and its files sorted by content.
- nccl_log/: debug logs of NCCL and RCCL.
- flight_recorder/: dumps of torch's flight recorder.
- job_output/, failures.py: tracebacks, time-outs, signals; the meaning of each.
- inspector.py: lines of NCCL's inspector.
- one_cause.py: a log and dumps of one job joined.
- log_summary.py: facts and findings as lines and rows.
""",
    "traces": """Profiler traces of training steps: `stepmark trace`.

- trace_options.py, trace_sources.py, trace_files.py: options; traces of one job.
- kineto/: read a trace into columns and attribute its time.
- trace.py, trace_breakdown.py, trace_page.py: `breakdown`, its text and its page.
- trace_kernels_verb.py, trace_kernels_text.py, trace_comparison.py: `kernels` and `compare`.
- trace_messages_verb.py, trace_messages_text.py: `messages`.
- trace_path_verb.py, trace_path_text.py: `critical-path`.
- trace_workload.py, trace_convert.py: a step as a workload; traces for other tools.
""",
    "step_memory": """Device memory of a training step.

- step_tensors.py, step_memory.py: tensors of a step, as they come and go.
- fsdp_memory.py: what FSDP gathers and reduces.
- allocator.py: torch's caching allocator, replayed without a device.
- memory.py: the estimate, corrected by measured cases, and judged.
""",
    "training": """Training steps on ranks, with torch: `stepmark train`.

- train_options.py, train_plan.py, train_refusals.py: options, cases, and what cannot run.
- train.py: the verb.
- transformer.py, attention.py, layers.py, fp8_bias.py, triton_kernels.py: the decoder.
- parallelize.py, model_parallel.py, precision.py: a model on ranks, and its number formats.
- trainer.py, optimizer.py, data.py: one step.
- bench.py, loop.py, profiling.py, annotations.py, messages.py, results.py: measure steps.
- train_columns.py, training_rates.py, training_words.py: rows and what they mean.
- training_printing.py, training_figures.py: on a terminal and on a page.
""",
    "replays": """Replays of workloads on real ranks: `stepmark replay`.

- replay_options.py, replay_verb.py: options and the verb.
- stand_in.py: what runs in the place of computation.
- bench/: the engines that run a rank's program, with torch.
- workload_fill.py: times of a workload's computation.
- replay_log_verb.py, replay_log_text.py, replay_ranks.py: what a replay measured.
- replay_text.py, replay_columns.py, replay_page.py: its tables and its page.
""",
    "predictions": """Predict the time of a training step: `stepmark predict`.

- predict_options.py, predict.py, predict_target.py: options, the verb, and its target.
- parts.py, likeness.py, calibrate.py: measured parts, and the verb that measures them.
- costs.py, comm.py, contention.py, comm_contention.py: costs of operations and messages.
- step.py, power.py, interval.py: a step in a fixed point with its clock; its interval.
- timeline.py, program.py, works.py, step_events.py, free_steps.py: simulate the stages.
- spans.py, step_lines.py: when each operation runs, and the lines that it adds to.
- prediction.py, prediction_page.py, predicted_steps.py, ledger_page.py: what is shown.
""",
    "capture": """Record the workload of a user's PyTorch code without an accelerator.

- workload_capture.py: the verb `workload capture`.
- run.py, fake.py, watch.py: run the code on fake tensors and fake ranks, within a time.
- record.py, modules.py, compute.py, messages.py: computation, its module, and communication.
- overlap.py: streams of FSDP2 and DDP.
- values.py, contents.py, unknown.py, routing.py: what depends on values.
- operand_errors.py: errors of real kernels.
""",
    "comparison": """Compare runs, accept machines, race settings: `compare`, `check`, `sweep`.

- compare_options.py, check_options.py, sweep_options.py: options.
- comparison.py: measurements of several sources, side by side.
- series.py, table_series.py, compare.py, compare_notes.py: from records to verdicts.
- compare_verb.py, comparison_text.py, comparison_page.py: `compare` and what it shows.
- acceptance.py, check.py: `check`, which accepts a machine.
- sweep.py, interpreters.py, sweep_run.py, sweep_race.py, racing.py, sweep_results.py: `sweep`.
- recommendation.py: a setting by size. tuner_verb.py, tuner_text.py: NCCL's tuner file.
""",
    "nodes": """Check this machine and all hosts of a job: `stepmark doctor`.

- node_options.py, doctor.py, bench_doctor.py: the verb; what can be measured here.
- node_check_verb.py, device_check.py, bench_node_check.py: each device in its process.
- node_check.py, node_verdict.py: results, and the verdict on them.
- node_checks.py, node_check_text.py: results on disk, and as tables.
""",
    "watching": """Watch a user's own job, unmodified: `stepmark watch`.

- watch_options.py, watch.py: options and the verb.
- watch_site/: what Python processes of the job import.
- watch_cost.py: step times without and with the profiler.
""",
    "launching": """Start a verb on several hosts: `stepmark launch`.

- launch_options.py, launch.py: options and the verb.
- scripts.py: texts that start one process per host or per rank.
- slurm.py, follow.py: submit a script and follow its job.
""",
    "runs": """The main job and earlier runs: `stepmark run`, `runs` and `report`.

- run_options.py, run.py, dry_run.py: calibrate, predict, measure; print a plan.
- step_report.py, step_ledger.py, suggestions.py: the predicted step beside the measured one.
- first_screen.py, summary.py: the end of a run on a terminal.
- runs_options.py, runs.py, run_page.py: list, show, export and query; the page of a run.
""",
}

NEW_TESTS = {
    "tests/launch/test_earlier_names.py": '''"""Names of modules that earlier versions call are there."""

import subprocess
import sys

import pytest


def refusal(module: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", module], capture_output=True, text=True, check=False, timeout=60
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("module", ["stepmark.app.rank"])
def test_a_rank_answers_to_its_earlier_name(module: str) -> None:
    code, text = refusal(module)
    assert (code, text) == refusal("stepmark.measuring.rank")
    assert "ranks are started by" in text
''',
}
# Other hosts of a job may have an earlier version, which starts ranks by this name.
SHIMS = {
    "app/__init__.py": '"""Names by which earlier versions start ranks on this host."""\n',
    "app/rank.py": '''"""measuring/rank.py, by the name with which earlier versions start it."""

import runpy

if __name__ == "__main__":
    runpy.run_module("stepmark.measuring.rank", run_name="__main__", alter_sys=True)
''',
}
# Folders that lead to no torch at all, not by what they import either.
TORCH_FREE = (
    *("ground", "model", "cases", "tables", "step", "timeline", "findings", "store"),
    *("workloads", "text_tables", "job_logs", "traces", "step_memory", "predictions"),
    *("launching",),
)
WITH_TORCH = (
    "measuring",
    "operators",
    "collectives",
    "training",
    "replays",
    "capture",
    "nodes",
)
STDLIB_ONLY = ("ground", "model", "cases", "step")
FORBIDDEN_IN_NOUNS = (
    *("torch", "msgspec", "typer", "rich", "psutil", "plotly", "duckdb", "pynvml"),
)
# What the nouns need beyond the standard library.
OF_NOUNS = (
    "stepmark.ground.processes -> psutil",
    "stepmark.step.native -> msgspec",
    "stepmark.step.source_file -> msgspec",
)

# Text that no rule rewrites: (file by its new name, old, new).
EDITS: list[tuple[str, str, str]] = [
    (
        "src/stepmark/watching/watch.py",
        '.parent / "bench" / "watch_site"',
        '.parent / "watching" / "watch_site"',
    ),
    (
        "tests/watching/test_watch_window.py",
        '.parent / "bench" / "watch_site"',
        '.parent / "watching" / "watch_site"',
    ),
    ("src/stepmark/training/data.py", "parents[2]", "parents[1]"),
    (
        "src/stepmark/workloads/formats/__init__.py",
        '    picks: str = ""\n',
        '    picks: str = ""\n    package: str = "stepmark.workloads.formats"\n',
    ),
    (
        "src/stepmark/workloads/formats/__init__.py",
        'f"stepmark.workloads.formats.{self.module}"',
        'f"{self.package}.{self.module}"',
    ),
    (
        "src/stepmark/workloads/formats/__init__.py",
        '        module="native",\n',
        '        module="native",\n        package="stepmark.step",\n',
    ),
    (
        "tests/test_architecture.py",
        'in ("core", "workload", "launch")',
        'in ("ground", "model", "cases", "step", "workloads", "launching")',
    ),
    (
        "tests/test_architecture.py",
        "test_core_and_workload_import_no_torch",
        "test_nouns_and_workloads_import_no_torch",
    ),
    (
        "tests/test_mutations.py",
        '{"core", "bench", "workload", "trace", "store"}',
        '{"ground", "measuring", "workloads", "traces", "store"}',
    ),
    ("tests/api/test_names.py", '"stepmark.core"', '"stepmark.ground"'),
    ("tests/api/test_names.py", '"stepmark.app"', '"stepmark.measuring"'),
    (
        "validation/draw_faults.py",
        """    "predict": ("predict", "app/predict*.py", "app/parts.py", "app/comm_"""
        """contention.py"),
    "trace": ("trace", "app/trace*.py"),
    "replay": ("bench/replay", "app/replay*.py", "report/replay*.py"),
    "launch": ("launch",),
    "verdicts": tuple(
        f"core/{name}.py"
        for name in ("verdicts", "ratio", "variance", "launches", "acceptance", "racing")
    ),
""",
        """    "predict": ("predictions", "step_memory"),
    "trace": ("traces", "job_logs", "text_tables"),
    "replay": ("replays",),
    "launch": ("measuring/*.py", "launching"),
    "verdicts": (
        *(f"ground/{name}.py" for name in ("verdicts", "ratio", "variance", "launches")),
        *(f"comparison/{name}.py" for name in ("acceptance", "racing")),
    ),
""",
    ),
    ("tests/recipe_files.py", '"report/families.py"', '"runs/families.py"'),
    (
        "tests/recipe_files.py",
        "from stepmark.report import families",
        "from stepmark.runs import families",
    ),
    (
        "tests/conftest.py",
        """folders[0] == "launch" or (folders[:2] == ("bench", "collectives") and has_pool)""",
        """folders[0] == "launch" or (folders[0] == "collectives" and has_pool)""",
    ),
    ("src/stepmark/data/text.toml", "bench/training/data.py", "training/data.py"),
    ("src/stepmark/cli/flags.py", "--help reads no other room", "--help reads no other folder"),
    (
        "src/stepmark/data/hardware.toml",
        "tests/core/test_device.py",
        "tests/model/test_device.py",
    ),
    (
        "validation/draw_faults.py",
        """    "trace": ("trace", "traces/test_trace_breakdown.py"),
    "replay": ("bench/replay", "cli/test_replay.py"),
""",
        """    "trace": ("traces", "job_logs", "text_tables"),
    "replay": ("replays", "cli/test_replay.py"),
""",
    ),
    ("CONTRIBUTING.md", "a file in `report/`", "a file in `runs/`"),
    (
        "src/stepmark/cases/recompute.py",
        """the workload's operations (workloads/rules/pytorch/technique.py)
and the executed FLOPs (cases/flops.py) follow from it. Source: torch 2.13,
""",
        """the workload's operations
(workloads/rules/pytorch/technique.py) and the executed FLOPs (cases/flops.py) follow from it.
Source: torch 2.13,
""",
    ),
    (
        "src/stepmark/comparison/acceptance.py",
        """(ground/verdicts.py); a baseline of one launch does
# not say""",
        """(ground/verdicts.py); a baseline of one launch
# does not say""",
    ),
    (
        "src/stepmark/ground/ratio.py",
        """; ground/verdicts.py
estimates""",
        """;
ground/verdicts.py estimates""",
    ),
    (
        "src/stepmark/measuring/rank.py",
        "`python -m stepmark.measuring.rank PLAN RUN`, or a process of an outer launcher.",
        "`python -m stepmark.measuring.rank PLAN RUN`, or one of an outer launcher.",
    ),
    (
        "src/stepmark/measuring/ranks.py",
        "None under an outer launcher. Names: measuring/local_ranks.py.",
        "None under an outer launcher. Names: local_ranks.py.",
    ),
    (
        "tests/forked_ranks.py",
        """spends seconds on importing torch, a fork milliseconds.
All else is as measuring/local_ranks.py does it: a session, the environment, our standard streams,
and death with us. A rank becomes our child, so that its state and exit code are read as ever.
""",
        """spends seconds on importing torch, a fork
milliseconds. All else is as measuring/local_ranks.py does it: a session, the environment, our
standard streams, and death with us. A rank becomes our child, so that its state and exit code
are read as ever.
""",
    ),
    (
        "tests/operators/test_op_columns.py",
        '"import sys, stepmark.operators.op_columns; print({',
        '"import sys; import stepmark.operators.op_columns\\n"\n        "print({',
    ),
    # No folder has the name of a function of the package.
    (
        "src/stepmark/__init__.py",
        '''

class _Package(ModuleType):
    """This package. `workload` and `predict` are its functions, not the packages of rooms.

    The import of a room binds its name here: a function of the same name would be lost.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
''',
        "",
    ),
    ("src/stepmark/__init__.py", "import sys\nfrom types import ModuleType\n", ""),
    ("tests/api/test_names.py", "test_a_room_does_not_hide", "test_a_folder_does_not_hide"),
    (
        "tests/test_architecture.py",
        """# readers of messages' groups, 110 for figures of recomputed products and names of models.
MAX_STATEMENTS = 53_100 + 80 + 110
""",
        """# readers of messages' groups, 110 for figures of recomputed products and names of models, 25
# for imports of modules that lie in several folders, and for the entry of earlier versions.
MAX_STATEMENTS = 53_100 + 80 + 110 + 25
""",
    ),
    (
        "CONTRIBUTING.md",
        """## The star

```
                 cli               options of each verb, and the name of its handler
                  |
                 app               what a verb does; the only place that knows every room
                  |
 workload  bench  predict  trace  store  report  launch      rooms: never import one another
                  |
                 core              nouns and facts: standard library, frozen dataclasses
```

torch is imported in `bench`, and by ranks: a process that plans does not import it. Reasons:
[docs/adr](docs/adr).
""",
        """## A folder per feature

```
           cli                    api                     verbs and functions, from the same options

 runs  launching  watching  nodes  comparison  capture    features: a folder has all of its own,
 predictions  replays  training  step_memory  traces      and imports what stands below it
 job_logs  collectives  text_tables  operators  workloads

 measuring  store  findings  timeline  step  tables       nouns that features share
 cases  model

           ground                                         units, statistics, files, options
```

A folder imports only folders that `layers` in `pyproject.toml` lists below it. The docstring of its `__init__.py` is its map.
`kinds.py` names, for each kind of case, the feature that plans, measures and shows it. torch is imported where ranks measure:
in `measuring`, `training`, `capture` and files or folders called `bench`. A process that plans does not import it. Reasons: [docs/adr](docs/adr).
""",
    ),
    ("tests/test_documents.py", 'f"stepmark.app.{name}"', 'f"stepmark.{name}"'),
    (
        "tests/test_documents.py",
        """    *("doctor:run", "watch:run", "check:run", "measure:resume"),
    *("workload:capture", "workload_fill:run"),
""",
        """    *("nodes.doctor:run", "watching.watch:run", "comparison.check:run"),
    *("measuring.measure:resume", "workloads.workload:capture", "replays.workload_fill:run"),
""",
    ),
]

# Dated texts, data and this file keep the old names.
UNTOUCHED = re.compile(
    r"docs/LOG\.md|CHANGELOG\.md|results/.*|tests/data/(?!.*README\.md).*"
    r"|validation/move_by_feature\.py|src/stepmark/data/.*|.*\.lock"
)
TEXTS = (".py", ".md", ".toml", ".yml", ".yaml", ".sh", ".ipynb", "Makefile", "Dockerfile")


def main() -> int:
    """Move, rewrite, format."""
    if subprocess.run(["git", "diff", "--quiet", "HEAD"], cwd=ROOT, check=False).returncode:
        raise SystemExit("the checkout has changes: commit them first")
    modules = all_modules()
    targets = new_names(modules)
    print_renames(targets)
    aliases = {old: new for old, new in targets.items() if _base(old) != _base(new)}
    rewrite = Rewriter(modules, targets, aliases)
    files = [file for file in _tracked() if not UNTOUCHED.fullmatch(file)]
    texts = {file: rewrite.text(file, (ROOT / file).read_text()) for file in files}
    tests = Tests(all_tests())
    texts = {file: tests.text(file, text) for file, text in texts.items()}
    for file, text in texts.items():
        (ROOT / file).write_text(text)
    move(modules, targets)
    tests.move()
    for name, text in FOLDERS.items():
        write_map(name, text)
    for name, text in SHIMS.items():
        (SOURCE / name).parent.mkdir(exist_ok=True)
        (SOURCE / name).write_text(text)
    for name, text in NEW_TESTS.items():
        (ROOT / name).write_text(text)
    for file, old, new in EDITS:
        edit(ROOT / file, old, new)
    write_contracts(targets)
    for command in (["format"], ["check", "--fix"], ["format"]):
        subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--quiet", "."], cwd=ROOT, check=False
        )
    _run("git", "add", "--all", "src", "tests")
    _run("git", "add", "--update")
    return 0


def all_modules() -> dict[str, Path]:
    """Return every module of the rooms, by its name below the package."""
    modules = {}
    for room in ROOMS:
        for file in sorted((SOURCE / room).rglob("*.py")):
            name = file.relative_to(SOURCE).with_suffix("").as_posix().replace("/", ".")
            modules[name.removesuffix(".__init__")] = file
    return modules


def new_names(modules: dict[str, Path]) -> dict[str, str]:
    """Return the new name of every module and subpackage. Rooms themselves have none."""
    wanted = {name: _wanted(name) for name in modules if name not in ROOMS}
    counts = Counter(wanted.values())
    names = {
        old: new + _suffix(old, modules[old]) if counts[new] > 1 else new
        for old, new in wanted.items()
    }
    if len(set(names.values())) < len(names):
        twice = [new for new, count in Counter(names.values()).items() if count > 1]
        raise SystemExit(f"two modules would get one name: {twice}")
    return SUBPACKAGES | names


def _wanted(name: str) -> str:
    """Return the new name of a module, should no other want it."""
    return _placed(name, MODULES, SUBPACKAGES, PLACES)


def _placed(
    name: str,
    modules: dict[str, str],
    packages: dict[str, str],
    places: Sequence[tuple[str, str]],
) -> str:
    if name in modules:
        return modules[name]
    for old, new in packages.items():
        if name == old or name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    for folder, pattern in places:
        if re.fullmatch(pattern, name):
            return f"{folder}.{_base(name)}"
    raise SystemExit(f"{name} has no place: add it to the tables of this script")


def _suffix(name: str, file: Path) -> str:
    """Return the end of a name that several modules want. Nouns keep it as it is."""
    room = name.partition(".")[0]
    if room == "report":
        return "_page" if "<section" in file.read_text() else "_text"
    return "_verb" if room == "app" else ""


def print_renames(targets: dict[str, str]) -> None:
    """Print the modules whose base name changes."""
    for old, new in sorted(targets.items(), key=lambda pair: pair[1]):
        if _base(old) != _base(new) and old not in SUBPACKAGES:
            print(f"{old.replace('.', '/'):32} -> {new.replace('.', '/')}")


def _base(name: str) -> str:
    return name.rpartition(".")[2]


class Rewriter:
    """Rewrites the names of modules in texts."""

    def __init__(
        self, modules: dict[str, Path], targets: dict[str, str], aliases: dict[str, str]
    ) -> None:
        self.modules = modules
        self.targets = targets
        self.aliases = aliases
        rooms = "|".join(ROOMS)
        self._dotted = re.compile(rf"\bstepmark\.((?:{rooms})(?:\.\w+)+)")
        self._embedded = re.compile(
            rf"from stepmark\.((?:{rooms})[\w.]*) import (\w+)(?=[\"\n])"
        )
        self._quoted = re.compile(rf'"((?:{rooms})(?:\.\w+)+)"')
        self._path = re.compile(
            rf"(?:(?<=stepmark/)|(?<![\w./-]))((?:{rooms})(?:/\w+)+)(?![\w/]*/\w*\*)"
        )

    def text(self, file: str, text: str) -> str:
        """Return the text of a file with new names."""
        if file == "tests/mutations.toml":
            return re.sub(r'^file = "(.*)"$', self._fault_file, text, flags=re.M)
        if file == "validation/draw_faults.py":
            return text
        if file.endswith(".py"):
            text = self._imports(text)
            text = self._embedded.sub(self._embedded_import, text)
            text = self._quoted.sub(lambda m: f'"{self._replaced(m[1], ".") or m[1]}"', text)
        text = self._dotted.sub(self._dotted_name, text)
        return self._path.sub(lambda match: self._replaced(match[1], "/") or match[0], text)

    def _fault_file(self, match: "re.Match[str]") -> str:
        path, suffix = match[1].removesuffix(".py"), ".py"
        return f'file = "{self._replaced(path, "/") or path}{suffix}"'

    def _dotted_name(self, match: "re.Match[str]") -> str:
        return f"{PACKAGE}.{self._replaced(match[1], '.') or match[1]}"

    def _embedded_import(self, match: "re.Match[str]") -> str:
        """Return the import of one module in code that stands in a string."""
        module = f"{match[1]}.{match[2]}"
        if module not in self.modules:
            return match[0]
        place, _, base = self.targets[module].rpartition(".")
        return f"from {_full(place)} import {_as(base, match[2])}"

    def _replaced(self, name: str, separator: str) -> str | None:
        """Return a name whose longest beginning that is a module is replaced."""
        parts = name.split(separator)
        for count in range(len(parts), 1, -1):
            new = self.targets.get(".".join(parts[:count]))
            if new:
                return separator.join([*new.split("."), *parts[count:]])
        return None

    def _imports(self, text: str) -> str:
        """Split `from stepmark.room import module, ...` by the new places of the modules."""
        tree = ast.parse(text)
        lines = text.splitlines(keepends=True)
        unsafe = self._unsafe(tree, text)
        renamed: dict[str, str] = {}
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        for node in sorted(nodes, key=lambda node: -node.lineno):
            package = (node.module or "").removeprefix(f"{PACKAGE}.")
            if node.level or package not in self._packages():
                continue
            groups = self._groups(node.names, package, unsafe, renamed)
            source = "".join(lines[node.lineno - 1 : node.end_lineno])
            comments = "".join(f"  {comment}" for comment in re.findall(r"#.*", source))
            indent = " " * node.col_offset
            lines[node.lineno - 1 : node.end_lineno] = [
                f"{indent}from {_full(place)} import {', '.join(names)}{comments}\n"
                for place, names in groups.items()
            ]
        text = "".join(lines)
        for old, new in renamed.items():
            text = re.sub(rf"(?<![\w.]){old}\.(?=\w)", f"{new}.", text)
        return text

    def _packages(self) -> set[str]:
        return {*ROOMS, *SUBPACKAGES, *(n for n, f in self.modules.items() if _is_package(f))}

    def _groups(
        self,
        names: Sequence[ast.alias],
        package: str,
        unsafe: set[str],
        renamed: dict[str, str],
    ) -> dict[str, list[str]]:
        """Return the imported names by the package that has them now."""
        groups = defaultdict(list)
        for alias in names:
            module = f"{package}.{alias.name}"
            if module not in self.modules:
                groups[self.targets[package]].append(_as(alias.name, alias.asname))
                continue
            place, _, base = self.targets[module].rpartition(".")
            name = alias.asname
            if base != alias.name and not name:
                if alias.name in unsafe:
                    name = alias.name
                else:
                    renamed[alias.name] = base
            groups[place].append(_as(base, name))
        return groups

    def _unsafe(self, tree: ast.Module, text: str) -> set[str]:
        """Return imported modules whose uses are not exactly the texts `name.`"""
        counts = Counter(_imported_names(tree))
        return {
            name
            for name, new in ((_base(old), _base(new)) for old, new in self.aliases.items())
            if counts[name] > 1 or (counts[name] and not _is_safe(tree, text, name, new))
        }


def _is_safe(tree: ast.Module, text: str, name: str, new: str) -> bool:
    """Return whether replacing `name.` replaces each use of an imported module, and no more."""
    uses = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == name]
    found = re.findall(rf"(?<![\w.]){name}\.(?=\w)", text)
    is_bound = any(_binds(node, name) for node in ast.walk(tree))
    return len(uses) == len(found) and not is_bound and not re.search(rf"\b{new}\b", text)


def _imported_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)


def _binds(node: ast.AST, name: str) -> bool:
    """Return whether a node other than an import binds a name."""
    if isinstance(node, ast.Name):
        return node.id == name and not isinstance(node.ctx, ast.Load)
    if isinstance(node, ast.arg):
        return node.arg == name
    is_definition = isinstance(node, ast.FunctionDef | ast.ClassDef)
    return is_definition and node.name == name


def _full(place: str) -> str:
    return f"{PACKAGE}.{place}" if place else PACKAGE


def _as(name: str, alias: str | None) -> str:
    return f"{name} as {alias}" if alias and alias != name else name


def _is_package(file: Path) -> bool:
    return file.name == "__init__.py"


def all_tests() -> dict[str, str]:
    """Return the new name of every module of tests, below tests."""
    names = {}
    for file in (name for name in _tracked() if name.startswith("tests/")):
        name = file.removeprefix("tests/").removesuffix(".py").replace("/", ".")
        if file.endswith(".py") and not name.startswith("data."):
            moves = name.partition(".")[0] in TEST_ROOMS
            new = _placed(name, TEST_MODULES, TEST_PACKAGES, TEST_PLACES) if moves else name
            names[name] = new
    if len(set(names.values())) < len(names):
        twice = [new for new, count in Counter(names.values()).items() if count > 1]
        raise SystemExit(f"two tests would get one name: {twice}")
    return names


class Tests:
    """Moves tests and rewrites what names them."""

    def __init__(self, names: dict[str, str]) -> None:
        self.names = names
        rooms = "|".join(TEST_ROOMS)
        self._dotted = re.compile(rf"\btests\.((?:{rooms})(?:\.\w+)+)")
        self._path = re.compile(rf"\btests/((?:{rooms})(?:/\w+)+)")
        self._quoted = re.compile(rf'"((?:{rooms})(?:/\w+)+)\.py')

    def text(self, file: str, text: str) -> str:
        """Return the text of a file with new names of tests."""
        own = file.removeprefix("tests/").removesuffix(".py").replace("/", ".")
        if own in self.names and file.startswith("tests/"):
            text = self._imports(own, text)
            text = self._depth(own, text)
        text = self._dotted.sub(lambda m: f"tests.{self._new(m[1], '.')}", text)
        text = self._path.sub(lambda m: f"tests/{self._new(m[1], '/')}", text)
        if file in ("tests/mutations.toml", "validation/draw_faults.py"):
            lines = text.splitlines(keepends=True)
            text = "".join(
                line
                if line.startswith("file = ")
                else self._quoted.sub(lambda m: f'"{self._new(m[1], "/")}.py', line)
                for line in lines
            )
        return text

    def move(self) -> None:
        """Move the files."""
        for old, new in self.names.items():
            if old != new:
                source = ROOT / "tests" / f"{old.replace('.', '/')}.py"
                target = ROOT / "tests" / f"{new.replace('.', '/')}.py"
                target.parent.mkdir(parents=True, exist_ok=True)
                _run("git", "mv", str(source), str(target))
        for room in TEST_ROOMS:
            if room not in FOLDERS:
                _run("rm", "-r", "-f", str(ROOT / "tests" / room))

    def _new(self, name: str, separator: str) -> str:
        """Return a name whose longest beginning that is a test or a folder is replaced."""
        known = TEST_PACKAGES | self.names
        parts = name.split(separator)
        for count in range(len(parts), 0, -1):
            new = known.get(".".join(parts[:count]))
            if new:
                return separator.join([*new.split("."), *parts[count:]])
        return name

    def _depth(self, own: str, text: str) -> str:
        """Correct `parents[n]` where a file lies less deep than before."""
        less = own.count(".") - self.names[own].count(".")
        return re.sub(
            r"(__file__\)\.parents\[)(\d)", lambda m: f"{m[1]}{int(m[2]) - less}", text
        )

    def _imports(self, own: str, text: str) -> str:
        """Rewrite imports of other tests: relative ones, and of modules from a folder."""
        lines = text.splitlines(keepends=True)
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
        for node in sorted(nodes, key=lambda node: -node.lineno):
            package = self._package(own, node)
            if package is None:
                continue
            groups = defaultdict(list)
            for alias in node.names:
                module = f"{package}.{alias.name}".lstrip(".")
                place, _, base = self.names.get(module, "").rpartition(".")
                if not base:
                    place, base = self._new(package, "."), alias.name
                groups[place].append(_as(base, alias.asname or alias.name))
            source = "".join(lines[node.lineno - 1 : node.end_lineno])
            comments = "".join(f"  {comment}" for comment in re.findall(r"#.*", source))
            lines[node.lineno - 1 : node.end_lineno] = [
                f"{' ' * node.col_offset}from {self._seen(own, place, node.level > 0)}"
                f" import {', '.join(names)}{comments}\n"
                for place, names in groups.items()
            ]
        return "".join(lines)

    def _package(self, own: str, node: ast.ImportFrom) -> str | None:
        """Return what an import is from, below tests; None if it is from elsewhere."""
        if node.level:
            above = own.split(".")[: -node.level]
            return ".".join([*above, *((node.module or "").split(".") if node.module else [])])
        first, _, rest = (node.module or "").partition(".")
        return rest if first == "tests" else None

    def _seen(self, own: str, place: str, is_relative: bool) -> str:
        """Return the name of a module or folder of tests as another one imports it."""
        folder = self.names[own].rpartition(".")[0]
        if is_relative and (place == folder or place.rpartition(".")[0] == folder):
            return f".{place.removeprefix(folder).lstrip('.')}"
        return f"tests.{place}".rstrip(".")


def move(modules: dict[str, Path], targets: dict[str, str]) -> None:
    """Move all modules, and remove the empty rooms."""
    for old, file in modules.items():
        if old in ROOMS:
            _run("git", "rm", "--quiet", "--force", str(file))
            continue
        place = SOURCE / targets[old].replace(".", "/")
        target = place / "__init__.py" if _is_package(file) else place.with_suffix(".py")
        is_empty = _is_package(file) and not file.read_text()
        if is_empty and "/" not in target.parent.relative_to(SOURCE).as_posix():
            _run("git", "rm", "--quiet", "--force", str(file))  # the folder's map follows
            continue
        if target == file:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        _run("git", "mv", "--force", str(file), str(target))
    for room in ROOMS:
        if room not in FOLDERS:
            _run("rm", "-r", "-f", str(SOURCE / room))


def write_map(name: str, text: str) -> None:
    """Write the docstring of a folder in front of the code of its __init__, if it has any."""
    folder = SOURCE / name
    known = {path.name.removesuffix(".py") for path in folder.iterdir()}
    listed = set(re.findall(r"(\w+)(?:\.py|/)[,: ]", text))
    if missing := sorted(listed - known):
        raise SystemExit(f"{name} has no {missing}, which its map lists")
    if left := sorted(known - listed - {"__init__", "__pycache__"}):
        print(f"{name}: not in its map: {', '.join(left)}")
    file = folder / "__init__.py"
    code = file.read_text() if file.exists() else ""
    if code:
        end = ast.parse(code).body[0].end_lineno or 0
        code = "".join(code.splitlines(keepends=True)[end:])
    file.write_text(f'"""{text}"""\n{code}')


def edit(file: Path, old: str, new: str) -> None:
    """Replace a text that a file has once."""
    text = file.read_text()
    if text.count(old) != 1:
        raise SystemExit(f"{file} has {text.count(old)} times: {old}")
    file.write_text(text.replace(old, new))


def write_contracts(targets: dict[str, str]) -> None:
    """Write import-linter's contracts, which end pyproject.toml."""
    file = ROOT / "pyproject.toml"
    head, _, _ = file.read_text().partition("[[tool.importlinter.contracts]]")
    above = ["cli | stepmark.api", *reversed(FOLDERS)]
    free = [*TORCH_FREE, *_of_rooms(targets, {*ROOMS} - {"app", "bench"}, TORCH_FREE)]
    others = [name for name in FOLDERS if name not in (*TORCH_FREE, *WITH_TORCH)]
    planning = ["cli", "api", *others, *_of_rooms(targets, {"app"}, (*TORCH_FREE, *others))]
    contracts = f"""\
[[tool.importlinter.contracts]]
name = "a folder imports only what stands below it"
type = "layers"
layers = {_names(above)}
ignore_imports = ["stepmark -> stepmark.**"]  # the functions for Python, as types

[[tool.importlinter.contracts]]
name = "torch only where ranks measure"
type = "forbidden"
source_modules = {_names(free)}
forbidden_modules = ["torch"]
ignore_imports = ["stepmark -> stepmark.**"]

[[tool.importlinter.contracts]]
name = "a process that plans imports no torch itself"
type = "forbidden"
source_modules = {_names(planning)}
forbidden_modules = ["torch"]
allow_indirect_imports = true

[[tool.importlinter.contracts]]
name = "nouns need the standard library alone (statistics may use numpy)"
type = "forbidden"
source_modules = {_names(STDLIB_ONLY)}
forbidden_modules = {_toml_list(FORBIDDEN_IN_NOUNS)}
ignore_imports = {_toml_list(["stepmark -> stepmark.**", *OF_NOUNS])}
"""
    file.write_text(head + contracts)


def _of_rooms(
    targets: dict[str, str], rooms: Collection[str], without: Collection[str]
) -> list[str]:
    """Return the new names of modules of some rooms, but of some folders."""
    return sorted(
        new
        for old, new in targets.items()
        if old.partition(".")[0] in rooms and new.partition(".")[0] not in without
    )


def _names(names: Iterable[str]) -> str:
    return _toml_list([f"{PACKAGE}.{name}" for name in names])


def _toml_list(items: Sequence[str]) -> str:
    return "[\n" + "".join(f'    "{item}",\n' for item in items) + "]"


def _tracked() -> list[str]:
    done = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [name for name in done.stdout.splitlines() if name.endswith(TEXTS)]


def _run(*command: str) -> None:
    subprocess.run(command, cwd=ROOT, check=True)


if __name__ == "__main__":
    sys.exit(main())
