"""transformers as an engine: `Static`, padded batches through generate, and `Continuous`, its paged batching.

Run by host.py; needs transformers and torch alone.
"""

import time
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, StoppingCriteria

Json = dict[str, Any]
Event = list[Any]


def build(settings: Json) -> tuple[Any, Json]:
    """The model, and what there is to say of it."""
    began = time.perf_counter()
    if settings["threads"]:
        torch.set_num_threads(settings["threads"])
    torch.manual_seed(settings["seed"])
    dtype, model = getattr(torch, settings["dtype"]), settings["model"]
    options = {"dtype": dtype, "attn_implementation": "sdpa"}
    if model["weights"] is not None:
        options["use_safetensors"] = True
        loaded = AutoModelForCausalLM.from_pretrained(model["weights"], trust_remote_code=False, **options)
    elif model["path"] is not None:
        config = AutoConfig.from_pretrained(model["path"], trust_remote_code=False)
        loaded = AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options)
    else:
        config = AutoConfig.for_model(model["family"], **model["architecture"])
        loaded = AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options)
    facts = {
        "version": transformers.__version__,
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
    }
    metrics = {"engine/load_s": time.perf_counter() - began}
    return loaded.eval(), {"version": transformers.__version__, "facts": facts, "metrics": metrics}


class Static:
    """One padded batch after another, each to its longest output: what is beyond a request's own is lost."""

    def __init__(self, settings: Json) -> None:
        options = dict(settings["options"])
        self.most = int(options.pop("batch", settings["max_batch_size"]))
        if options:
            raise TypeError(f"unknown parameter {next(iter(options))}; known: batch")
        self.wait_s = settings["max_wait_ms"] / 1000
        self.model, self.ready = build(settings)
        self.ready["facts"] |= {"batch": str(self.most), "KV cache": "grows, kv.memory does not bound it"}
        self.waiting: list[Json] = []
        self.since = 0.0
        self.submit({"id": "", "prompt": [1, 2, 3], "max_tokens": 4, "eos": [], "ignore_eos": True})
        self.since = -self.wait_s
        self.step()

    def submit(self, job: Json) -> None:
        """Queue a request."""
        if not self.waiting:
            self.since = time.perf_counter()
        self.waiting.append(job)

    def abort(self, name: str) -> None:
        """Forget a request that waits; one in a batch ends with it."""
        self.waiting = [job for job in self.waiting if job["id"] != name]

    def busy(self) -> bool:
        """Whether a request waits."""
        return bool(self.waiting)

    def stats(self) -> Json:
        """It says nothing of itself while it works."""
        return {}

    def step(self) -> list[Event]:
        """Wait for a batch to be full, up to a time; then serve it."""
        if len(self.waiting) < self.most and time.perf_counter() - self.since < self.wait_s:
            time.sleep(0.001)
            return []
        batch, self.waiting = self.waiting[: self.most], self.waiting[self.most :]
        self.since = time.perf_counter()
        width, longest = max(len(job["prompt"]) for job in batch), max(job["max_tokens"] for job in batch)
        ids = torch.tensor([[0] * (width - len(job["prompt"])) + job["prompt"] for job in batch])
        mask = torch.tensor([[0] * (width - len(job["prompt"])) + [1] * len(job["prompt"]) for job in batch])
        clock = Times(batch, width)
        with torch.inference_mode():
            self.model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=longest,
                min_new_tokens=longest,
                pad_token_id=0,
                eos_token_id=None,
                stopping_criteria=[clock],
            )
        return clock.events


class Times(StoppingCriteria):  # type: ignore[misc]
    """Notes each token when generate has it; ends it when every request has what it asked for."""

    def __init__(self, batch: list[Json], width: int) -> None:
        self.batch, self.width = batch, width
        self.events: list[Event] = []
        self.left = dict(enumerate(batch))

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        """See StoppingCriteria."""
        now, made = time.perf_counter(), input_ids.shape[1] - self.width
        newest = input_ids[:, -1].tolist()
        for row, job in list(self.left.items()):
            token = newest[row]
            self.events.append(["tokens", job["id"], [token], now])
            ended = token in job["eos"] and not job["ignore_eos"]
            if ended or made == job["max_tokens"]:
                self.events.append(["end", job["id"], "stop" if ended else "length", now, {}])
                del self.left[row]
        return torch.full((len(self.batch),), not self.left)


class Continuous:
    """transformers' own scheduler and pages, in a thread of its own."""

    def __init__(self, settings: Json) -> None:
        from transformers import ContinuousBatchingConfig

        options = dict(settings["options"])
        self.model, self.ready = build(settings)
        size = int(options.pop("page_size", 256))
        blocks = settings["kv_bytes"] // (size * settings["kv_bytes_per_token"])
        if blocks < 1:
            raise ValueError(f"kv.memory holds no page of {size} tokens")
        asked = {
            "page_size": size,
            "num_blocks": blocks,
            "max_batch_tokens": settings["max_batched_tokens"],
            "max_requests_per_batch": settings["max_batch_size"],
            "allow_block_sharing": settings["prefix_caching"],
        }
        config = ContinuousBatchingConfig(**(asked | options))
        generation = GenerationConfig(max_new_tokens=settings["max_seq_len"], do_sample=False, eos_token_id=-1)
        self.manager = self.model.init_continuous_batching(
            generation_config=generation, continuous_batching_config=config
        )
        self.manager.start()
        self.ready["facts"] |= {name: str(value) for name, value in (asked | options).items()}
        self.ready["kv_slots"] = blocks * size
        self.sent: dict[str, int] = {}
        self.submit({"id": "warm-up", "prompt": [1, 2, 3], "max_tokens": 4, "eos": [], "ignore_eos": True})
        while self.sent:
            self.step()

    def submit(self, job: Json) -> None:
        """Hand a request to the manager."""
        self.sent[job["id"]] = 0
        eos = -1 if job["ignore_eos"] or not job["eos"] else job["eos"]
        self.manager.add_request(
            job["prompt"],
            request_id=job["id"],
            max_new_tokens=job["max_tokens"],
            streaming=True,
            record_timestamps=True,
            eos_token_id=eos,
        )

    def abort(self, name: str) -> None:
        """Cancel a request."""
        if self.sent.pop(name, None) is not None:
            self.manager.cancel_request(name)

    def busy(self) -> bool:
        """Whether a request is on its way."""
        return bool(self.sent)

    def stats(self) -> Json:
        """It says nothing of itself while it works."""
        return {}

    def step(self) -> list[Event]:
        """Wait for the next outputs."""
        output = self.manager.get_result(timeout=0.02)
        if output is None:
            if not self.manager.is_running():
                raise RuntimeError("the thread of continuous batching has ended")
            return []
        name = output.request_id
        if name not in self.sent:
            return []
        times = output.timestamps or []
        now = time.perf_counter()
        first, tokens = self.sent[name], list(output.generated_tokens)
        events: list[Event] = [
            ["tokens", name, [token], times[index] if index < len(times) else now]
            for index, token in enumerate(tokens[first:], start=first)
        ]
        self.sent[name] = len(tokens)
        if output.is_finished():
            del self.sent[name]
            reason = "failed" if output.error else "length"
            events.append(["end", name, reason, now, {"error": output.error}])
        return events
