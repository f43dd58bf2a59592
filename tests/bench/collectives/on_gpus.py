"""As on_ranks.py, where the device is a GPU."""

import torch
from tests.bench.collectives.on_ranks import NoGuard

from stepmark.bench.collectives import runner
from stepmark.bench.collectives.communicators import Communicators
from stepmark.bench.collectives.runner import Options
from stepmark.bench.operators.call import Capabilities
from stepmark.bench.ranks import Ranks
from stepmark.bench.rig import Rig
from stepmark.bench.stopping import Effort
from stepmark.core.comm_case import CommCase
from stepmark.core.record import Record


def measure(ranks: Ranks, cases: list[CommCase], options: Options) -> list[Record]:
    properties = torch.cuda.get_device_properties(ranks.device)
    rig = Rig(
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
    )
    records: list[Record] = []
    communicators = Communicators(ranks)
    runner.run(
        list(enumerate(cases)),
        rig,
        Effort(soak_s=0.0),
        options,
        communicators,
        NoGuard(),
        run_id="r",
        sink=records.append,
    )
    communicators.close()
    return records
