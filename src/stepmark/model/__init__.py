"""Models and machines: what is known of them without running anything.

- layers.py, model.py: layers and their parts; a transformer of them, with parameter counts.
- scans.py: FLOPs of layers that carry a state. scale.py: smaller widths.
- packing.py: lengths of the pieces from which sequences are packed.
- routing.py: how many hosts and ranks the experts of a token are on.
- model_tables.py, model_names.py: built-in models and files like theirs; names of models.
- parallel.py, product_precision.py: degrees of the axes of a layout; fp8 and narrower products.
- ops/: operators by shape, with FLOPs and bytes.
- collectives.py: the sizes and bus bandwidths of collectives, and which ranks take part.
- network.py, systems.py, network_options.py: tiers of links; systems of hosts; options.
- nccl_tuner.py: the latency of NCCL's rings and trees.
- device.py, fabrics.py: data sheets of devices; variables for kinds of networks.
- kernel_groups.py: groups of GPU kernels by name.
"""
