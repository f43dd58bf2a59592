"""Files of frameworks that describe a job, as options of `stepmark workload generate`.

- table.py: what each key of a file is to us, one table for reading and writing.
- configuration.py: the kinds of files, told by content.
- architecture.py: the widths of a model as options.
- megatron.py, megatron_entries.py: Megatron-LM's arguments, and what each is to us.
- shell.py, shell_grammar.py, shell_values.py: what a shell script trains with; its commands and
  variables.
- typed_arguments.py: Megatron-LM's arguments beside options of ours.
- layer_frequency.py: which layers have experts, in Megatron-LM's words.
- vocabulary.py: the size of the vocabulary, in Megatron-LM's words.
- nemo.py: YAML of NeMo and Megatron-Bridge.
- torchtitan.py: torchtitan's TOML.
- deepspeed.py, accelerate.py: DeepSpeed's JSON, and the YAML of accelerate.
- yaml_text.py: YAML, where PyYAML is installed.
"""
