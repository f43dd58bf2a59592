"""Texts that start one stepmark process per host, or with torchrun one per rank.

A process that finds STEPMARK_HOSTS is the agent of its host: it starts and watches the host's
ranks. The agent of the first host leads.
"""

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace

from stepmark.ground.outer_launcher import BIND, HOSTS
from stepmark.launching.launch_options import CHECK, RESUME, LaunchOptions, slurm_time
from stepmark.launching.steps import NETWORK, Step, check_steps, time_limit_s
from stepmark.measuring.job import HOST_RANK, KEY, NPROC, PORT
from stepmark.model.fabrics import Setting

OUTPUT = "%x-%j.out"  # name of the job, and its id
_PORT = 29500
# the latter knows `module`
_SHELL = "#!/bin/bash"
_LOGIN_SHELL = "#!/bin/bash -l"
_HEX = "od -An -N16 -tx1 /dev/urandom | tr -d ' '"  # one line of 32 digits
_KEY = f'"$({_HEX})"'
_OUT = "@OUT@"  # stands in a command for hosts where the script has its folder
_NO_PRESET = "# No fabric preset: NCCL chooses the network (stepmark launch --fabric list)."


def slurm(options: LaunchOptions, settings: Sequence[Setting], num_hosts: int) -> str:
    """Return an sbatch script."""
    steps = [Step(why="", arguments='"${arguments[@]}"')]
    if options.words[0] == CHECK:
        steps = check_steps(options, num_hosts)
    shell = _LOGIN_SHELL if options.modules else _SHELL
    lines = [shell, *_directives(options, settings, num_hosts), ""]
    lines += [f"module load {shlex.quote(name)} || exit 2" for name in options.modules or ()]
    hosts = '"$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd,)"'
    port = str(options.port or '"$((20000 + SLURM_JOB_ID % 10000))"')
    agent = _agent(options, hosts, port)
    lines += [f"export {name}={value}" for name, value in agent.items()]
    lines += [f"export {KEY}={_KEY}", *_exports(settings)]
    root = options.out or "runs"
    place = "" if os.path.isabs(root) else '"$PWD"/'
    verb, *rest = options.words
    out = f"{place}{shlex.quote(root)}"
    if verb != RESUME:  # its run is where it is
        out += f'/{options.name}-"$SLURM_JOB_ID"'
    lines += ["", f"out={out}"]
    if verb != RESUME:
        lines.append('mkdir -p "$out" || exit 2')
    if verb == CHECK:
        lines.append(f'hosts="${HOSTS}"')
    else:
        lines.append(f'arguments=({verb} --out "$out" {shlex.join(rest)})')
    if options.requeue and verb != RESUME:
        lines += [
            'if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && compgen -G "$out/*/run.json" '
            "> /dev/null; then",
            '  arguments=(resume --out "$out" latest)',
            "fi",
        ]
    container = []
    if options.container:
        names = (*agent, KEY, *(setting.name for setting in settings))
        mounts = ['"$PWD:$PWD"', *(() if place else ('"$out:$out"',))]
        mounts += [shlex.quote(options.container_mounts)] if options.container_mounts else []
        container = [
            f"--container-image={shlex.quote(options.container)}",
            f"--container-mounts={','.join(mounts)}",
            '--container-workdir="$PWD"',
            f"--container-env={','.join(names)}",  # also where the image has values
        ]
    for step in steps:
        words = ["srun --export=ALL --kill-on-bad-exit=0 --cpu-bind=none", *container]
        if not step.on_all_hosts:
            words[0] += " --nodes=1 --ntasks=1"
        command = [*words, f"{_program(options)} {step.arguments}"]
        lines += _with_reason(step, " \\\n  ".join(command))
    return "\n".join([*lines, ""])


def _with_reason(step: Step, command: str) -> list[str]:
    """Return the lines of a step."""
    lines = ["", f"# {step.why}"] if step.why else []
    if not step.on_all_hosts:
        lines.append(NETWORK)
    return [*lines, f"{NPROC}={step.nproc} {command}" if step.nproc else command]


def _directives(
    options: LaunchOptions, settings: Sequence[Setting], num_hosts: int
) -> list[str]:
    time = options.time
    if time is None and options.words[0] == CHECK:
        time = slurm_time(time_limit_s(options, num_hosts))
    values = {
        "job-name": options.name,
        "nodes": str(num_hosts),
        "ntasks-per-node": "1",
        "gpus-per-node": str(options.gpus_per_node) if options.gpus_per_node else None,
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "time": time,
        "nodelist": options.nodelist,
        "exclude": options.exclude,
        "signal": "TERM@60",  # a minute for what is being measured to be recorded
        "open-mode": "append",  # a restarted job keeps its output
        "output": options.output or OUTPUT,
        "export": ",".join(("ALL", *_inherited(settings))) if _inherited(settings) else "",
    }
    flags = ["exclusive", "requeue" if options.requeue else "no-requeue"]
    return [
        *(f"#SBATCH --{name}={shlex.quote(text)}" for name, text in values.items() if text),
        *(f"#SBATCH --{name}" for name in flags),
    ]


def mpirun(options: LaunchOptions, settings: Sequence[Setting], hosts: Sequence[str]) -> str:
    """Return a script for Open MPI's mpirun: one process per host."""
    agent = _agent(options, shlex.quote(",".join(hosts)), str(options.port or _PORT))
    names = (*agent, KEY, *(setting.name for setting in settings))
    start = [
        f"mpirun --host {','.join(f'{host}:1' for host in hosts)} -np {len(hosts)}",
        "--map-by ppr:1:node --bind-to none",
        " ".join(f"-x {name}" for name in names),
    ]
    lines = [_SHELL, *(f"export {name}={value}" for name, value in agent.items())]
    lines += [f"export {KEY}={_KEY}", *_exports(settings)]
    steps, folder = _steps(options, hosts)
    for step in steps:
        words = [*(start if step.on_all_hosts else ()), f"{_program(options)} {step.arguments}"]
        folder += _with_reason(step, " \\\n  ".join(words))
    return "\n".join([*lines, *folder, ""])


def _steps(options: LaunchOptions, hosts: Sequence[str]) -> tuple[list[Step], list[str]]:
    """Return the steps of a script without Slurm, and the lines before them."""
    if options.words[0] != CHECK:
        return [Step(why="", arguments=shlex.join(_command(options)))], []
    root = options.out or "runs"
    place = "" if os.path.isabs(root) else '"$PWD"/'
    # A new folder for each check: files of an earlier one would count as those of this one.
    out = f'{place}{shlex.quote(root)}/{options.name}-"$(date +%Y%m%d-%H%M%S)"'
    lines = ["", f"out={out}", 'mkdir -p "$out" || exit 2']
    return check_steps(options, len(hosts)), [*lines, f"hosts={shlex.quote(','.join(hosts))}"]


def pssh(options: LaunchOptions, settings: Sequence[Setting], hosts: Sequence[str]) -> str:
    """Return a script for pssh. Secrets go through stdin: others can read command lines."""
    names = _inherited(settings)
    prints = [f"printf '%s\\n' \"${name}\"" for name in names]
    assert options.hosts is not None
    is_file = os.path.isfile(options.hosts)
    where = (
        f"-h {shlex.quote(options.hosts)}" if is_file else f"-H {shlex.quote(' '.join(hosts))}"
    )
    start = [
        f"{{ {'; '.join((_HEX, *prints))}; }} |" if names else f"{_HEX} |",
        f"  pssh -I -i -t 0 -p {len(hosts)} {where} \\",
    ]
    steps, lines = _steps(options, hosts)
    for step in steps:
        command = f"{_program(options)} {step.arguments}"
        if step.on_all_hosts:
            remote = _on_host(options, settings, hosts, step)
            command = "\n".join((*start, f"  {remote}"))
        lines += _with_reason(replace(step, nproc=None), command)
    return "\n".join([_SHELL, *_remarks(settings), *lines, ""])


def ssh(options: LaunchOptions, settings: Sequence[Setting], hosts: Sequence[str]) -> str:
    """Return a script for ssh alone. The first host's exit code and stdout are the script's."""
    secrets = " ".join(f'"${name}"' for name in ("key", *_inherited(settings)))
    lines = [
        *_remarks(settings),
        f"key={_KEY}",
        f"names=({' '.join(map(shlex.quote, hosts))})",
        "start() {",
        f"  printf '%s\\n' {secrets} |",
        f'    ssh "${{names[$1]}}" "export {HOST_RANK}=$1; $command"',
        "}",
    ]
    others = 'for rank in "${!names[@]}"; do [ "$rank" = 0 ] || start "$rank" & done'
    steps, folder = _steps(options, hosts)
    lines += folder
    for step in steps:
        command = f"{_program(options)} {step.arguments}"
        if step.on_all_hosts:
            remote = _on_host(options, settings, hosts, step)
            command = f"command={remote}\n{others}\nstart 0; code=$?; wait; (exit $code)"
        lines += _with_reason(replace(step, nproc=None), command)
    return "\n".join([_SHELL, *lines, ""])


def _on_host(
    options: LaunchOptions, settings: Sequence[Setting], hosts: Sequence[str], step: Step
) -> str:
    """Return the command that starts the agent of a host, quoted; secrets are its stdin."""
    nproc = {NPROC: str(step.nproc)} if step.nproc else {}
    agent = _agent(options, shlex.quote(",".join(hosts)), str(options.port or _PORT)) | nproc
    names = _inherited(settings)
    reads = [f"read -r {KEY}", *(f"IFS= read -r {name}" for name in names)]
    values = [*(f"{name}={value}" for name, value in agent.items()), *_values(settings)]
    parts = [*reads, f"export {' '.join((KEY, *names, *values))}"]
    if '"$out"' in step.arguments:
        parts.append(f"out={_OUT}")
    parts += [f"cd {shlex.quote(os.getcwd())}", f"exec {_program(options)} {step.arguments}"]
    return shlex.quote(" && ".join(parts)).replace(_OUT, """'"${out@Q}"'""")


def torchrun(options: LaunchOptions, settings: Sequence[Setting], hosts: Sequence[str]) -> str:
    """Return a command per host, each to be run there."""
    lines = _remarks([setting for setting in settings if setting.value is not None])
    values = _values(settings)
    program = "torchrun"
    if options.python:
        program = f"{shlex.quote(options.python)} -m torch.distributed.run"
    for rank, host in enumerate(hosts):
        words = (
            *(["env", *values] if values else []),
            f"{program} --nnodes {len(hosts)} --node-rank {rank}",
            f"--nproc-per-node {options.ranks_per_host}",
            f"--master-addr {hosts[0]} --master-port {options.port or _PORT}",
            f"-m stepmark {shlex.join(_command(options))}",
        )
        lines += [f"# {host}", " ".join(words)]
    return "\n".join([*lines, ""])


def _agent(options: LaunchOptions, hosts: str, port: str) -> dict[str, str]:
    """Return the variables by which a process knows that it is an agent, quoted for a shell."""
    variables = {
        HOSTS: hosts,
        PORT: port,
        NPROC: str(options.ranks_per_host),
    }
    return variables | ({BIND: "closest"} if options.gpus_per_node else {})


def _program(options: LaunchOptions) -> str:
    if options.container and not options.python:
        return "stepmark"
    return f"{shlex.quote(options.python or sys.executable)} -m stepmark"


def _command(options: LaunchOptions) -> list[str]:
    """Return the verb and its arguments, with --out first: a `--` may follow."""
    verb, *rest = options.words
    return [verb, *(("--out", options.out) if options.out else ()), *rest]


def _exports(settings: Sequence[Setting]) -> list[str]:
    """Return what exports the variables, or ends a script that does not inherit one."""
    lines = [
        _required(setting.name)
        if setting.value is None
        else f"export {setting.name}={shlex.quote(setting.value)}  # {setting.why}"
        for setting in settings
    ]
    return lines if any(setting.source for setting in settings) else [_NO_PRESET, *lines]


def _values(settings: Sequence[Setting]) -> list[str]:
    """Return NAME=VALUE of the variables whose values a command line may show."""
    return [f"{s.name}={shlex.quote(s.value)}" for s in settings if s.value is not None]


def _inherited(settings: Sequence[Setting]) -> list[str]:
    return [setting.name for setting in settings if setting.value is None]


def _required(name: str) -> str:
    return (
        f"[[ -v {name} && ${name} != *$'\\n'* ]] || {{ "
        f'echo "{name} must be set where the job is started, to one line" >&2; exit 2; }}'
    )


def _remarks(settings: Sequence[Setting]) -> list[str]:
    """Return what `_exports` says, where the variables stand in a command."""
    return [
        f"# {line.removeprefix('export ')}" if line.startswith("export ") else line
        for line in _exports(settings)
    ]
