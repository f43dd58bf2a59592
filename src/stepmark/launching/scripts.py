"""Texts that start one stepmark process per host, or with torchrun one per rank.

A process that finds STEPMARK_HOSTS is the agent of its host: it starts and watches the host's
ranks. The agent of the first host leads.
"""

import os
import shlex
import sys
from collections.abc import Sequence

from stepmark.ground.outer_launcher import BIND, HOSTS
from stepmark.launching.launch_options import RESUME, LaunchOptions
from stepmark.measuring.job import KEY, NPROC, PORT
from stepmark.model.fabrics import Setting

_PORT = 29500
# the latter knows `module`
_SHELL = "#!/bin/bash"
_LOGIN_SHELL = "#!/bin/bash -l"
_HEX = "od -An -N16 -tx1 /dev/urandom | tr -d ' '"  # one line of 32 digits
_KEY = f'"$({_HEX})"'
_NO_PRESET = "# No fabric preset: NCCL chooses the network (stepmark launch --fabric list)."


def slurm(options: LaunchOptions, settings: Sequence[Setting]) -> str:
    """Return an sbatch script."""
    lines = [_LOGIN_SHELL if options.modules else _SHELL, *_directives(options, settings), ""]
    lines += [f"module load {shlex.quote(name)} || exit 2" for name in options.modules or ()]
    hosts = '"$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd,)"'
    port = str(options.port or '"$((20000 + SLURM_JOB_ID % 10000))"')
    agent = _agent(options, hosts, port)
    lines += [f"export {name}={value}" for name, value in agent.items()]
    lines += [f"export {KEY}={_KEY}", *_exports(settings)]
    root = options.out or "runs"
    place = "" if os.path.isabs(root) else '"$PWD"/'
    verb, *rest = options.words
    if verb == RESUME:  # its run is where it is
        lines += ["", f"out={place}{shlex.quote(root)}"]
        lines += [f'arguments=({verb} --out "$out" {shlex.join(rest)})']
    else:
        lines += [
            "",
            f'out={place}{shlex.quote(root)}/{options.name}-"$SLURM_JOB_ID"',
            'mkdir -p "$out" || exit 2',
            f'arguments=({verb} --out "$out" {shlex.join(rest)})',
        ]
    if options.requeue and verb != RESUME:
        lines += [
            'if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && compgen -G "$out/*/run.json" '
            "> /dev/null; then",
            '  arguments=(resume --out "$out" latest)',
            "fi",
        ]
    step = ["srun --export=ALL --kill-on-bad-exit=0 --cpu-bind=none"]
    if options.container:
        names = (*agent, KEY, *(setting.name for setting in settings))
        mounts = ['"$PWD:$PWD"', *(() if place else ('"$out:$out"',))]
        mounts += [shlex.quote(options.container_mounts)] if options.container_mounts else []
        step += [
            f"--container-image={shlex.quote(options.container)}",
            f"--container-mounts={','.join(mounts)}",
            '--container-workdir="$PWD"',
            f"--container-env={','.join(names)}",  # also where the image has values
        ]
    step.append(f'{_program(options)} "${{arguments[@]}}"')
    return "\n".join([*lines, " \\\n  ".join(step), ""])


def _directives(options: LaunchOptions, settings: Sequence[Setting]) -> list[str]:
    values = {
        "job-name": options.name,
        "nodes": str(options.nodes or 1),
        "ntasks-per-node": "1",
        "gpus-per-node": str(options.gpus_per_node) if options.gpus_per_node else None,
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "time": options.time,
        "nodelist": options.nodelist,
        "exclude": options.exclude,
        "signal": "TERM@60",  # a minute for what is being measured to be recorded
        "open-mode": "append",  # a restarted job keeps its output
        "output": "%x-%j.out",
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
    step = [
        f"mpirun --host {','.join(f'{host}:1' for host in hosts)} -np {len(hosts)}",
        "--map-by ppr:1:node --bind-to none",
        " ".join(f"-x {name}" for name in names),
        f"{_program(options)} {shlex.join(_command(options))}",
    ]
    lines = [_SHELL, *(f"export {name}={value}" for name, value in agent.items())]
    lines += [f"export {KEY}={_KEY}", *_exports(settings), " \\\n  ".join(step), ""]
    return "\n".join(lines)


def pssh(options: LaunchOptions, settings: Sequence[Setting], hosts: Sequence[str]) -> str:
    """Return a script for pssh. Secrets go through stdin: others can read command lines."""
    agent = _agent(options, shlex.quote(",".join(hosts)), str(options.port or _PORT))
    values = [f"{name}={value}" for name, value in agent.items()]
    values += _values(settings)
    names = _inherited(settings)
    reads = [f"read -r {KEY}", *(f"IFS= read -r {name}" for name in names)]
    remote = (
        f"{' && '.join(reads)} && export {' '.join((KEY, *names, *values))} && "
        f"cd {shlex.quote(os.getcwd())} && "
        f"exec {_program(options)} {shlex.join(_command(options))}"
    )
    prints = [f"printf '%s\\n' \"${name}\"" for name in names]
    assert options.hosts is not None
    is_file = os.path.isfile(options.hosts)
    where = (
        f"-h {shlex.quote(options.hosts)}" if is_file else f"-H {shlex.quote(' '.join(hosts))}"
    )
    return "\n".join(
        (
            _SHELL,
            *_remarks(settings),
            f"{{ {'; '.join((_HEX, *prints))}; }} |" if names else f"{_HEX} |",
            f"  pssh -I -i -t 0 -p {len(hosts)} {where} \\",
            f"  {shlex.quote(remote)}",
            "",
        )
    )


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
