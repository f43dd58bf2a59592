"""Hugging Face's `config.json` of decoders, as a model.

- config.py: read a file. keys.py: typed access to its keys.
- notes.py: keys that are not modelled.
- families.py: readers by model_type. shared_fields.py: what they share.
- dense.py, older.py, experts.py, sliding.py, hybrid.py: the readers.
- traced.py: families without a reader, through transformers. trace.py: what its process tells;
  traced_units.py: an architecture made of it.
"""
