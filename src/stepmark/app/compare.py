"""stepmark compare: runs, files of nccl-tests, CSVs and tables of slides, with verdicts."""

from collections.abc import Sequence

from stepmark.app.comparison_sources import InputDefaults, sides
from stepmark.app.view import console
from stepmark.core.collectives import Collective
from stepmark.core.comparison import Comparison, Side
from stepmark.core.errors import ConfigError
from stepmark.core.units import parse_bytes
from stepmark.core.verb_options import CompareOptions
from stepmark.report import comparison as drawn
from stepmark.report import comparison_page
from stepmark.report.comparison import printed
from stepmark.store.compare import Options
from stepmark.store.compare import compare as compare_sides
from stepmark.store.export import write_csv, write_json
from stepmark.store.files import write_text
from stepmark.store.series import STRICT

_PLACEMENTS = {"in": "in-place", "out": "out-of-place", "both": None}


def run(options: CompareOptions) -> int:
    """Print and write the comparison.

    Return 1 if something is too slow, 3 if a limit was given and nothing could be tested.
    """
    options.check_stdout()
    defaults = InputDefaults(
        collective=_collective(options.collective),
        num_ranks=options.ranks,
        placement=_PLACEMENTS[options.placement],
        unit=options.unit,
    )
    smallest, largest = _sizes(options.size_range)
    named = _baseline_first(sides(options.sources, options.runs, defaults), options.baseline)
    comparison = compare_sides(
        named,
        Options(
            noise=options.noise,
            statistic=options.statistic,
            allowed=_allowed(options.allow, options.force),
            fail_if_slower=options.fail_if_slower,
            smallest_bytes=smallest,
            largest_bytes=largest,
            recorded=tuple(sides(options.noise_from, options.runs, defaults)),
        ),
    )
    _deliver(comparison, options)
    if comparison.too_slow is None:
        return 0
    cells = (cell for line in comparison.lines for cell in line.cells.values())
    is_tested = any(cell.ratio and cell.ratio.se_log is not None for cell in cells)
    return 1 if comparison.too_slow else 0 if is_tested else 3


def _collective(text: str | None) -> str | None:
    if text is None:
        return None
    name = text.lower().replace("-", "_").removesuffix("_perf").replace("_", "")
    known = {one.value.replace("_", ""): one.value for one in Collective}
    if name not in known:
        raise ConfigError("collective", text, f"one of {', '.join(Collective)}")
    return known[name]


def _allowed(names: Sequence[str], force: bool) -> tuple[str, ...]:
    for name in names:
        if name not in STRICT:
            raise ConfigError("allow", name, f"one of {', '.join(STRICT)}")
    return STRICT if force else tuple(names)


def _baseline_first(named: list[Side], name: str | None) -> list[Side]:
    if name is None:
        return named
    first = [side for side in named if side.name == name]
    if not first:
        raise ConfigError("baseline", name, f"one of {', '.join(side.name for side in named)}")
    return first + [side for side in named if side.name != name]


def _sizes(text: str | None) -> tuple[int | None, int | None]:
    """Return the limits of "1M-1G". Raises ConfigError."""
    if text is None:
        return None, None
    first, dash, last = text.partition("-")
    if not dash:
        raise ConfigError("range", text, "sizes such as 1M-1G")
    smallest, largest = parse_bytes(first, "range"), parse_bytes(last, "range")
    if smallest > largest:
        raise ConfigError("range", text, "sizes with the smaller one first")
    return smallest, largest


def _deliver(comparison: Comparison, options: CompareOptions) -> None:
    """Print the table, unless stdout is one of the files, and write the files."""
    if options.json:
        document = {
            "names": list(comparison.names),
            "lines": drawn.rows(comparison),
            "overall": drawn.overall_rows(comparison),
            "notes": list(comparison.notes),
        }
        write_json(document, options.json, "compare")
    if options.csv:
        write_csv(drawn.rows(comparison), options.csv, "compare")
    if options.html:
        write_text(options.html, comparison_page.html(comparison), "html")
    if not options.to_stdout:
        printed(comparison, console())
