"""The verbs: what each is for, where it lives, examples, and topics of `stepmark --help`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb. help: its line in `stepmark --help`; doc: the first line of its own --help.

    options and handler: "module:name". Without options, the handler is a group of commands, or
    makes the command from the arguments. examples: command lines after `stepmark`. command:
    the class of a command with options.
    """

    help: str
    handler: str
    options: str = ""
    doc: str = ""
    examples: tuple[str, ...] = ()
    command: str = "stepmark.cli.commands:Command"


VERBS = {
    "run": Verb(
        "The main job: predict a training step, measure it, explain it.",
        "stepmark.runs.run:run",
        "stepmark.runs.run_options:RunOptions",
        "Calibrate, predict a training step, train it, and say where the difference goes.",
        (
            "run",
            "run llama-3.1-8b --nproc 8 --budget 10m",
            "run llama-3.1-8b --scale tiny --device cpu --nproc 2",
        ),
    ),
    "doctor": Verb(
        "Show devices, peaks, health and what would run.",
        "stepmark.nodes.doctor:run",
        "stepmark.nodes.node_options:DoctorOptions",
        "What this machine is; what would be measured, what not, and why.",
        (
            "doctor",
            "doctor --nodes --gpus-per-node 8    # this host, before a big job",
            "launch --slurm -N 16 --gpus-per-node 8 -- doctor --nodes  # all hosts",
        ),
    ),
    "check": Verb(
        "Measure a reference run's cases again; is any slower?",
        "stepmark.comparison.check:run",
        "stepmark.comparison.check_options:CheckOptions",
        "Measure a reference run's cases again; exit 1 if any is slower beyond noise.",
        (
            "check --baseline latest",
            "check --baseline runs/20260101-120000-abcd --budget 5m",
            "check --baseline BEFORE1,BEFORE2 --current AFTER1,AFTER2",
        ),
    ),
    "compare": Verb(
        "Runs, nccl-tests files, CSVs: ratios and verdicts.",
        "stepmark.comparison.compare_verb:run",
        "stepmark.comparison.compare_options:CompareOptions",
        "Ratio of speeds per size or shape, its 99 % interval over launches, and a verdict.",
        (
            "compare before=RUN1 after=RUN2",
            "compare all_reduce_a.txt all_reduce_b.txt --range 1M-1G",
            "compare RUN1,RUN2,RUN3 RUN4,RUN5,RUN6 --fail-if-slower 5%",
        ),
    ),
    "report": Verb(
        "Write report.html of a run.",
        "stepmark.runs.runs:run_report",
        "stepmark.runs.runs_options:ReportOptions",
        "Write report.html of a run: roofline, tables, curves, commands, environment. Of two "
        "runs: the ledgers of their profiled training steps.",
        (
            "report",
            "report RUN1 RUN2",
        ),
    ),
    "comm": Verb(
        "Measure collectives: nccl-tests' flags, no MPI.",
        "stepmark.collectives.comm:run",
        "stepmark.collectives.comm_options:CommOptions",
        "Measure collectives: nccl-tests' flags, table and figures; no MPI.",
        (
            "comm all_reduce -b 1K -e 1G",
            "comm all_gather reduce_scatter -d bf16 --nproc 8 --csv -",
            "comm all_reduce --model llama-3.1-70b --mbs 1",
        ),
    ),
    "train": Verb(
        "Measure training steps: single, DDP, FSDP, TP, PP.",
        "stepmark.training.train:run",
        "stepmark.training.train_options:TrainOptions",
        "Train for real: single, DDP, FSDP, TP, PP; time by phase, MFU by convention.",
        (
            "train llama-3.1-8b --strategy fsdp --mbs 1,2 --compile",
            "train llama-3.1-8b --scale tiny --device cpu --nproc 2",
            "train llama-3.1-70b --nproc 64 --tp 8 --device h200 --dry-run",
        ),
    ),
    "calibrate": Verb(
        "Measure the parts from which a step is predicted.",
        "stepmark.predictions.calibrate:run",
        "stepmark.training.train_options:CalibrateOptions",
        "Measure the parts of one training step: kernels, host, collectives, power.",
        (
            "calibrate llama-3.1-8b --nproc 8",
            "calibrate llama-3.1-8b --device h200 --dry-run",
        ),
    ),
    "predict": Verb(
        "Step time, memory, power of a configuration.",
        "stepmark.cli.predict:command",
    ),
    "plan": Verb(
        "Which layout should a model train with on N GPUs?",
        "stepmark.layouts.plan:run",
        "stepmark.layouts.plan_options:PlanOptions",
        "Search a model's layouts on some GPUs: the fastest that fits, and why.",
        (
            "plan llama-3.1-70b --gpus 256 --gbs 1024 --device h100-sxm",
            "plan gpt-7b --gpus 64 --gbs 512 --device h100 --network dgx-h100",
            "plan llama-3.1-8b --gpus 64,128 --gbs 512 --device h200 --tokens 15T",
        ),
    ),
    "replay": Verb(
        "Run the messages of a workload file on real ranks.",
        "stepmark.replays.replay_verb:run",
        "stepmark.replays.replay_options:ReplayOptions",
        "Run a workload's messages, and the time of its computation, on real ranks.",
        (
            "replay workload.json --nproc 8",
            "replay workload.json --shrink --nproc 2 --device cpu --comm-only",
        ),
    ),
    "resume": Verb(
        "Measure what is left of a run that was cut short.",
        "stepmark.measuring.measure:resume",
        "stepmark.ground.option_groups:ResumeOptions",
        "Measure what is left of a run that was cut short; measured cases are skipped.",
        (
            "resume",
            "resume 20260101-120000-abcd",
        ),
    ),
    "op": Verb(
        "Measure operators: one family, or all of a model's layer.", "stepmark.cli.op:command"
    ),
    "workload": Verb(
        "What a step does: generate, show, convert, fill, capture.", "stepmark.cli.workload:app"
    ),
    "trace": Verb("Profiler traces: where did the step go?", "stepmark.cli.trace:app"),
    "runs": Verb("List, show, export and query earlier runs.", "stepmark.cli.runs:app"),
    "sweep": Verb(
        "The same command under several settings, compared.",
        "stepmark.comparison.sweep:run",
        "stepmark.comparison.sweep_options:SweepOptions",
        "Measure the same command under several settings, in interleaved rounds, and compare.",
        (
            "sweep --env NCCL_ALGO=Ring,Tree -- comm all_reduce -b 1M -e 1G",
            "sweep --set ac=none,full -- train llama-3.1-8b",
            "sweep --python .venv-a,.venv-b -- op gemm --model llama-3.1-8b",
        ),
        "stepmark.cli.sweep:Sweep",
    ),
    "watch": Verb(
        "Your own job, unmodified: its steps, messages, slow rank.",
        "stepmark.watching.watch:run",
        "stepmark.watching.watch_options:WatchOptions",
        "Run a job as it is, with NCCL's log and a profile of a few steps; print what it does.",
        (
            "watch -- torchrun --nproc-per-node 8 train.py",
            "watch --warmup 20 --steps 5 -- python train.py",
        ),
    ),
    "launch": Verb(
        "Print or submit a job of several hosts: Slurm, mpirun, ssh, torchrun.",
        "stepmark.launching.launch:run",
        "stepmark.launching.launch_options:LaunchOptions",
        "Print, or submit and follow, what starts a measuring verb on the hosts of a cluster.",
        (
            "launch --slurm -N 4 --gpus-per-node 8 -- comm all_reduce -b 1K -e 1G",
            "launch --slurm -N 4 --gpus-per-node 8 --submit -- doctor --nodes",
            "launch --torchrun --hosts a,b --gpus-per-node 8 -- train llama-3.1-8b",
            "launch --follow 123456",
        ),
        "stepmark.cli.launch:Launch",
    ),
    "logs": Verb(
        "Read logs of jobs: failures, hangs, steps, messages.",
        "stepmark.job_logs.logs:run",
        "stepmark.job_logs.log_options:LogsOptions",
        "Read a job's logs: failures and hangs, time of a step, transports, messages.",
        (
            "logs train.log",
            "logs nccl-*.log",
            "logs job-folder --histogram --bins pow2",
        ),
    ),
    "completion": Verb(
        "Print a script that completes commands in bash, zsh or fish.",
        "stepmark.cli.completion:run",
        "stepmark.cli.completion:CompletionOptions",
        "Print a script that completes verbs, flags, choices, models and runs in a shell.",
        (
            "completion bash > ~/.local/share/bash-completion/completions/stepmark",
            "completion zsh > ~/.zfunc/_stepmark    # a folder of $fpath",
            "completion fish > ~/.config/fish/completions/stepmark.fish",
        ),
    ),
}


TOPICS = {
    "Start": ("run", "doctor"),
    "Measure": ("op", "comm", "train", "calibrate", "replay", "sweep", "resume"),
    "Predict": ("predict", "plan", "workload"),
    "Diagnose a job": ("trace", "logs", "watch"),
    "Compare and report": ("compare", "check", "report", "runs"),
    "Clusters and shells": ("launch", "completion"),
}
