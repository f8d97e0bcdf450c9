"""What a run says on the terminal, from its settings to its figures."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from kvlab.config import RunConfig, format_bytes
from kvlab.config.effects import without_effect
from kvlab.config.fleet import LinkConfig
from kvlab.engine.protocol import Reporting, ServingEngine
from kvlab.engine.threads import explain_threads
from kvlab.kv.groups import layers_per_block
from kvlab.kv.pools import POOLS
from kvlab.kv.tiers.settings import tier_pages
from kvlab.lab.results.answers import sample_answers
from kvlab.lab.results.fleet import replica_figures, replica_table
from kvlab.lab.results.load import open_load
from kvlab.lab.results.log import RunLog
from kvlab.lab.results.sureness import Predicted
from kvlab.lab.results.tables import comparison_table, config_tree, profile_table
from kvlab.lab.run.estimate import estimate_sentence, is_worth_estimating
from kvlab.lab.run.peer_plan import Plan
from kvlab.lab.run.plan import RunPlan, asked_note
from kvlab.lab.run.profile import Part
from kvlab.lab.run.recording import RunContext
from kvlab.lab.run.remarks import remarks_on_devices
from kvlab.lab.run.requests import lengths_note
from kvlab.lab.run.serve import Served
from kvlab.lab.settings import as_recorded
from kvlab.lab.terminal import marked, print_note, print_whole
from kvlab.lab.tracking import RunStatus, Tracker
from kvlab.models.sparse import SparseConfig
from kvlab.planning.devices import share_in_words, usual_server
from kvlab.planning.startup import startup
from kvlab.secrets import redact
from kvlab.simulation.timings import Timing

_OPTIMIZE = "optimize={} has no effect here: it is read by sweeps (-m, sweep=) and kvlab tune"
WARNING, PREDICTED = "warning", "predicted"  # kinds of notes


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended and what it measured."""

    name: str
    status: RunStatus
    metrics: dict[str, float]
    error: str | None = None
    tracking_error: str | None = None
    unwritten: tuple[str, ...] = ()  # why files are missing, a sentence each


class Reporter:
    """Says what a run does, to its console."""

    def __init__(self, context: RunContext) -> None:
        self.context, self.console = context, context.console

    def note(self, text: str, kind: str = WARNING) -> None:
        """What a user should know."""
        print_note(self.console, text, kind)

    def _once(self, text: str) -> None:
        """What is the same for most runs of a sweep."""
        if text not in self.context.said:
            self.console.print(text)
            self.context.said.add(text)

    def announce(self, plan: Plan) -> None:
        """What is about to run."""
        context, console, config = self.context, self.console, plan.config
        if context.in_sweep:
            console.rule(marked("[bold]{}[/]", context.heading or context.name), align="left", style="dim")
        elif config.verbose:
            recorded = as_recorded(asdict(config), context.made.written())
            console.print(config_tree(recorded, context.made.choices))
        else:
            choices = "  ".join(f"{group}={choice}" for group, choice in context.made.choices.items())
            console.print(f"{choices}  (verbose=true: every setting)", style="dim")
        alone = [] if config.optimize is None or context.in_sweep else [_OPTIMIZE.format(config.optimize)]
        for sentence in (*without_effect(config), *alone):
            if sentence not in context.said:
                self.note(sentence)
        if (own := plan.own) is None:
            count = f"{len(plan.requests)} requests of {redact(config.workload.name)}"
            console.print(f"{config.engine.kind} on {plan.machine}: {count}", soft_wrap=True)
            return
        self._once("; ".join([_weights(own), *([] if own.groups else [_cache(own)]), *_kernels(own), _where(own)]))
        notes = _link(config), lengths_note(config, plan.requests), asked_note(own)
        for sentence in filter(None, notes):
            self._once(sentence)
        if not config.kv.windows and all(layer.sliding_window is None for layer in own.model.layers):
            name = redact(config.model.name)
            self.note(f"kv.windows=False has no effect here: no layer of {name} has a sliding window")
        if (
            config.kv.partial_reuse
            and config.kv.prefix_sharing
            and any(part.plan.pool.groups for part in own.parts)
        ):
            what, name = (
                own.model.states_called or "sliding windows",
                redact(config.model.name),
            )
            self.note(f"kv.partial_reuse finds whole blocks alone here: layers of {name} have {what}")
        for group in own.parts:
            name = f"{len(group.replicas)} of {group.name}: " if own.groups else ""
            if own.groups:
                console.print(f"{name}{_cache(group.plan)}", soft_wrap=True)
            if (timing := group.plan.timing) is not None:
                self._once(name + _as_simulated(group.plan, timing))
                for sentence in remarks_on_devices(group.plan, timing):
                    self.note(f"{name}{sentence}")

    def estimate(self, plan: Plan) -> None:
        """How long it will take here, where that is worth measuring the machine's rates."""
        if plan.own is None or not is_worth_estimating(plan.own):
            return
        from kvlab.lab.machine_rates import rates_here  # this late, since it imports torch

        rates = rates_here(plan.config.executor.products, plan.config.executor.all_threads)
        self.console.print(estimate_sentence(plan.own, rates))

    def engine(self, engine: ServingEngine) -> None:
        """Say what an engine that is not kvlab's is."""
        if isinstance(engine, Reporting):
            facts = ", ".join(f"{name} {value}" for name, value in engine.report().facts.items())
            self.console.print(f"engine: {facts}", soft_wrap=True)

    def served(self, plan: Plan, served: Served, sure: Mapping[str, Predicted]) -> None:
        """What was found wrong, a sample of the words, and what a user should know of the times."""
        log = served.log
        if log.fleet is not None and not self.context.in_sweep:
            figures = replica_figures(log.records, log.steps, plan.config.fleet.replicas, log.fleet)
            for name, own, _ in plan.parts:
                if name:
                    self.console.print(f"\n{name}", soft_wrap=True)
                print_whole(self.console, replica_table(figures[own.start : own.stop], own.start))
        for finding in served.findings or ():
            self.console.print(f"audit: {finding}", style="red")
        self.answers(log)
        for kind, remark in _remarks(plan, log, sure):
            self.note(remark, kind)

    def answers(self, log: RunLog) -> None:
        """A sample of a run's words; none in a sweep, whose points would drown in them."""
        for answer in () if self.context.in_sweep else sample_answers(log.records):
            self.console.print(marked("[bold]{}[/] {}", f"{answer.name}:", answer.prompt), soft_wrap=True)
            self.console.print(f"  {answer.text} ({answer.ending})", soft_wrap=True)

    def result(self, result: RunResult, tracker: Tracker, *, known_only: bool, brief: bool) -> None:
        """The figures, and where they are."""
        context, console, metrics = self.context, self.console, result.metrics
        if metrics and (result.unwritten or not context.in_sweep):
            console.print(comparison_table([(result.name, metrics)], known_only=known_only, brief=brief))
            if "profile/other_share" in metrics:
                console.print(profile_table(metrics, list(Part)))
        if result.status is RunStatus.INTERRUPTED:
            console.print(marked("[yellow]interrupted:[/] the figures are those of the part that ran"))
        if result.error:
            console.print(marked("[red]failed:[/] {}", result.error), soft_wrap=True)
        console.print(f"results: {context.directory}", soft_wrap=True)
        if not context.in_sweep:
            if tracker.run_id:
                console.print(f"run {tracker.run_id}")
            console.print(tracker.where(), soft_wrap=True)


def _weights(plan: RunPlan) -> str:
    """A model, and what its weights are kept in."""
    config, kept = plan.config, ", kept in 12 bits each" if plan.weights_format == "compact" else ""
    stored = config.executor.weights_dtype
    if isinstance(plan.model, SparseConfig):
        stored = plan.model.stored(config.executor.weights, config.executor.dtype)
    size = f"{format_bytes(plan.weights.parameters)} in {stored}{kept}"
    return f"{redact(config.model.name)}: {plan.model.num_parameters / 1e6:,.0f} M parameters, {size}"


def _kernels(plan: RunPlan) -> list[str]:
    """What computes attention and the rest; nothing, where nothing is computed."""
    if plan.kernels is None:
        return []
    ops, chosen = plan.kernels.ops, plan.chosen.get("kernels")
    reason = f" ({ops.reason})" if ops.reason and chosen == ops.name else ""
    return [f"attention: {plan.kernels.attention.name}, other kernels: {chosen}{reason}"]


def _where(plan: RunPlan) -> str:
    """The requests and the machine that serves them, with its ranks and threads."""
    executor, threads = plan.config.executor, plan.cpu_threads
    text = f"{len(plan.requests)} requests on {plan.machine}"
    if plan.is_real and executor.tensor_parallel > 1:
        text += f", {executor.tensor_parallel} ranks"
    if not threads:
        return text
    why = explain_threads(executor.threads, threads)
    return f"{text}, {threads} thread{'s' * (threads > 1)}" + (f" ({why})" if why else "")


def _cache(plan: RunPlan) -> str:
    """A replica's KV cache."""
    kv, pool = plan.config.kv, plan.pool
    text = f"KV cache: {pool.num_blocks} {POOLS.get(kv.backend).unit}s of {pool.block_size} tokens"
    if pool.groups:
        layers = layers_per_block(pool.groups)
        text += f" x {layers} layer{'s' * (layers > 1)}"
    text += f", {format_bytes(pool.num_bytes)} in {plan.config.kv_dtype}"
    for name, key in (("host memory", "kv.offload"), ("disk", "kv.offload_disk")):
        if pages := tier_pages(kv, pool, key):
            text += f", {pages:,} more in {name}"
    return text


def _as_simulated(plan: RunPlan, timing: Timing) -> str:
    """The limits of a simulated server and whose defaults they are, and why its steps are timed as they are."""
    config, hardware, scheduler = plan.config, plan.config.hardware, plan.config.scheduler
    tokens, sequences = scheduler.max_batched_tokens, scheduler.max_batch_size
    text = f"{config.framework.name} with steps of up to {tokens:,} tokens and {sequences:,} sequences"
    usual = usual_server(config)
    if (groups := config.executor.attention_data_parallel) > 1:
        text += f" of all {groups} groups of devices together"
    if usual:
        is_usual = tokens == usual.max_batched_tokens and sequences == min(usual.max_batch_size, tokens)
        text += f" ({usual.source} by default" + (
            ")" if is_usual else f": {usual.max_batched_tokens:,} and {usual.max_batch_size:,})"
        )
    text += f", up to {config.model.max_seq_len:,} tokens each"
    if usual and usual.chunks_blocks and (scheduler.chunk_unit or 1) <= scheduler.prompt_tokens:
        text += ", prompts in chunks (of a server with enable_chunked_prefill, which is off by default)"
    if hardware and config.kv.memory is None and config.kv.num_blocks is None:
        text += f"; {share_in_words(config, hardware)}"
        start = startup(config.framework, config.hardware)
        if start.otherwise and plan.working.is_of_logits:
            text += f"; vLLM counts {start.logit_bytes} bytes for each logit at its start{start.otherwise}"
    because = timing.because if config.executor.kind == "simulated" else None  # others make of it what they like
    return f"{text}; timing {timing.description}: {because}" if because else text


def _link(config: RunConfig) -> str | None:
    """What blocks are pulled over, and where its rate comes from; None: no replica pulls any."""
    fleet = config.fleet
    if not fleet.uses_link:
        return None
    text = f"K and V go between replicas at {fleet.link.gb_s:g} GB/s for each device (fleet.link.gb_s)"
    return f"{text}, 400 Gbit/s Ethernet unless set" if fleet.link.gb_s == LinkConfig.gb_s else text


def _of_one_pool(plan: Plan, log: RunLog) -> Iterator[str]:
    """That prompts found prefixes in one pool of all groups of a replica's devices, each of which has its own."""
    for name, replicas, own in plan.parts:
        groups = own.config.executor.attention_data_parallel
        found = any(record.cached_tokens for record in log.records if not name or record.replica in replicas)
        if groups > 1 and found:
            text = f"prefixes were found as in one pool; each of the {groups} groups of devices has one of its own,"
            text += " and finds those alone that it has computed"
            yield f"{name}: {text}" if name else text


def _after_the_end(config: RunConfig, log: RunLog) -> list[str]:
    """Events of a fleet that the run did not last for."""
    ends = f"the run ended at {log.duration_s:.3g} s"
    return [
        f"fleet.life={event} did not happen: {ends}" for event in config.fleet.events if event.at_s > log.duration_s
    ]


def _remarks(plan: Plan, log: RunLog, sure: Mapping[str, Predicted]) -> list[tuple[str, str]]:
    """Of which kind each is, and what it says."""
    remarks = [] if log.engine_report is None else [(WARNING, note) for note in log.engine_report.notes]
    remarks += _of_timing(plan, log)
    remarks += [(PREDICTED, f"{name}: {of.sentence()}" if name else of.sentence()) for name, of in sure.items()]
    remarks += [(WARNING, text) for text in _of_one_pool(plan, log)]
    if log.unsent:
        text = f"{log.unsent:,} turns were not sent, and count as refused: an earlier turn failed or was refused"
        remarks.append((WARNING, text))
    if not log.interrupted:
        remarks += [(WARNING, text) for text in _after_the_end(plan.config, log)]
    load = None if log.interrupted else open_load(plan.config.workload, log)
    if load is not None and (sentence := load.sentence()):
        remarks.append((WARNING, sentence))
    return remarks


def _of_timing(plan: Plan, log: RunLog) -> list[tuple[str, str]]:
    """What to know of the times of each group's steps."""
    remarks = list[tuple[str, str]]()
    for name, replicas, own in plan.parts:
        steps = [step for step in log.steps if step.replica in replicas] if name else log.steps
        if own.timing is not None and (text := own.timing.remark(steps)) is not None:
            remarks.append((WARNING, f"{name}: {text}" if name else text))
    return remarks
