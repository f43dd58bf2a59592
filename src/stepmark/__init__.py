"""stepmark: how fast should this model train on this cluster, and how fast does it?"""

__version__ = "0.1.0"
