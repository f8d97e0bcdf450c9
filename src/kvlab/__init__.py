"""kvlab: a laboratory for KV-cache memory in LLM serving.

Importing the package is cheap: torch, transformers and mlflow are loaded by the parts that use them.
"""

__version__ = "0.1.0"
