"""Search the layouts of a model on a number of GPUs: `stepmark plan`.

- plan_options.py, plan.py: options, and the verb.
- layout_space.py, candidate.py, layer_kinds.py: all layouts; one of them; its layers by kind.
- least_memory.py: bytes that a layout needs at least.
- cluster.py: the device and its links, what a step costs there.
- stage_costs.py, small_steps.py: estimates of step times, from simulated steps of one stage.
- layout_search.py, layout_work.py: prune by memory, estimate, simulate the best, in processes.
- layout_files.py: the framework's own file of each shown layout.
- anchors_of_plan.py: measured steps of a table, predicted as the layouts are.
- measured_layouts.py: steps of the first layouts, measured on this machine.
- plan_text.py, plan_page.py: what is printed; the page.
"""
