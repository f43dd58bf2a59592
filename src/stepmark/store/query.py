"""SQL over all runs, straight from their files. Two views: `records` and `runs`.

`records` has one row per record that the reader reads; a case that failed and was measured on
resume has two.
"""

import glob
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepmark.ground.errors import ConfigError
from stepmark.ground.files import open_bytes
from stepmark.store.reader import RUN, Run

if TYPE_CHECKING:
    import duckdb

_RECORDS = """
CREATE VIEW records AS
WITH parsed AS (
    SELECT json AS record, TRY_CAST(json -> '$.samples.seconds' AS DOUBLE[][]) AS seconds
    FROM record_lines WHERE json IS NOT NULL
), summarized AS (
    -- The slowest rank of each sample: what a job that waits for all would see.
    SELECT *, [list_max([rank[i] for rank in seconds]) for i in range(1, len(seconds[1]) + 1)]
        AS slowest,
        TRY_CAST(record ->> '$.training.cycle' AS BIGINT) AS cycle,
        TRY_CAST(record ->> '$.training.tokens_per_sample' AS DOUBLE) AS tokens_per_sample
    FROM parsed
)
SELECT
    record ->> '$.run_id' AS run_id,
    record ->> '$.kind' AS kind,
    coalesce(
        record ->> '$.case.op.family',
        record ->> '$.case.collective',
        CASE WHEN (record -> '$.case.data_parallel') IS NOT NULL THEN 'train' END
    ) AS family,
    coalesce(record ->> '$.case.model.name', record ->> '$.case.labels[0].model') AS model,
    record ->> '$.case.labels[0].role' AS role,
    coalesce(record ->> '$.case.op.phase', record ->> '$.case.labels[0].phase') AS phase,
    coalesce(record ->> '$.case.op.dtype', record ->> '$.case.dtype') AS dtype,
    record ->> '$.case.backend' AS backend,
    record ->> '$.case.device' AS device,
    TRY_CAST(coalesce(record ->> '$.case.num_ranks', record ->> '$.num_ranks') AS BIGINT)
        AS num_ranks,
    record ->> '$.case.clock' AS clock,
    record ->> '$.case.rate' AS rate,
    record ->> '$.case.scale' AS scale,
    record ->> '$.strategy' AS strategy,
    TRY_CAST(record ->> '$.case.mbs' AS BIGINT) AS mbs,
    TRY_CAST(record ->> '$.case.model.seq_len' AS BIGINT) AS seq_len,
    record ->> '$.case.schedule' AS schedule,
    TRY_CAST(record ->> '$.case.grad_accum' AS BIGINT) AS grad_accum,
    record ->> '$.case.precision' AS precision,
    record ->> '$.case.fp8' AS fp8,
    record ->> '$.case.compile' AS compile,
    record ->> '$.case.recompute' AS recompute,
    -- Whole cycles from one optimizer step to the next, so that the optimizer has its share.
    CASE WHEN len(slowest) >= cycle THEN
        tokens_per_sample * (len(slowest) // cycle * cycle)
        / list_sum(slowest[1:len(slowest) // cycle * cycle]) END AS tokens_per_s,
    -- A loss that is not finite is written as text.
    TRY_CAST(record ->> '$.training.loss[0]' AS DOUBLE) AS loss_first,
    TRY_CAST(record ->> '$.training.loss[#-1]' AS DOUBLE) AS loss_last,
    record ->> '$.case_id' AS case_id,
    record -> '$.case.op' AS op,
    TRY_CAST(record ->> '$.case.count' AS BIGINT) AS count,
    TRY_CAST(record ->> '$.size_bytes' AS BIGINT) AS size_bytes,
    TRY_CAST(record ->> '$.size_bytes' AS DOUBLE)
        * TRY_CAST(record ->> '$.busbw_factor' AS DOUBLE)
        / list_aggregate(slowest, 'median') / 1e9 AS busbw_gb_s,
    record ->> '$.case.redop' AS redop,
    TRY_CAST(record ->> '$.case.root' AS BIGINT) AS root,
    TRY_CAST(record ->> '$.case.max_ctas' AS BIGINT) AS max_ctas,
    nullif(record ->> '$.case.beside', '') AS beside,
    TRY_CAST(record ->> '$.case.in_place' AS BOOLEAN) AS in_place,
    record ->> '$.case.mode' AS mode,
    record ->> '$.case.api' AS api,
    coalesce(TRY_CAST(record ->> '$.launch' AS BIGINT), 1) AS launch,
    record ->> '$.levels.machine' AS machine,
    record ->> '$.levels.process' AS process,
    TRY_CAST(record ->> '$.levels.communicator' AS BIGINT) AS communicator,
    TRY_CAST(record ->> '$.levels.round' AS BIGINT) AS round,
    record -> '$.case.labels' AS labels,
    list_aggregate(slowest, 'median') AS median_s,
    len(slowest) AS n,
    record ->> '$.samples.method' AS method,
    record ->> '$.backend_run' AS backend_run,
    TRY_CAST(record ->> '$.peak_memory_bytes' AS BIGINT) AS peak_memory_bytes,
    TRY_CAST(record ->> '$.started_at' AS DOUBLE) AS started_at,
    record ->> '$.reason' AS reason,
    record ->> '$.cause' AS cause,
    record ->> '$.message' AS message,
    record ->> '$.command' AS command,
    record
FROM summarized
"""

_RUNS = """
CREATE VIEW runs AS
SELECT
    json ->> '$.run_id' AS run_id,
    json ->> '$.created_at' AS created_at,
    json ->> '$.command' AS command,
    TRY_CAST(json ->> '$.num_cases' AS BIGINT) AS num_cases,
    json ->> '$.environment.host' AS host,
    json ->> '$.environment.devices[0].name' AS device_name,
    json_array_length(json, '$.environment.devices') AS num_devices,
    json ->> '$.environment.torch' AS torch,
    json ->> '$.environment.versions.driver' AS driver,
    json ->> '$.environment.git_commit' AS git_commit,
    json ->> '$.environment.stepmark' AS stepmark,
    json -> '$.environment' AS environment,
    json -> '$.settings' AS settings,
    filename AS path
FROM run_files WHERE json IS NOT NULL
"""


def sql(runs: Sequence[Run], query: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Return column names and rows. Raises ConfigError for what DuckDB refuses."""
    import duckdb  # noqa: PLC0415

    with duckdb.connect() as connection, tempfile.TemporaryDirectory() as folder:
        _create_views(connection, runs, Path(folder))
        # The views are loaded: the query itself may read no other file, and write none.
        connection.execute("SET enable_external_access = false")
        try:
            cursor = connection.execute(query)
            if cursor is None:  # nothing but white space or a comment
                raise ConfigError("sql", query, "a query over the views records and runs")
            columns = [str(column[0]) for column in cursor.description or ()]
            return columns, list(cursor.fetchall())
        except duckdb.Error as error:
            raise ConfigError("sql", query, f"it fails: {_one_line(error)}") from None


def _create_views(
    connection: "duckdb.DuckDBPyConnection", runs: Sequence[Run], folder: Path
) -> None:
    copy = folder / "records.jsonl"
    with copy.open("wb") as stream:
        stream.writelines(line + b"\n" for run in runs for line in run.lines)
    # duckdb has no parameters here; a folder's name may hold quotes and the signs of a pattern.
    name = glob.escape(str(copy)).replace("'", "''")
    source = f"read_json_objects('{name}', format='newline_delimited')"
    if not any(run.lines for run in runs):
        source = "(SELECT NULL::JSON AS json) WHERE false"
    connection.execute(f"CREATE TABLE record_lines AS SELECT json FROM {source}")
    connection.execute("CREATE TABLE run_files (json JSON, filename VARCHAR)")
    if paths := [run.path / RUN for run in runs if run.is_known]:
        texts = [[open_bytes(path).decode(errors="replace"), str(path)] for path in paths]
        connection.executemany("INSERT INTO run_files VALUES (?, ?)", texts)
    connection.execute(_RECORDS)
    connection.execute(_RUNS)


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
