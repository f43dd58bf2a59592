"""measuring/rank.py, by the name with which earlier versions start it."""

import runpy

if __name__ == "__main__":
    runpy.run_module("stepmark.measuring.rank", run_name="__main__", alter_sys=True)
