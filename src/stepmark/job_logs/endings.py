"""Lines by which a job says that it ended well, each with the program that prints it."""

import re

# What each program prints; searched in a line without a launcher's tag.
# Not here: Megatron's "[after training is done]", which it prints before the last checkpoint
# and evaluation, and what one process of many prints ("Process 7 exits successfully").
ENDINGS = {
    # nccl-tests and rccl-tests, src/common.cu.
    "nccl-tests": re.compile(r"^#? ?Avg bus bandwidth +: |^# ?Collective test concluded: "),
    # transformers, trainer.py: the metrics of train().
    "Hugging Face Trainer": re.compile(r"['\"]?train_runtime['\"]? *[:=] *['\"]?\d"),
    # Megatron-LM, training.py: exit_interval and exit_duration_in_mins. Its "exiting program
    # after receiving SIGTERM." is no end of its own.
    "Megatron-LM": re.compile(r"exiting program (?:at iteration|after) \d"),
    # torchtitan, train.py; transformers; axolotl. Some print it after each epoch.
    "trainer": re.compile(
        r"^(?!.*\b[Ee]poch\b)(?:|.*(?:[\]:|>] ?|- |  ))"
        r"[Tt]raining (?:is |has )?(?:completed|complete|finished)"
        r"(?: successfully)?(?:[.!]? *$|[.!] Do not forget| after \d+ (?:steps|iterations))",
    ),
    # Lightning, loops/fit_loop.py.
    "Lightning": re.compile(r"`Trainer\.fit` stopped: `max_(?:steps|epochs|time)="),
    # mlcommons/logging; a run that did not converge has the status "aborted".
    "MLPerf": re.compile(r':::MLLOG .*"key": "run_stop".*"status": "success"'),
    # torch.distributed.elastic, agent/server/api.py.
    "torchrun": re.compile(r"worker group successfully finished"),
    # Our own last line of a watched job's output; another code is a failure.
    "stepmark watch": re.compile(r"^stepmark watch: the command ended with exit code 0$"),
    # Slurm: scontrol, seff, and the job's row (not a step's) of sacct.
    "Slurm": re.compile(
        r"\bJobState=COMPLETED\b|^State: COMPLETED \(exit code 0\)"
        r"|^\d{1,12}(?:_\d{1,9})?[ |]+\S.*\bCOMPLETED[ |]+0:0",
    ),
    # kubectl: describe and get pods. "Reason: Completed" may be an init container's.
    "Kubernetes": re.compile(r"^Status: +Succeeded\b|^\S+ +0/\d+ +Completed +\d"),
    "LSF": re.compile(r"^Successfully completed\.$"),
    "PBS": re.compile(r"^\s*[Ee]xit_status ?= ?0\s*$"),
}
# A row of a job or pod that has not ended: no list with one states an end.
NOT_ENDED = re.compile(
    r"^\d{1,12}(?:_\d{1,9})?(?:\.\w+)?[ |]+\S.*\b(?:RUNNING|PENDING|COMPLETING)\b"
    r"|^\S+ +\d+/\d+ +(?:Running|Pending|Terminating|Init:\S+|ContainerCreating|Unknown)\b"
    r"|^Status: +(?:Running|Pending)\b"
)
# What a job prints while it runs: after an end, another run or stage began.
MORE_WORK = re.compile(
    rb"(?i)\b(?:iteration|iter|step|epoch)\b[ \[:=#]{0,16}\d|\*{3,} Running training"
)
# Words of a line after an end that no rule knows, and that may state a failure.
DOUBTFUL = re.compile(
    r"rror|ailed|ailure|atal|CRITICAL|SIG[A-Z]|[Pp]anic|\bdied\b|[Kk]illed|Terminated"
    r"|received SIG|\bXid\b|imeout|xited|[Rr]eturn code|\brc=|command not found|ExitCode"
)


def ending_of(line: str) -> str:
    """Return what prints such a line at its end; "" for any other line."""
    return next((name for name, pattern in ENDINGS.items() if pattern.search(line)), "")
