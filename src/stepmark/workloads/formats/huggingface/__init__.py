"""Hugging Face's `config.json` of decoders, as a model.

- config.py: read a file. keys.py: typed access to its keys.
- notes.py: keys that are not modelled.
- families.py: readers by model_type. common.py: what they share.
- dense.py, older.py, experts.py, hybrid.py: the readers.
"""
