"""Record the workload of a user's PyTorch code without an accelerator.

- workload_capture.py: the verb `workload capture`.
- run.py, fake.py, watch.py: run the code on fake tensors and fake ranks, within a time.
- record.py, modules.py, compute.py, messages.py: computation, its module, and communication.
- overlap.py: streams of FSDP2 and DDP.
- values.py, unknown.py, routing.py: what depends on values.
- operand_errors.py: errors of real kernels.
- transformers_trace.py, transformers_recorder.py: a class of transformers on meta tensors, in a
  process that the reader of an unknown family starts.
"""
