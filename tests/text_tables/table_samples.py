"""Rows of ours and header lines of rccl-tests for the tests of readers."""

from tests.collectives.comm_records import comm_run, full_comm_run

from stepmark.collectives.comm_columns import rows
from stepmark.tables.columns import Row

RCCL_NODE = "numCycle,collective,gpus,size,type,redop,inplace,time,algbw,busbw,#wrong\n"
RCCL_NODES = (
    "numCycle,collective,nodes,ranks,ranksPerNode,gpusPerRank,size,type,redop,inplace,time,"
    "algbw,busbw,#wrong\n"
)


def made_up_rows() -> list[Row]:
    return rows(full_comm_run(), comm_run())
