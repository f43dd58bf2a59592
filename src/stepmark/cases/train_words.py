"""A training case in words: its shape and its techniques."""

from stepmark.cases.fields import compared, in_words
from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import CompileScope, Fp8, GradSync, Recompute, Schedule


def shape_text(case: TrainCase) -> str:
    """Return strategy, ranks, batch and length, then techniques."""
    words = [case.strategy]
    words += [f"x{case.num_ranks}"] if case.num_ranks > 1 else []
    words += [f"mbs {case.mbs} seq {case.model.seq_len}"]
    words += ["micro"] if case.schedule is Schedule.MICRO else []
    return f"{' '.join(words)}: {techniques(case)}"


def name_of(case: TrainCase) -> str:
    """Return model and shape, and of which part of a prediction the case is the calibration."""
    part = f" (calibration: {calibrates(case)})" if case.labels else ""
    return f"{case.model.name} {shape_text(case)}{part}"


def calibrates(case: TrainCase) -> str:
    """Return the parts that `stepmark calibrate` measures with the case, "" for a step."""
    return ", ".join(label.role for label in case.labels)


def techniques(case: TrainCase) -> str:
    """Return the precision, and every technique that is on or differs from its default."""
    words = [case.precision.value]
    if case.fp8 is not Fp8.NONE:
        is_block_format = case.dtype.is_block_format
        words.append(fp8_text(case) if is_block_format else f"fp8 {fp8_text(case)}")
    words += [] if case.compile is CompileScope.NONE else [f"compile {compile_text(case)}"]
    if case.recompute is not Recompute.NONE:
        is_selective = case.recompute is Recompute.OPS
        words.append(f"ac {'selective' if is_selective else recompute_text(case)}")
    if case.grad_accum > 1:
        last = " reduced last" if case.grad_sync is GradSync.LAST else ""
        words.append(f"accum {case.grad_accum}{last}")
    words += in_words(TrainCase, compared(case))
    if case.parallel.pp > 1:
        count = f" of {case.pp_microbatches}" if case.pp_microbatches else ""
        words.append(f"{case.pp_schedule}{count}")
    return ", ".join(words)


def recompute_text(case: TrainCase) -> str:
    """Return none, full, ops, or q/p."""
    if case.recompute is Recompute.BLOCKS:
        return "{}/{}".format(*case.recompute_blocks)
    return case.recompute.value


def compile_text(case: TrainCase) -> str:
    """Return what is compiled, with the mode if it is not the default one."""
    mode = case.compile_mode
    plain = case.compile is CompileScope.NONE or mode == "default"
    return case.compile.value if plain else f"{case.compile.value} {mode}"


def fp8_text(case: TrainCase) -> str:
    """Return none, or the recipe and what else is in FP8."""
    if case.fp8 is Fp8.NONE:
        return case.fp8.value
    head = " +head" if case.fp8_head else ""
    return f"{case.fp8.value}{head}{' +all-gather' if case.fp8_all_gather else ''}"
