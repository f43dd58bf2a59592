"""Rank 1 never joins: STUCK=join, or never comes up at all. Imported by STEPMARK_TEST_HOOK."""

import os
import time


def stuck(*_: object, **__: object) -> None:
    time.sleep(1000)


if os.environ.get("RANK") == "1":
    if os.environ["STUCK"] == "join":
        import torch.distributed

        torch.distributed.init_process_group = stuck
    else:
        stuck()
