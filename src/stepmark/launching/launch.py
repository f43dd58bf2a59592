"""stepmark launch: print or submit what starts a measuring verb on several hosts."""

import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

from stepmark.ground.errors import ConfigError, not_one_of
from stepmark.ground.host_names import parse_hosts, read_hosts
from stepmark.ground.options import dashed, plain
from stepmark.ground.redaction import REDACTED, redact_variable, redact_words
from stepmark.launching import scripts, slurm
from stepmark.launching.launch_options import CHECK, TARGETS, LaunchOptions, SlurmJob
from stepmark.model.fabrics import Setting, load_fabrics

_HOST_SCRIPTS: dict[str, Callable[[LaunchOptions, Sequence[Setting], Sequence[str]], str]] = {
    "torchrun": scripts.torchrun,
    "mpirun": scripts.mpirun,
    "pssh": scripts.pssh,
    "ssh": scripts.ssh,
}
_LIST = "list"


def run(options: LaunchOptions) -> int:
    """Print the script, or submit it and follow the job. Returns the exit code."""
    if options.fabric == (_LIST,):
        _check_others(options, "fabric")
        for fabric in load_fabrics().values():
            sys.stdout.write(f"{fabric.name}: {fabric.about}\n")
            for setting in fabric.settings:
                sys.stdout.write(f"  {setting.name}={setting.value}  # {setting.why}\n")
                sys.stdout.write(f"    {setting.source}\n")
        return 0
    cancels = options.on_interrupt == "cancel"
    target = _target(options)
    if target == "follow":
        assert options.follow is not None
        _check_others(options, "follow", "on_interrupt")
        return slurm.follow(options.follow, cancel=cancels)
    _check(options, target)
    if options.words[0] == CHECK and options.torchrun:
        allowed = "another target: ranks of torchrun wait for one another"
        raise ConfigError("torchrun", "given", allowed)
    if options.words[0] == CHECK and options.requeue:
        raise ConfigError("requeue", "given", "only for a verb that can resume its run")
    settings = settings_of(options)
    if target != "slurm":
        hosts = read_hosts(options.hosts or "", has_users=target != "ssh")
        sys.stdout.write(_HOST_SCRIPTS[target](options, settings, hosts))
        return 0
    script = scripts.slurm(options, settings, _num_nodes(options))
    if not options.submit:
        sys.stdout.write(script)
        return 0
    job_id = slurm.submit(script)
    sys.stderr.write(f"job {job_id}: submitted\n")
    pattern = options.output or scripts.OUTPUT
    output = Path(os.getcwd(), pattern.replace("%x", options.name).replace("%j", job_id))
    return slurm.follow(job_id, output, cancel=cancels)


def _target(options: LaunchOptions) -> str:
    named = [name for name in (*TARGETS, "follow") if getattr(options, name)]
    targets = ", ".join(f"--{name}" for name in (*TARGETS, "follow"))
    if not named:
        raise ConfigError("target", None, f"give one of {targets}")
    if len(named) > 1:
        raise ConfigError(named[1], "given", f"it cannot stand beside --{named[0]}")
    return named[0]


def _check_others(options: LaunchOptions, *names: str) -> None:
    """Refuse what has no effect beside the first of these options. Raises ConfigError."""
    for name, value in plain(options).items():
        if name not in names:
            text = " ".join(value) if name == "words" else value
            raise ConfigError(dashed(name), text, f"it has no effect beside --{names[0]}")


def _check(options: LaunchOptions, target: str) -> None:
    """Refuse options that contradict each other. Raises ConfigError."""
    is_slurm = target == "slurm"
    ranks_of = "nproc-per-node" if options.gpus_per_node == 0 else "gpus-per-node"
    rules: tuple[tuple[str, object, object, str], ...] = (
        ("command", None, options.words, "give -- and a verb that measures"),
        (
            "command",
            " ".join(redact_words(options.words)),
            redact_words(options.words) == options.words,
            "without a secret: pass it by --export NAME",
        ),
        (
            "hosts",
            options.hosts,
            not (is_slurm and options.hosts),
            "only without --slurm; use --nodelist",
        ),
        (
            "hosts",
            None,
            is_slurm or options.hosts,
            "give --hosts a,b or a file with one per line",
        ),
        *(
            (
                dashed(name),
                getattr(options, name),
                is_slurm or getattr(options, name) in (None, False, "leave"),
                "only with --slurm",
            )
            for name in ("nodes", *(field.name for field in fields(SlurmJob)))
        ),
        (
            "nproc-per-node",
            options.nproc_per_node,
            not (options.gpus_per_node and options.nproc_per_node),
            "only without GPUs: there is one rank per GPU",
        ),
        (
            ranks_of,
            None if options.nproc_per_node is None else 0,
            options.ranks_per_host,
            "--gpus-per-node, or --nproc-per-node for CPU ranks",
        ),
        (
            "container-mounts",
            options.container_mounts,
            options.container or not options.container_mounts,
            "only with --container",
        ),
    )
    for name, value, is_kept, allowed in rules:
        if not is_kept:
            raise ConfigError(name, value, allowed)


def settings_of(options: LaunchOptions) -> tuple[Setting, ...]:
    """Return the variables of --fabric and of --export, which overrides. Raises ConfigError."""
    settings: dict[str, Setting] = {}
    fabrics = load_fabrics()
    for name in options.fabric or ():
        if name not in fabrics:
            raise not_one_of("fabric", name, fabrics, f", or {_LIST}")
        settings |= {setting.name: setting for setting in fabrics[name].settings}
    for text in options.export:
        for pair in re.split(r",(?=[A-Za-z_]\w*=)", text):  # values may have commas
            name, equals, value = pair.partition("=")
            if equals and redact_variable(name, value) != value:
                raise ConfigError(
                    "export",
                    f"{name}={REDACTED}",
                    f"use --export {name}, which passes the value on without writing it",
                )
            for each in [name] if equals else name.split(","):
                if not re.fullmatch(r"[A-Za-z_]\w*", each):
                    raise ConfigError("export", pair, "NAME or NAME=VALUE, with commas between")
                if not equals and options.submit and each not in os.environ:
                    raise ConfigError("export", each, "a variable that is set, or NAME=VALUE")
                settings[each] = Setting(
                    name=each, value=value if equals else None, why="--export"
                )
    return tuple(settings.values())


def _num_nodes(options: LaunchOptions) -> int:
    """Return the hosts of a Slurm job: by default those of --nodelist. Raises ConfigError."""
    if options.nodelist is None:
        return options.nodes or 1
    if "/" in options.nodelist:  # a file that Slurm reads
        if options.nodes is None:
            raise ConfigError("nodes", None, "give the number of hosts in --nodelist's file")
        return options.nodes
    num_named = len(parse_hosts(options.nodelist, "nodelist"))
    if options.nodes is not None and options.nodes < num_named:
        allowed = f"at least the {num_named} hosts that --nodelist names"
        raise ConfigError("nodes", options.nodes, allowed)
    return options.nodes or num_named
