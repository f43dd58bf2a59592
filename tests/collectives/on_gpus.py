"""As on_ranks.py, where the device is a GPU."""

import torch
from tests.measuring.fakes import NoGuard, entries

from stepmark.cases.comm_case import CommCase
from stepmark.cases.plan import CommHow
from stepmark.cases.record import Record
from stepmark.collectives.bench.bench import CollectiveBench
from stepmark.measuring import run_cases
from stepmark.measuring.clock import Effort
from stepmark.measuring.context import MeasureContext
from stepmark.measuring.ranks import Ranks
from stepmark.model.ops.backends import Capabilities


def measure(ranks: Ranks, cases: list[CommCase], how: CommHow) -> list[Record]:
    properties = torch.cuda.get_device_properties(ranks.device)
    here = MeasureContext(
        ranks=ranks,
        capabilities=Capabilities(
            device_type="cuda",
            capability=torch.cuda.get_device_capability(ranks.device),
            is_rocm=torch.version.hip is not None,
            has_compiler=False,
            modules=frozenset(),
        ),
        cache_bytes=properties.L2_cache_size,
        free_bytes=lambda: torch.cuda.mem_get_info(ranks.device)[0],
        device_index=ranks.local_rank,
        run_id="r",
    )
    records: list[Record] = []
    bench = CollectiveBench(here, how, effort=Effort(soak_s=0.0))
    run_cases.run(entries(cases), here, {"comm": bench}, NoGuard(), records.append)
    return records
