"""Read the logs of a job."""

import os
from typing import Any

from stepmark.api.keywords import read, spells_keywords
from stepmark.api.ledger import to_plotly
from stepmark.ground.errors import StepmarkError
from stepmark.job_logs.log_options import LogsOptions
from stepmark.job_logs.logs import LogReport, report_of
from stepmark.tables.columns import named
from stepmark.tables.table import Table

_CONVENTION = "causal"  # of FLOPs, as everywhere where none is named


class Logs(Table):
    """What the logs of a job say. Its rows are the findings, such as failures.

    answer: one sentence; state: "finished", "failed or hung" or "unknown whether it ended";
    both are None for tables of results alone. exit_code: that of `stepmark logs`.
    step_s: median seconds of a step in a training log; mfu_pct: its model FLOPs utilization
    (causal) in percent, with model and device; None where the files do not say.
    steps: a row per line of steps of a training log, as in the files of `stepmark logs --csv`.
    document: everything, as `stepmark logs --json` writes it.
    """

    def __init__(self, report: LogReport) -> None:
        """Keep what was read."""
        self.document: dict[str, Any] = report.document()
        parts = [*self.document["sources"], *self.document["tables"]]
        rows = [finding for part in parts for finding in part["findings"]]
        super().__init__(rows, named(("severity", "rule", "text", "file", "line")))
        answer = self.document["answer"]
        self.answer: str | None = answer and answer["text"]
        self.state: str | None = answer and str(answer["state"])
        self.exit_code = report.exit_code
        training = [row for part in parts for row in part.get("training", ())]
        flops = [row for part in parts for row in part.get("flops", ())]
        in_seconds = (row["median"] for row in training if row["unit"] == "s")
        self.step_s: float | None = next(in_seconds, None)
        causal = (row["mfu_pct"] for row in flops if row["convention"] == _CONVENTION)
        self.mfu_pct: float | None = next(causal, None)
        self.steps = Table([row for part in parts for row in part.get("steps", ())])
        self._report = report

    def plot(self) -> Any:
        """Return a plotly figure: the time of each step of a training log."""
        for source in self._report.sources:
            for figure in source.figures:
                return to_plotly(figure)
        raise StepmarkError("the logs have no steps to plot.")

    def show(self) -> None:
        """Print what `stepmark logs` prints."""
        print("\n".join(self._report.text()))  # noqa: T201

    def __repr__(self) -> str:
        return f"<Logs: {self.answer or self._report.verdicts or f'{len(self)} findings'}>"


@spells_keywords
def logs(*files: str | os.PathLike[str], **options: object) -> Logs:
    """Read the logs of one job: training and NCCL logs, dumps, tables of results.

    files: files, folders and patterns. options: those of `stepmark logs`, e.g.
    model="llama-3.1-8b", device="h200"; `options("logs")` lists them. A failure of the job is
    no exception. Raises ConfigError for files that are none of these.
    """
    return Logs(report_of(read(LogsOptions, files, options)))
