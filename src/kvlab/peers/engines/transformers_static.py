"""transformers' generate on padded batches, one after another."""

from kvlab.peers.engines import ENGINES
from kvlab.peers.install import TRANSFORMERS
from kvlab.peers.process import ProcessKind
from kvlab.peers.process_settings import Program


@ENGINES.register("transformers_static")
class Static(ProcessKind):
    """transformers' generate on padded batches, one after another."""

    recipe = TRANSFORMERS
    program = Program("transformers_static", "transformers_engines.py", "Static", "transformers", greedy_only=True)
