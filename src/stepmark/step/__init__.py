"""The workload of a training step: a tree of modules, and a program per stage.

- module.py, layout.py, tree.py: a module on one rank; its sharding; the tree of a model.
- attention_core.py, fp8_attention.py: the tree's attention kernel, and that with casts to FP8.
- grouped_linear.py: products of experts.
- scan_modules.py: modules of mixers that carry a state.
- kernel_choice.py: kernels where frameworks differ. lora.py: adapters beside frozen weights.
- host_memory.py: copies between a device and its host, and an optimizer on the host.
- newton_schulz.py: iterations over a matrix, of the optimizer Muon.
- workload.py: operations and messages of a step, as one program per stage.
- workload_check.py, workload_stages.py: consistency of a workload; what its stages share.
- fold_items.py: long lists become blocks that repeat.
- rank_program.py: what each rank issues in order, and what each operation waits for.
- native.py, source_file.py: our file of a workload; files from elsewhere.
- roofline.py: lower bounds of times. trace_ops.py: operations as a profiler measured them.
"""
