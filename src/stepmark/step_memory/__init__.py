"""Device memory of a training step.

- step_tensors.py, step_memory.py: tensors of a step, as they come and go.
- fsdp_memory.py: what FSDP gathers and reduces.
- allocator.py: torch's caching allocator, replayed without a device.
- memory.py: the estimate, corrected by measured cases, and judged.
"""
