"""What to say about a prediction: how far it is to be trusted."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from stepmark.efficiency.kernel_times import kernel_times
from stepmark.ground.dtypes import DType
from stepmark.model.device import DeviceSpec
from stepmark.model.model import ModelConfig
from stepmark.predictions.contention import sheet_slowdowns
from stepmark.predictions.inputs import Inputs
from stepmark.predictions.note import Note, Topic, noted
from stepmark.predictions.prediction import Prediction
from stepmark.timeline.ledger import Group, Work
from stepmark.timeline.step_cost import Source
from stepmark.workloads.formats.huggingface.shared_fields import DEFAULT_SEQ_LEN
from stepmark.workloads.rules.pytorch.case import COMPILED
from stepmark.workloads.workload_files import read_notes


def notes_of(prediction: Prediction) -> Iterator[Note]:
    """Yield what a step lacks, where its costs are from, and what is not modelled."""
    inputs = prediction.inputs
    workload = inputs.workload
    file = inputs.file
    yield from noted(Topic.LOWER_BOUND, file.gaps if file else ())
    yield from noted(Topic.MODEL, _model_notes(inputs))
    yield from noted(Topic.LOWER_BOUND, _unknown_notes(prediction.unknown))
    if prediction.offload_share > 1:
        text = (
            "memory is more than estimated: copies of activations to the host take"
            f" {prediction.offload_share:.2f} times as long as the forward passes, and what"
            " waits for them stays on the device"
        )
        yield Note.of(Topic.MEMORY, text)
    yield from _source_notes(prediction)
    if file and inputs.times_of_file:
        yield Note.of(Topic.ORIGIN, file.note(has_messages=not inputs.sends_by_network))
    else:
        yield from noted(Topic.CONTENTION, _contention_notes(prediction))
    if prediction.spans_hosts:
        text = f"{workload.world_size} GPUs communicate as fast as those of one host"
        is_least = file is None or not file.has_excess
        least = ", and the step takes at least as long" if is_least else ""
        text = f"links between hosts are not known: {text}{least}"
        yield Note.of(Topic.LOWER_BOUND, text)
    yield from _use_notes(inputs, prediction.sources)
    if inputs.tokens is None:
        lacks = "its batch" if workload.model else "a model"
        text = f"there are no tokens/s and no MFU, because the file does not have {lacks}"
        yield Note.of(Topic.MODEL, text)


def _model_notes(inputs: Inputs) -> Iterator[str]:
    """Yield what of the model, or of its file, the step assumes or lacks."""
    workload = inputs.workload
    packing = workload.model.packing if workload.model else None
    assumed = (packing.note,) if packing else ()
    yield from assumed
    unmodelled = workload.model.unmodelled if workload.model else ()
    yield from unmodelled
    yield from _length_note(workload.model)
    if workload.model and (count := workload.model.num_mtp_layers):
        plain = replace(workload.model, num_mtp_layers=0).num_active_matmul_params
        share = 1 - plain / workload.model.num_active_matmul_params
        modules = "module" if count == 1 else "modules"
        yield (
            f"{count} {modules} of multi-token prediction, with"
            f" {100 * share:.3g} % of the weights that a token meets: FLOPs and MFU count them"
        )
    of_file = workload.notes if inputs.times_of_file else read_notes(workload)
    known = (*assumed, *unmodelled, COMPILED)  # the second line says that it is compiled
    yield from (f"of the file: {note}" for note in of_file if note not in known)
    is_pipeline = len(workload.stages) > 1
    if not of_file:
        # The layers of each stage change the answer, others, such as padding, little.
        topic = Topic.MODEL if is_pipeline else Topic.ORIGIN
        yield from noted(topic, (note for note in workload.notes if note not in known))


def _length_note(model: ModelConfig | None) -> Iterator[str]:
    """Yield the length that stands for a longer one of a config, which is rarely trained at."""
    if model and model.seq_len == DEFAULT_SEQ_LEN < model.max_context:
        allowed = f"the config allows {model.max_context:,} (--seq-len)"
        yield f"seq {model.seq_len}: {allowed}"


def _unknown_notes(unknown: Mapping[str, bool]) -> Iterator[str]:
    """Yield the operations without a time, and those without one in some of their passes."""
    for is_untimed, text in (
        (True, "have no known cost and take no time"),
        (False, "have a known cost in some passes only"),
    ):
        if names := [name for name, own in unknown.items() if own is is_untimed]:
            yield f"{len(names)} operations {text}: {first_few(names)}"


def first_few(names: Collection[str]) -> str:
    """Return the first names."""
    shown = [*names][:5]
    return ", ".join([*shown, "..."] if len(names) > 5 else shown)


def by_sheet(device: DeviceSpec) -> str:
    """Return whose measurements the times of a device are by data sheet."""
    like = kernel_times(device).like
    if like is None:
        return (
            f"by shares of the peak that {device.vendor.upper()}'s devices reach,"
            f" because no operator was measured on {device.key}"
        )
    text = f"by operators that were measured sustained on {like.key}"
    return text if like is device else f"{text}, with {device.key}'s peak and bandwidth"


def _source_notes(prediction: Prediction) -> Iterator[Note]:
    """Yield where costs are from, where it is not a measurement of these very operations."""
    sources = prediction.sources
    total = sum(sources.values())
    device = prediction.inputs.device
    sheet = by_sheet(device) if device else ""
    like = kernel_times(device).like if device else None
    rule = f"by rules for operators that were not measured on {like.key}" if like else sheet
    texts = {
        Source.SCALED: (Topic.RULES, "is scaled from other shapes"),
        Source.OPERATOR: (Topic.RULES, "is that of operators measured by themselves"),
        Source.SHEET: (Topic.ORIGIN, f"is {sheet}"),
        Source.RULE: (Topic.RULES, f"is {rule}"),
        Source.FILE: (Topic.ORIGIN, "is the workload file's own"),
    }
    for source, (topic, text) in texts.items():
        if total and sources.get(source):
            share = f"{sources[source] / total:.0%} of the compute time"
            yield Note.of(topic, f"{share} {text}")
    by_source: dict[Source, list[str]] = {}
    for name, source in prediction.comm_sources.items():
        by_source.setdefault(source, []).append(name)
    network = prediction.inputs.network
    if names := by_source.get(Source.SCALED):
        how = "scaled from other sizes or numbers of ranks"
        if network:
            how = f"by the links of {network.name}, fitted to measured curves"
        yield Note.of(Topic.NETWORK, f"times of {', '.join(names)} are {how}")
    if names := by_source.get(Source.SHEET):
        where = f"the links of {network.name}" if network else "the data sheet's links"
        text = f"times of {', '.join(names)} are by {where} and published curves"
        yield Note.of(Topic.NETWORK, text)


def _contention_notes(prediction: Prediction) -> Iterator[str]:
    """Yield what a data sheet's contention is of, and what has none that is known."""
    inputs = prediction.inputs
    overlapped = {
        Work(name) for group, name in prediction.step.ledger.lines if group is Group.OVERLAPPED
    }
    is_by_sheet = inputs.compute_slowdown and not inputs.calibration
    if overlapped and is_by_sheet:
        yield sheet_slowdowns().note(spans_hosts=inputs.comm_slowdown is None)
    works = overlapped - inputs.compute_slowdown.keys()
    names = [str(work) for work in Work if work in works]
    if works and inputs.comm_slowdown is None and not is_by_sheet:
        names.append("communication")
    if names:
        text = "the contention between computation and communication was not measured"
        yield f"{text} ({', '.join(names)}): where they overlap, both take as long as alone"


def _peak_note(inputs: Inputs) -> str:
    """Return which peak MFU is a share of, and by how much that of the products is higher."""
    dtype = inputs.narrow_dtypes[0]
    device = inputs.device
    bf16 = device and device.peak(DType.BF16)
    own = device and device.peak(dtype)
    times = f", which is {own / bf16:.3g} times as high" if own and bf16 else ""
    return f"MFU and HFU are of the bf16 peak, not of the {dtype} peak{times}"


def _use_notes(inputs: Inputs, sources: Mapping[Source, float]) -> Iterator[Note]:
    """Yield what of the inputs is not used, or stands for what is not known."""
    measured_on = inputs.workload.settings.get("devices")
    if inputs.file and Source.FILE not in sources and inputs.file.has_any:
        yield Note.of(Topic.OPTIONS, "the workload file's own times are not used")
    if Source.FILE in sources and not inputs.times_of_file and measured_on:
        text = f"the workload file's own times are those of {measured_on}"
        yield Note.of(Topic.RULES, text)
    if inputs.narrow_dtypes:
        yield Note.of(Topic.MODEL, _peak_note(inputs))
    if not inputs.host_is_known:
        text = "the host's time is not known: it counts as ahead of the device"
        yield Note.of(Topic.HOST, text)
    if inputs.power is None and not inputs.is_on_cpu and not inputs.times_of_file:
        text = "power was not calibrated: the clock counts as not limited by power"
        yield Note.of(Topic.ORIGIN, text)
