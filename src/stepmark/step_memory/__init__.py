"""Device memory of a training step.

- step_tensors.py, step_memory.py: tensors of a step, as they come and go.
- fsdp_memory.py: what FSDP gathers and reduces.
- allocator.py: torch's caching allocator, replayed without a device.
- rank_memory.py: bytes of a rank, by purpose, when most are allocated.
- workload_memory.py: memory of any framework's job, whether it fits, and what would.
- megatron_memory.py, deepspeed_memory.py, pytorch_memory.py: that of each framework.
- memory.py: the estimate, corrected by measured cases, and judged.
"""
