"""Run by test_parallel under torchrun with four gloo ranks: losses of each way to spread."""

import json
import sys

from tests.bench.training.curves import CASES, first_norm, losses

from stepmark.bench.ranks import join


def main() -> None:
    ranks = join("cpu", for_meshes=True)
    found = {
        name: (losses(case, ranks), first_norm(case, ranks)) for name, case in CASES.items()
    }
    if ranks.rank == 0:
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
    ranks.close()


if __name__ == "__main__":
    main()
