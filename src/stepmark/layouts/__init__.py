"""Search the layouts of a model on a number of GPUs: `stepmark plan`.

- plan_options.py, plan.py: options, and the verb.
- layout_space.py, candidate.py: all layouts; one of them.
- stage_costs.py: estimates of step times, from simulated steps of one stage.
- layout_search.py: prune by memory, estimate, simulate the best.
- plan_text.py: what is printed.
"""
