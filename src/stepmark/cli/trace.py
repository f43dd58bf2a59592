"""stepmark trace: where the time of a training step went, from profiler traces."""

from stepmark.cli.commands import Group, builder
from stepmark.traces import trace_options

app = Group(
    "Where did the step go? From PyTorch profiler traces of any number of ranks.",
    {
        "breakdown": (
            "Compute, exposed communication, memcpy and idle, by rank and step.",
            builder(
                trace_options.BreakdownOptions,
                "stepmark.traces.trace:breakdown",
                "Show where the time of each step went on each rank.",
                "trace breakdown latest",
                "trace breakdown traces/ --steps 5-7 --html page.html",
            ),
        ),
        "ledger": (
            "Where each nanosecond of a step went: kind of work, collective, cause of idle.",
            builder(
                trace_options.LedgerOptions,
                "stepmark.runs.step_ledger:ledger",
                "Show the lines that a step's time adds up from: compute by kind of work, "
                "exposed communication by collective, copies, idle time by cause.",
                "trace ledger latest",
            ),
        ),
        "messages": (
            "How often each message was sent, how fast, and what a faster network gains.",
            builder(
                trace_options.MessagesOptions,
                "stepmark.traces.trace_messages_verb:messages",
                "Count the messages of each collective and size, and time them.",
                "trace messages traces/",
                "trace messages traces/ --curve latest --network-speedup 4",
            ),
        ),
        "kernels": (
            "Time by role, layer, module, operation or kernel.",
            builder(
                trace_options.KernelsOptions,
                "stepmark.traces.trace_kernels_verb:kernels",
                "Show which operations of the step the time of the GPU went to.",
                "trace kernels latest --by module",
            ),
        ),
        "compare": (
            "Two traces by operation: eager and compiled, before and after.",
            builder(
                trace_options.CompareTracesOptions,
                "stepmark.traces.trace_kernels_verb:compare",
                "Compare the time per step of two traces by operation or kernel.",
                "trace compare eager/ compiled/ --by op",
            ),
        ),
        "convert": (
            "Chakra, CSV, Parquet, or a trace of some steps and ranks for Perfetto.",
            builder(
                trace_options.ConvertOptions,
                "stepmark.traces.trace_workload:convert",
                "Write traces for other tools: tables, Chakra, or fewer steps and ranks.",
                "trace convert traces/ --to chakra --out chakra/",
            ),
        ),
        "critical-path": (
            "What each moment of a step waited for: host, GPU, network or another rank.",
            builder(
                trace_options.CriticalPathOptions,
                "stepmark.traces.trace_path_verb:run",
                "Show the critical path of a step (the middle one, or --steps) over all ranks.",
                "trace critical-path traces/ --steps 5",
            ),
        ),
        "to-workload": (
            "A measured step as a workload file, for stepmark workload and comm.",
            builder(
                trace_options.ToWorkloadOptions,
                "stepmark.traces.trace_workload:to_workload",
                "Write a step (the median one, or --steps N) as a workload: messages and "
                "computations of all ranks, with measured times.",
                "trace to-workload traces/ --out w.json",
            ),
        ),
    },
    default="breakdown",
)
