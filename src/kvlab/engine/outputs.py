"""From a sampled token to the request's output: text, stop conditions, callbacks, and the end of a sequence."""

from contextlib import suppress

from kvlab.core import FinishReason, Sequence, StepOutput
from kvlab.engine.protocol import FinishCallback, OutputCallback
from kvlab.engine.scheduler.base import Scheduler
from kvlab.engine.text import Detokenizer, TextStream


class OutputProcessor:
    """Emits tokens and ends sequences. Knows every request that has not ended."""

    def __init__(
        self, scheduler: Scheduler, detokenize: Detokenizer | None = None, detokenize_all: Detokenizer | None = None
    ) -> None:
        self.requests: dict[str, list[Sequence]] = {}  # the sequences of each request that have not ended
        self._scheduler = scheduler
        self._detokenize, self._detokenize_all = detokenize, detokenize_all or detokenize
        self._on_output: dict[str, OutputCallback] = {}
        self._on_finish: dict[str, FinishCallback] = {}
        self._texts: dict[Sequence, TextStream] = {}  # of the sequences above, with a detokenizer

    @property
    def needs_every_token(self) -> bool:
        """Whether `process` has something to do for a token that does not end its sequence."""
        return self._detokenize is not None or bool(self._on_output)

    def add(
        self, sequences: list[Sequence], on_output: OutputCallback | None, on_finish: FinishCallback | None
    ) -> None:
        """A request was accepted; these are the sequences of its samples."""
        request = sequences[0].request
        self.requests[request.request_id] = sequences
        if on_output is not None:
            self._on_output[request.request_id] = on_output
        if on_finish is not None:
            self._on_finish[request.request_id] = on_finish
        asked, prompt = request.sampling, request.prompt_token_ids
        detokenize = self._detokenize if asked.skip_special_tokens else self._detokenize_all
        if detokenize is not None:
            for sequence in sequences:
                stream = TextStream(detokenize, prompt, asked.stop, asked.min_tokens, asked.include_stop)
                self._texts[sequence] = stream

    def process(self, sequence: Sequence, token: int) -> None:
        """Emit a sequence's newest token, and end the sequence if it is the last."""
        now = sequence.token_times_s[-1]
        if token in sequence.stop_token_ids:
            self.finish(sequence, FinishReason.STOP, now, token=token)
            return
        text, stopped = "", False
        if self._detokenize is not None:
            try:
                text, stopped = self._texts[sequence].add(token)
            except Exception as error:
                reason = f"its detokenizer raised {type(error).__name__}: {error}"
                self.finish(sequence, FinishReason.FAILED, now, reason, token)
                return
            sequence.text += text
        if stopped:
            self.finish(sequence, FinishReason.STOP, now, token=token, text=text)
        elif len(sequence.token_ids) >= sequence.ends_at:
            is_cut = sequence.ends_at == sequence.max_total_tokens
            self.finish(sequence, FinishReason.LENGTH if is_cut else FinishReason.STOP, now, token=token, text=text)
        elif self._on_output:
            self._emit(sequence, token, text)

    def finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        finished_s: float,
        error: str | None = None,
        token: int | None = None,
        text: str = "",
    ) -> None:
        """End a sequence; `token` and `text` are those it ended with, which have not been emitted yet."""
        sequence.finish_reason = reason
        self._scheduler.finish(sequence)
        sequence.error = error
        sequence.finished_s = finished_s
        request_id = sequence.request.request_id
        on_output, on_finish = self._on_output.get(request_id), self._on_finish.get(request_id)
        unfinished = self.requests[request_id]
        unfinished.remove(sequence)
        if not unfinished:
            del self.requests[request_id]
            self._on_output.pop(request_id, None)
            self._on_finish.pop(request_id, None)
        if sequence in self._texts:
            with suppress(Exception):  # where the detokenizer fails there is no more text
                rest = self._texts.pop(sequence).close()
                sequence.text += rest
                text += rest
        # The state above is complete before the callbacks run: they may abort or submit requests.
        if on_output is not None:
            with suppress(Exception):  # the sequence has ended, so that its callback can fail nothing any more
                on_output(_output(sequence, token, text))
        if on_finish is not None:
            on_finish(sequence.record())
        if reason is FinishReason.FAILED and not sequence.num_output_tokens:
            # Without a computed prompt the request's other samples cannot be forked.
            for sibling in sequence.siblings:
                if sibling.finish_reason is None and sibling.slot is None:
                    self.finish(sibling, reason, finished_s, error)

    def _emit(self, sequence: Sequence, token: int, text: str) -> None:
        """Call the request's callback; an exception in it ends this sequence alone."""
        on_output = self._on_output.get(sequence.request.request_id)
        if on_output is None:
            return
        try:
            on_output(_output(sequence, token, text))
        except Exception as error:
            if sequence.finish_reason is None:
                reason = f"its callback raised {type(error).__name__}: {error}"
                self.finish(sequence, FinishReason.FAILED, sequence.token_times_s[-1], reason)


def _output(sequence: Sequence, token: int | None, text: str) -> StepOutput:
    """A token, an end, or both. Log-probabilities of the prompt come with the first token."""
    is_first = sequence.spec.scores_prompt and sequence.num_output_tokens == 1
    return StepOutput(
        sequence.request.request_id,
        token,
        sequence.finish_reason,
        sequence.error,
        sequence.index,
        text,
        logprobs=sequence.logprobs[-1] if token is not None and sequence.logprobs else None,
        prompt_logprobs=tuple(sequence.prompt_logprobs) if is_first else None,
    )
