"""transformers' continuous batching over pages."""

from kvlab.peers.engines import ENGINES
from kvlab.peers.install import TRANSFORMERS
from kvlab.peers.process import ProcessKind
from kvlab.peers.process_settings import Program


@ENGINES.register("transformers_continuous")
class Continuous(ProcessKind):
    """transformers' continuous batching over pages."""

    recipe = TRANSFORMERS
    program = Program(
        "transformers_continuous", "transformers_engines.py", "Continuous", "transformers", greedy_only=True
    )
