"""Inputs of `stepmark predict`: a case or a workload, with what a run measured or nothing."""

import contextlib
import operator
import shlex
import socket
from collections.abc import Sequence
from dataclasses import fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from stepmark.cases.comm_curve import Curve
from stepmark.cases.record import Measured, RunInfo
from stepmark.cases.train_case import TrainCase
from stepmark.collectives.network_fit import placement_of, with_hosts_of
from stepmark.framework_files import configuration
from stepmark.ground.errors import ConfigError, not_one_of
from stepmark.ground.options import argv
from stepmark.measuring.machine import Machine, machine
from stepmark.model.device import DeviceSpec, find_device, find_device_by_alias, unknown_device
from stepmark.model.network_options import NetworkChoice
from stepmark.model.systems import network_of
from stepmark.predictions.comm import CommCosts
from stepmark.predictions.contention import is_profiled, sheet_slowdowns
from stepmark.predictions.costs import sources
from stepmark.predictions.hosts import DEFAULT, HOST, HostTimes, launch_of, load_hosts
from stepmark.predictions.inputs import HostOf, Inputs
from stepmark.predictions.note import Note, Topic, noted
from stepmark.predictions.predict_options import PredictOptions
from stepmark.step.workload import Group, Workload
from stepmark.store.reader import find_run, list_runs, read_info, read_records
from stepmark.training import train_plan
from stepmark.training.train_options import TrainOptions, given_options, options_of
from stepmark.workloads import workload_files
from stepmark.workloads.file_times import FileTimes
from stepmark.workloads.models import is_model_file, read_models
from stepmark.workloads.rules.pytorch.case import of_case

_NO_EFFECT = ("text", "text_file", "workers", "seed", "lr", "compile_fallback")


def _measured_parts() -> Any:
    """Return the module of measured parts, which reads traces: most predictions have none."""
    from stepmark.predictions import calibration  # noqa: PLC0415 - numpy

    return calibration


def inputs_of(options: PredictOptions, workload: Workload | None = None) -> Inputs:
    """Return what a prediction is made of. workload: the step, if no option names it.

    Raises ConfigError.
    """
    for name in _NO_EFFECT:
        value = getattr(options, name)
        if value not in (None, False):
            raise ConfigError(name, value, "left out: it does not change a prediction")
    if options.config is not None:
        configuration.read(options.config)  # says why it is no framework's file
    if options.force and not (options.calibration or options.from_run):
        raise ConfigError("force", "given", "only with --calibration or --from-run")
    file = _workload_file(options)
    if workload is not None or file is not None:
        return _of_workload(options, workload, file or "")
    base = find_run(options.runs, options.from_run) if options.from_run else None
    here = _machine(options, base)
    own = _options_of_run(base, options) if base else {}
    train = TrainOptions(**{**own, **given_options(options)})
    case = _case(options, train, here)
    path = _calibration(options, here, case, base)
    device = find_device(here.name)
    if path is None and device is None:
        allowed = "a calibration of this machine (stepmark calibrate), or --device and its name"
        raise ConfigError("calibration", "missing", allowed)
    try:
        inputs = of_training(case, path, here.name, options=options)
    except ConfigError as error:
        if error.field == "calibration" and path == base:
            raise ConfigError("from-run", error.value, error.allowed) from None
        raise
    notes = _run_notes(options, train, here, case, base) if base else []
    if path:
        notes += _origin_notes(path, here)
    else:
        notes += _unused(options, train, here, case, inputs.workload)
    return replace(inputs, notes=(*inputs.notes, *notes))


def of_training(
    case: TrainCase,
    run: Path | None,
    device_name: str = "",
    *,
    options: PredictOptions | None = None,
) -> Inputs:
    """Return the inputs of a case by what a run measured; by the data sheet without one.

    options: choose the network, which is the usual one of the device without them.
    """
    force = options is not None and options.force
    device = find_device(device_name)
    workload = of_case(case)
    inputs = Inputs(
        name=f"{case.model.name} {case.strategy}",
        workload=workload,
        case=case,
        device=device,
        device_name=device_name,
        compute=sources(device, settings=workload.settings),
    )
    if run is None:
        inputs.check_products()
        inputs = _with_host(inputs, options)
    else:
        _refuse_host(options, "the calibration has the host's time")
        inputs = _measured_parts().calibrated(inputs, run, force=force)
    if options is None:
        with contextlib.suppress(ConfigError):  # of a device without a usual network
            inputs = _with_network(inputs, None)
    else:
        inputs = _with_network(inputs, options)
    return inputs if run else _with_sheet_slowdowns(inputs)


def _with_host(inputs: Inputs, options: PredictOptions | None) -> Inputs:
    """Return the inputs with the host that options name, which is a typical one without them.

    Raises ConfigError.
    """
    case = inputs.case
    name = (options and options.host) or DEFAULT
    host_s: HostOf
    if options is None or name in load_hosts():
        host_s = times = HostTimes(
            load_hosts()[name], inputs.workload, launch_of(inputs.workload, case)
        )
        note = times.note()
        name = f"{name} host"
    else:
        path = _run_of_host(options.runs, name)
        if case is None:
            allowed = f"one of {', '.join(load_hosts())}: a run has the host of its own step"
            raise ConfigError("host", name, allowed)
        host_s = _measured_parts().host_of_run(path, case)
        note = f"host time: the host's part of run {path.name}"
        name = f"host of run {path.name}"
    notes = (*inputs.notes, note)
    return replace(inputs, host_s=host_s, host_is_known=True, host=name, notes=notes)


def _with_sheet_slowdowns(inputs: Inputs) -> Inputs:
    """Return the inputs with how much kernels and collectives slow each other, where known.

    Collectives were profiled inside a host; the network bounds those between hosts.
    """
    if inputs.device is None or not is_profiled(inputs.device) or inputs.num_ranks == 1:
        return inputs
    slowdowns = sheet_slowdowns()
    all_ranks = Group(digits=((inputs.num_ranks, 1),))
    spans_hosts = CommCosts(inputs.curves, inputs.network).joins_hosts(all_ranks)
    return replace(
        inputs,
        compute_slowdown=slowdowns.compute,
        comm_slowdown=None if spans_hosts else slowdowns.comm,
    )


def _run_of_host(runs: Path, name: str) -> Path:
    try:
        return find_run(runs, name)
    except ConfigError:
        raise not_one_of("host", name, load_hosts(), " or a run") from None


def _refuse_host(options: PredictOptions | None, reason: str) -> None:
    if options and options.host:
        raise ConfigError("host", options.host, f"left out: {reason}")


def _with_network(inputs: Inputs, options: PredictOptions | None) -> Inputs:
    """Return the inputs with links between ranks, and curves that options name."""
    curves: Sequence[Curve] = []
    if options and options.curve:
        from stepmark.collectives.measured_curves import read_curves  # noqa: PLC0415 - formats

        curves = read_curves(options.curve, options.runs)
    network = None
    names = [field.name for field in fields(NetworkChoice)]
    given = [name for name in names if getattr(options, name, None) is not None]
    if inputs.device and inputs.num_ranks > 1 and not inputs.is_on_cpu:
        known = (*curves, *inputs.curves)
        choice = with_hosts_of(known, inputs.num_ranks, options) if known else options
        network = network_of(inputs.device, inputs.num_ranks, choice)
        if curves and network and not any(placement_of(each, network) for each in curves):
            most = max(curve.num_ranks for curve in curves)
            allowed = f"of ranks that {network.name} joins, not of {most}"
            raise ConfigError("curve", options and options.curve, allowed)
    elif given:
        raise ConfigError(given[0], "given", "only with --device and several ranks")
    return replace(
        inputs,
        network=network,
        sends_by_network=bool(given),
        curves=(*curves, *inputs.curves),
    )


def _run_notes(
    options: PredictOptions, train: TrainOptions, here: Machine, case: TrainCase, base: Path
) -> list[str]:
    """Return a note on what decides the step and is the run's, which has another device."""
    of_run = _machine(replace(options, device=None), base)
    if (of_run.device, of_run.name) == (here.device, here.name or of_run.name):
        return []
    given = given_options(options)
    kept = dict[str, Any]()
    for name, value in given_options(train).items():
        if name in given or name in ("models", "model"):
            continue
        with contextlib.suppress(ConfigError):  # another option needs it
            if _case(options, _without(name, train), here).case_id == case.case_id:
                continue
        kept[name] = value
    if not kept:
        return []
    words = shlex.join(argv(TrainOptions(**kept)))
    text = f"the step keeps these options of the run, which is of {of_run.name}: {words}"
    return [Note.of(Topic.OPTIONS, text)]


def _unused(
    options: PredictOptions,
    train: TrainOptions,
    here: Machine,
    case: TrainCase,
    workload: Workload,
) -> list[str]:
    """Return a note on the given options without which the data sheet's step is the same."""
    names: list[str] = []
    for name in reversed(given_options(train)):  # --compile-mode before --compile
        fewer = _without(name, train)
        try:
            without = _case(options, fewer, here)
            if _sizes(without) != _sizes(case) or without.case_id == case.case_id:
                continue
            step = of_case(without)
        except ConfigError:  # another option needs it
            continue
        chosen = operator.itemgetter("compile", "attention_backend")
        parts = ((w.blocks, w.stages, w.groups, chosen(w.settings)) for w in (workload, step))
        if operator.eq(*parts) and launch_of(step, without) is launch_of(workload, case):
            names.append(name)
            train = fewer
    shown = ", ".join(f"--{name.replace('_', '-')}" for name in names)
    text = f"by the data sheet the step takes as long without {shown}"
    return [Note.of(Topic.OPTIONS, text)] if names else []


def _without(name: str, train: TrainOptions) -> TrainOptions:
    return replace(train, **{name: getattr(TrainOptions(), name)})


def _sizes(case: TrainCase) -> tuple[object, ...]:
    """Return what no two equal steps differ in; workloads take longer to compare."""
    return case.model, case.parallel, case.mbs, case.grad_accum


def _workload_file(options: PredictOptions) -> str | None:
    """Return the argument if it is a file or folder that is no model's config."""
    if len(options.models) != 1:
        return None
    path = Path(options.models[0])
    is_there = options.models[0] == "-" or path.exists()
    is_config = path.name == "config.json" or (path / "config.json").is_file()
    is_config |= path.suffix == ".toml" or is_model_file(path)
    return options.models[0] if is_there and not is_config else None


def _of_workload(options: PredictOptions, workload: Workload | None, name: str) -> Inputs:
    """Return the inputs of a workload; None: it is read from the file of this name."""
    workload = workload or workload_files.read(name)  # first of all whether it is one
    given = {**given_options(options), "gbs": options.gbs, "from_run": options.from_run}
    for option, value in given.items():
        if option != "models" and value is not None:
            allowed = "left out: a workload file says what its step is"
            raise ConfigError(option, "given", allowed)
    if not workload.stages:
        allowed = "a workload with the operations of a step"
        raise ConfigError("workload", name or workload.name, allowed)
    workload.check()
    device = _spec(options.device) if options.device else None
    own = find_device(str(workload.settings.get("devices")))  # of a trace
    file = FileTimes(workload)
    is_timed = file.has_any and (not options.device or device == own)
    path = find_run(options.runs, options.calibration) if options.calibration else None
    here = Machine(device="cuda", name=device.names[0] if device else "", is_here=False)
    if path is not None:
        _check_device(read_info(path), here, force=options.force)
    elif device is None:
        device = (own if is_timed else None) or find_device(machine(None).name)
        if device is None and not is_timed:
            raise ConfigError("device", "missing", "the name of a device, e.g. h200")
    inputs = Inputs(
        name=workload.name,
        workload=workload,
        file=file,
        times_of_file=is_timed,
        device=device,
        device_name=device.names[0] if device else "unknown",
        compute=sources(device, file=file, settings=workload.settings, of_file=is_timed),
        host_s=file.host_s,
        host_is_known=file.has_host,
    )
    if is_timed or file.has_host:  # also for another device
        _refuse_host(options, "the file has times of its own")
    else:
        inputs = _with_host(inputs, options)
    if path is None:
        if is_timed:
            return _with_network(inputs, options)
        inputs.check_products()
        return _with_sheet_slowdowns(_with_network(inputs, options))
    inputs = _with_network(
        _measured_parts().calibrated(inputs, path, force=options.force), options
    )
    return replace(inputs, notes=(*inputs.notes, *_origin_notes(path, here)))


def _spec(name: str) -> DeviceSpec:
    spec = find_device_by_alias(name)
    if spec is None:
        raise unknown_device(name)
    return spec


def _machine(options: PredictOptions, base: Path | None) -> Machine:
    """Return the machine that is predicted: the one of --device, of the run, or this one."""
    if options.device in ("cpu", "cuda"):
        return machine(options.device)
    if options.device:
        spec = _spec(options.device)
        return replace(machine(spec.key, dry_run=True), assumes_host=False)
    if base is None and options.calibration:
        base = find_run(options.runs, options.calibration)
    if base is None:
        return machine(None)
    info = read_info(base)
    devices = info.environment.devices
    if any(record.case.device == "cpu" for record in read_records(base)):
        return Machine(device="cpu", name=devices[0].name)
    first = devices[0]
    return Machine(
        device="cuda",
        name=first.name,
        num_accelerators=None,
        memory_bytes=first.memory_bytes,
        is_here=False,
    )


def _case(options: PredictOptions, train: TrainOptions, here: Machine) -> TrainCase:
    """Return the case of these options. Raises ConfigError for none or several."""
    if options.gbs is not None:
        train = _without("grad_accum", train)
        if (train.pp or 1) > 1:
            train = _without("mbs", _without("pp_microbatches", train))
    read_models(",".join(train.model_names))  # a wrong name goes before a missing --nproc
    world_size = here.num_ranks(train.nproc, train_plan.default_nproc(train, here.device))
    case = train_plan.only_case(train, here.device, world_size)
    if options.gbs is None:
        return case
    ranks = case.parallel.data_ranks
    if case.parallel.pp > 1:
        changed = _one_pass(options, case, ranks)
    else:
        changed = _accumulated(options, case, ranks)
    return train_plan.only_case(replace(train, **changed), here.device, world_size)


def _accumulated(options: PredictOptions, case: TrainCase, ranks: int) -> dict[str, Any]:
    """Return the option with which micro-steps one after the other add up to --gbs."""
    per_micro_step = case.mbs * ranks
    assert options.gbs is not None
    if options.gbs < 1 or options.gbs % per_micro_step:
        allowed = f"a multiple of --mbs x data ranks ({per_micro_step})"
        raise ConfigError("gbs", options.gbs, allowed)
    count = options.gbs // per_micro_step
    grad_accum = given_options(options).get("grad_accum", count)
    if grad_accum != count:
        allowed = f"--mbs x data ranks ({per_micro_step}) x --grad-accum ({grad_accum})"
        raise ConfigError("gbs", options.gbs, allowed)
    return {"grad_accum": count}


def _one_pass(options: PredictOptions, case: TrainCase, ranks: int) -> dict[str, Any]:
    """Return the options with which a pipeline runs --gbs in one pass of micro-batches.

    --mbs is then a micro-batch, as in Megatron; --grad-accum divides the batch into passes.
    """
    given = given_options(options)
    count = given.get("grad_accum", 1)
    micro = (options.mbs or (1,))[0]
    assert options.gbs is not None
    if options.gbs < 1 or options.gbs % (micro * ranks * count):
        factors = f"--mbs x data ranks{' x --grad-accum' if count > 1 else ''}"
        allowed = f"a multiple of {factors} ({micro * ranks * count})"
        raise ConfigError("gbs", options.gbs, allowed)
    num_sequences = options.gbs // (ranks * count)
    parts = given.get("pp_microbatches", num_sequences // micro)
    if (options.mbs and parts * micro != num_sequences) or num_sequences % parts:
        allowed = f"{num_sequences // micro}, with which the micro-batches add up to --gbs"
        raise ConfigError("pp-microbatches", parts, allowed)
    return {"mbs": (num_sequences,), "pp_microbatches": parts, "grad_accum": count}


def _options_of_run(base: Path, given: PredictOptions) -> dict[str, Any]:
    """Return the options of the training step that the run measured, but for those given.

    The step of a calibration has all layers, as its part for the host has them. Raises
    ConfigError where a run has several steps and what is given does not tell which.
    """
    cases = [
        record.train
        for record in read_records(base)
        if isinstance(record, Measured) and record.training
    ]
    own = [case for case in cases if {label.role for label in case.labels} != {HOST}]
    if not own:
        raise ConfigError("from-run", base.name, "a run that measured a training step")
    if steps := [case for case in own if not case.labels]:
        return _one_of(steps, base, given)
    deepest = max(own, key=lambda case: case.model.num_layers)
    options = options_of(deepest)
    if deepest.labels:
        layers = max(case.model.num_layers for case in cases)
        name = options.model_names[0]
        (model,) = read_models(name, options.scale, deepest.parallel.tp)
        options = replace(options, num_layers=None if layers == model.num_layers else layers)
    return _kept(options, given)


def _one_of(steps: list[TrainCase], base: Path, given: PredictOptions) -> dict[str, Any]:
    """Return the options of the step of the model that is given, or of the only step."""
    of_all = {case.case_id: options_of(case) for case in steps}.values()
    if names := _names(given):
        read_models(",".join(names))  # a wrong name goes before a run of others
    named = [each for each in of_all if names == each.model_names]
    kept = [_kept(options, given) for options in named or of_all]
    if any(options != kept[0] for options in kept):
        values = [_kept(each, None) for each in of_all]
        different = (
            {n: v for n, v in own.items() if any(other.get(n) != v for other in values)}
            for own in values
        )
        words = (shlex.join(argv(TrainOptions(**own))) for own in different)
        allowed = "a run of one step, or with the options of one of its steps"
        raise ConfigError("from-run", base.name, f"{allowed}: {'; '.join(words)}")
    return kept[0]


def step_words(case: TrainCase) -> tuple[str, ...]:
    """Return the options that make `predict` predict this step, as words."""
    return tuple(argv(TrainOptions(**_kept(options_of(case), None))))


def _names(options: TrainOptions | PredictOptions) -> tuple[str, ...]:
    return options.model_names if options.models or options.model else ()


def _kept(options: TrainOptions, given: PredictOptions | None) -> dict[str, Any]:
    """Return the options of a run that stay; another model has its own layers and tokens."""
    left_out = {*_NO_EFFECT, *(given_options(given) if given else ())}
    if given and _names(given) not in ((), options.model_names):
        left_out |= {"models", "model", "num_layers", "seq_len", "scale"}
    return {n: v for n, v in given_options(options).items() if n not in left_out}


def _calibration(
    options: PredictOptions, here: Machine, case: TrainCase, base: Path | None
) -> Path | None:
    """Return the run whose parts are used; None: a data sheet is."""
    if options.calibration:
        path = find_run(options.runs, options.calibration)
        _check_device(read_info(path), here, force=options.force)
        return path
    if base is not None:
        with contextlib.suppress(ConfigError):  # of another device
            _check_device(read_info(base), here)
            return base
        return None if options.device else base
    if options.device not in (None, "cpu", "cuda"):
        return None
    for path in sorted(list_runs(options.runs), reverse=True):
        with contextlib.suppress(ConfigError):  # damaged, or of another device
            _check_device(read_info(path), here)
            steps = (each for each in read_records(path) if isinstance(each, Measured))
            if _measured_parts().nearest_profile(steps, case) is not None:
                return path
    return None


def _check_device(info: RunInfo, here: Machine, *, force: bool = False) -> None:
    """Refuse a calibration of another device; that of a CPU is its host."""
    names = {device.name for device in info.environment.devices}
    own = here.name
    if here.device == "cpu" and here.is_here:
        names = {info.environment.host}
        own = socket.gethostname()
    if own and names != {own} and not force:
        allowed = f"a run on {own}, not {', '.join(sorted(names)) or 'an unknown device'}"
        raise ConfigError("calibration", info.run_id, f"{allowed}; or --force")


def _origin_notes(path: Path, here: Machine) -> list[str]:
    """Return where and when parts were measured, and how this differs from here and now."""
    from importlib import metadata  # noqa: PLC0415 - 10 ms

    info = read_info(path)
    own = info.environment
    created_at = datetime.fromisoformat(info.created_at)
    devices = ", ".join(sorted({device.name for device in own.devices}))
    text = f"measured parts: run {path.name} of {created_at:%Y-%m-%d %H:%M} UTC on {devices}"
    text += f" of host {own.host}{_measured_parts().ago(created_at)}"
    differences = []
    if here.is_here and own.host != socket.gethostname():
        differences.append(f"this host is {socket.gethostname()}")
    if here.is_here and own.torch != (torch := metadata.version("torch")):
        differences.append(f"torch was {own.torch}, not {torch}")
    if here.name and {here.name} != {device.name for device in own.devices}:
        differences.append(f"they are not of {here.name}")
    doubts = (f"the parts may not hold: {difference}" for difference in differences)
    return [text, *noted(Topic.CALIBRATION, doubts)]
