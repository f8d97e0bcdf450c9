"""vLLM as an engine, in this process: no other one is between its steps and the clock. Run by host.py."""

import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

Json = dict[str, Any]
Event = list[Any]

_SERIES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:num_preemptions": "preemptions",
    "vllm:prefix_cache_queries": "prefix_queries",
    "vllm:prefix_cache_hits": "prefix_hits",
}


def model_directory(model: Json, folder: Path) -> str:
    """Where the model's config.json is. One of an architecture alone is written below `folder`, at a place that its
    values name: vLLM finds what it has compiled by the model's path, so that a later run need not compile it again.
    """
    known = model["weights"] or model["path"]
    if known is not None:
        return str(known)
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = AutoConfig.for_model(model["family"], **model["architecture"])
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    text = config.to_json_string()
    place = folder / hashlib.sha256(text.encode()).hexdigest()[:16]
    place.mkdir(parents=True, exist_ok=True)
    unfinished = place / f"config.json.{os.getpid()}"
    unfinished.write_text(text)
    unfinished.replace(place / "config.json")  # whole at any time, for an engine that reads it now
    return str(place)


def allow_tiles() -> None:
    """Ask the system for the processor's matrix tiles. vLLM's attention uses them and does not ask: the process is
    killed by SIGILL where no other library has asked before.
    """
    import torch

    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def load_what_was_compiled() -> None:
    """Let vLLM use the compiled code that it has saved. On a processor version 0.32 compiles again each time: it
    asks what it has loaded to finish loading, and code that was compiled as a whole has no such method and no need
    of it.
    """
    import torch

    load: Any = torch.compiler.load_compiled_function

    def load_whole(*arguments: Any, **options: Any) -> Any:
        loaded = load(*arguments, **options)
        code = loaded._artifacts.compiled_fn
        if not hasattr(code, "finalize_loading"):
            code.finalize_loading = lambda _config: None
        return loaded

    torch.compiler.load_compiled_function = load_whole


@contextmanager
def timed_compiling() -> Iterator[list[float]]:
    """Notes the seconds that vLLM takes to compile on a processor, where it does not say so itself."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    spent: list[float] = []
    warm_up = CPUModelRunner.warming_up_model

    def timed(runner: Any) -> None:
        began = time.perf_counter()
        warm_up(runner)
        spent.append(time.perf_counter() - began)

    CPUModelRunner.warming_up_model = timed
    try:
        yield spent
    finally:
        CPUModelRunner.warming_up_model = warm_up


class Vllm:
    """LLMEngine, stepped here."""

    def __init__(self, settings: Json) -> None:
        began = time.perf_counter()
        if find_spec("vllm") is None:  # said before anything large is imported
            raise ModuleNotFoundError("No module named 'vllm'", name="vllm")
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(max(1, -(-settings["kv_bytes"] // 2**30))),
        }
        allow_tiles()
        load_what_was_compiled()
        import vllm
        from vllm import EngineArgs, LLMEngine

        folder = model_directory(settings["model"], Path(settings["folder"]))
        asked: Json = {
            "load_format": "auto" if settings["model"]["weights"] else "dummy",
            "dtype": settings["dtype"],
            "skip_tokenizer_init": True,
            "max_model_len": settings["max_seq_len"],
            "max_num_seqs": settings["max_batch_size"],
            "max_num_batched_tokens": settings["max_batched_tokens"],
            "enable_prefix_caching": settings["prefix_caching"],
            "seed": settings["seed"] % 2**31,
            "disable_log_stats": False,
        }
        asked |= settings["options"]
        block = asked.setdefault("block_size", 128)  # its own choice on a CPU
        blocks = settings["kv_bytes"] // (block * settings["kv_bytes_per_token"])
        if blocks < 2:  # one is never used
            raise ValueError(f"kv.memory holds {blocks} blocks of {block} tokens, and two are needed")
        asked.setdefault("num_gpu_blocks_override", blocks)
        with timed_compiling() as compiling:
            self.engine = LLMEngine.from_engine_args(EngineArgs(model=folder, trust_remote_code=False, **asked))
        loaded = time.perf_counter() - began
        self.submit(
            {"id": "warm-up", "prompt": [1, 2, 3], "max_tokens": 4, "eos": [], "ignore_eos": True, "sampling": {}}
        )
        while self.busy():
            self.step()
        self.engine.reset_prefix_cache()
        config = self.engine.vllm_config
        cache = config.cache_config
        slots = int(cache.num_gpu_blocks) * int(cache.block_size)
        facts = {name: json.dumps(value) for name, value in asked.items()}
        facts |= {"version": vllm.__version__, "block size": str(cache.block_size)}
        metrics = {"engine/load_s": loaded}
        if not asked.get("enforce_eager"):
            metrics["engine/compile_s"] = sum(compiling) or float(config.compilation_config.compilation_time)
        self.ready = {"version": vllm.__version__, "facts": facts, "metrics": metrics, "kv_slots": slots}
        self.base = self.series()

    def submit(self, job: Json) -> None:
        """Queue a request of token ids; only new tokens come back."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            max_tokens=job["max_tokens"],
            min_tokens=job["max_tokens"] if job["ignore_eos"] else 0,
            ignore_eos=job["ignore_eos"],
            stop_token_ids=[] if job["ignore_eos"] else job["eos"],
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            **({"temperature": 0.0} | job["sampling"]),
        )
        self.engine.add_request(job["id"], {"prompt_token_ids": job["prompt"]}, sampling)

    def abort(self, name: str) -> None:
        """Forget a request."""
        self.engine.abort_request([name])

    def busy(self) -> bool:
        """Whether a request is not done."""
        return bool(self.engine.has_unfinished_requests())

    def step(self) -> list[Event]:
        """One step of vLLM."""
        outputs = self.engine.step()
        now, events = time.perf_counter(), list[Event]()
        for output in outputs:
            (sample,) = output.outputs
            events.append(["tokens", output.request_id, list(sample.token_ids), now])
            if output.finished:
                told: Json = {"cached": output.num_cached_tokens}
                if output.metrics is not None:
                    told["scheduled"] = output.metrics.scheduled_ts
                events.append(["end", output.request_id, sample.finish_reason or "abort", now, told])
        return events

    def stats(self) -> Json:
        """Its own metrics, counted from the end of the warm-up."""
        return {
            name: value - (self.base[name] if name in ("preemptions", "prefix_queries", "prefix_hits") else 0)
            for name, value in self.series().items()
        }

    def series(self) -> Json:
        """Its own metrics."""
        series: Json = {}
        for metric in self.engine.get_metrics():
            name = _SERIES.get(metric.name)
            if name is not None:
                series[name] = series.get(name, 0) + metric.value
        return series
