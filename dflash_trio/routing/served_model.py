"""ServedModel: a loaded model with everything a request needs of it, and nothing it does not.

Ties one block of the configuration to its tokenizer, its template, its defaults, its ledger and
its engine. Preparing a prompt is pure and thread-safe, so it can run off the event loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property

from ..config import ModelConfig
from ..engine.admission import KVLedger
from ..engine.client import EngineClient
from ..engine.model_runner import EngineError, ModelInfo, Vocabulary
from ..generation.constraint import TokenConstraint
from ..generation.errors import InvalidRequest
from ..generation.request import (
    GenerationRequest,
    PreparedPrompt,
    SamplingOverrides,
    ThinkingPlan,
    resolve_sampling,
)
from ..generation.status import (
    Default,
    DraftStatus,
    EngineTimings,
    ModelProperties,
    ModelStatus,
    PlacementStatus,
)
from ..text.builtin_templates import default_template
from ..text.chat_template import ChatTemplate, RenderedPrompt, TemplateError
from ..text.control_tokens import ControlTokens, Segment
from ..text.structured import BadConstraint, grammar_source
from .grammar_cache import GrammarCache
from .model_defaults import ModelDefaults, resolve_defaults
from .prompt_writer import PromptWriter, WrittenPrompt, offered_tools, shown_literals


class ServedModel:
    """One model that answers requests. Make it when its engine is ready, on a worker thread:
    compiling the template of a large vocabulary takes tens of milliseconds.

    Raises text.TemplateError for a template that does not compile.
    """

    def __init__(
        self,
        config: ModelConfig,
        client: EngineClient,
        *,
        info: ModelInfo,
        vocabulary: Vocabulary,
        ledger: KVLedger,
        template_source: str | None = None,
    ) -> None:
        """``template_source``: the operator's own template, over the file's and the built-in."""
        self.config = config
        self.client = client
        self.info = info
        self.ledger = ledger
        self._vocabulary = vocabulary
        self._token_of = vocabulary.control_tokens
        literals = {token: literal for literal, token in vocabulary.control_tokens.items()}
        self._literal_of = literals
        self._turn_ends: tuple[str, ...] = ()
        if template_source is not None:
            self.template_origin = f"file {config.chat_template_file}"
        elif info.chat_template is not None:
            template_source = info.chat_template
            self.template_origin = "model file"
        else:
            built_in = default_template(info.architecture)
            template_source = built_in.source
            self.template_origin = f"built-in {built_in.name}"
            # A turn's end that is no token of this vocabulary is written as text, and must be
            # found as text.
            self._turn_ends = tuple(
                stop for stop in built_in.stop_strings if stop not in vocabulary.control_tokens
            )
        if config.card is not None:
            self._turn_ends += config.card.turn_ends
        self._template_source = template_source
        self._bos_token = literals.get(vocabulary.bos, "") if vocabulary.bos is not None else ""
        self._eos_token = literals.get(vocabulary.eos, "") if vocabulary.eos is not None else ""
        tokens = ControlTokens(vocabulary.control_tokens)
        template = ChatTemplate(
            template_source,
            bos_token=self._bos_token,
            eos_token=self._eos_token,
            label=config.block_label,
            control_literals=tokens,
        )
        try:
            self._writer = PromptWriter(
                config.name, template, template_source, tokens, self.defaults, vocabulary
            )
        except ValueError as error:
            raise TemplateError(f"{config.block_label}: {error}") from error
        self._grammars = GrammarCache(vocabulary)

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def healthy(self) -> bool:
        return self.client.healthy

    def is_called(self, name: str) -> bool:
        """Whether this is its name or one of its aliases."""
        return name == self.name or name in self.config.aliases

    # ------------------------------------------------------------------------- preparing

    def prepare(self, request: GenerationRequest) -> PreparedPrompt:
        """Render and tokenize a request as this model reads it.

        CPU-bound, milliseconds to a second: call it off the event loop. Raises InvalidRequest
        for what this model's template, vocabulary or limits refuse.
        """
        try:
            return self._prepare(request)
        except EngineError as error:
            # The model went away meanwhile; the router asks for its health before using this.
            raise InvalidRequest(f"{self.name} cannot prepare the request: {error}") from error

    def _prepare(self, request: GenerationRequest) -> PreparedPrompt:
        tokens, written = self._read_prompt(request)
        wanted = request.max_tokens or self._default_max_tokens
        # A huge number becomes an ordinary one, but stays beyond what is left: cut to that, a
        # model with little headroom for this prompt would look like one with all of it.
        max_tokens = min(wanted, max(self.ledger.room, self.ledger.decode_headroom))
        sampling = resolve_sampling(request.sampling, self.defaults.sampling)
        for token, _ in sampling.logit_bias:
            if not 0 <= token < self._vocabulary.size:
                raise InvalidRequest(
                    f"logit_bias names token {token}, but {self.name} has only "
                    f"{self._vocabulary.size} tokens.",
                    param="logit_bias",
                )
        if request.raw_prompt is not None:
            return PreparedPrompt(
                tokens=tokens,
                max_tokens=max_tokens,
                sampling=sampling,
                stop=request.stop,
                ignore_eos=request.ignore_eos,
                n=request.n,
                constraint=self._constraint(request),
                logprobs=request.logprobs,
                cache_prompt=request.cache_prompt,
            )
        assert written is not None
        tools = offered_tools(request)
        form, calls = self._writer.reasoning, self._writer.tool_format
        literals: set[str] = set()
        plan = None
        if form is not None and written.tells_thinking:
            literals |= form.literals
            plan = self._thinking_plan(request, written, len(tokens), max_tokens)
        if tools:
            literals |= calls.control_literals
        return PreparedPrompt(
            tokens=tokens,
            max_tokens=max_tokens,
            sampling=sampling,
            stop=request.stop,
            turn_ends=self._turn_ends,
            ignore_eos=request.ignore_eos,
            n=request.n,
            thinking=plan,
            constraint=self._constraint(request),
            logprobs=request.logprobs,
            shown_tokens=shown_literals(literals, self._vocabulary),
            tool_format=calls.name if tools else None,
            tools=tools,
            cache_prompt=request.cache_prompt,
            parallel_calls=request.tool_choice.parallel,
        )

    def _thinking_plan(
        self,
        request: GenerationRequest,
        written: WrittenPrompt,
        prompt_tokens: int,
        max_tokens: int,
    ) -> ThinkingPlan:
        budget = self.defaults.think_max_tokens
        if request.thinking.effort is not None:
            budget = min(budget, self.defaults.efforts[request.thinking.effort])
        if request.thinking.budget_tokens is not None:
            budget = min(self.defaults.think_max_tokens, request.thinking.budget_tokens)
        # What there is room for counts, not what was asked for.
        answer = max(1, min(max_tokens, self.ledger.room - prompt_tokens))
        before_reply = answer - min(self.defaults.hard_limit_reply_budget, answer // 2)
        close, resume = self._writer.closing(request)
        return ThinkingPlan(
            new_splitter=self._writer.new_splitter(written),
            limit=min(budget, before_reply),
            limited_by="budget" if budget <= before_reply else "reply_budget",
            close_tokens=tuple(self._tokenize(self._writer.segments(close))),
            resume_tokens=tuple(self._tokenize(self._writer.segments(resume))),
        )

    def _constraint(self, request: GenerationRequest) -> TokenConstraint | None:
        choice = request.tool_choice
        try:
            if choice.forces:
                source = self._writer.tool_format.call_grammar(
                    [t for t in request.tools if choice.name in (None, t.name)],
                    parallel=choice.parallel,
                    controls=frozenset(self._token_of),
                )
                return self._grammars.compile(source)
            if request.constraint is not None:
                return self._grammars.compile(grammar_source(request.constraint))
        except BadConstraint as error:
            param = "tools" if choice.forces else "response_format"
            raise InvalidRequest(f"{param}: {error}", param=param) from error
        return None

    def tokenize_chat(self, request: GenerationRequest) -> tuple[int, ...]:
        """The prompt's tokens, with exactly one BOS if the model wants one."""
        return self._read_prompt(request)[0]

    def _read_prompt(
        self, request: GenerationRequest
    ) -> tuple[tuple[int, ...], WrittenPrompt | None]:
        written = None
        try:
            if request.raw_prompt is not None:
                tokens = self._raw_tokens(request.raw_prompt)
            else:
                written = self._writer.write(request)
                tokens = self._with_one_bos(self._tokenize(written.rendered.segments))
        except EngineError as error:
            # The model went away meanwhile; the router asks for its health before using this.
            raise InvalidRequest(f"{self.name} cannot tokenize the prompt: {error}") from error
        if not tokens:
            # An engine cannot decode nothing.
            if request.raw_prompt is not None:
                raise InvalidRequest("prompt: must not be empty.", param="prompt")
            raise InvalidRequest(
                f"The chat template of {self.name} makes an empty prompt of this conversation.",
                param="messages",
            )
        return tokens, written

    def _raw_tokens(self, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return self.tokenize_text(prompt, add_special=True, parse_special=True)
        for index, token in enumerate(prompt):
            if not 0 <= token < self._vocabulary.size:
                raise InvalidRequest(
                    f"prompt[{index}]: {self.name} has only the tokens 0 to "
                    f"{self._vocabulary.size - 1}.",
                    param=f"prompt[{index}]",
                )
        return prompt

    def render_chat(self, request: GenerationRequest) -> RenderedPrompt:
        """The prompt as this model's template writes it. Raises InvalidRequest if it refuses."""
        return self._writer.write(request).rendered

    @cached_property
    def defaults(self) -> ModelDefaults:
        """What holds where a request says nothing."""
        return resolve_defaults(self.config, room=self.ledger.room, max_ctx=self.ledger.max_ctx)

    @property
    def _default_max_tokens(self) -> int:
        return self.defaults.default_max_tokens

    def _tokenize(self, segments: Iterable[Segment]) -> list[int]:
        tokens: list[int] = []
        for segment in segments:
            if segment.control:
                tokens.append(self._token_of[segment.text])
            else:
                # Text only: a control token's literal in here was written by a client.
                tokens += self._vocabulary.tokenize(segment.text, parse_special=False)
        return tokens

    def _with_one_bos(self, tokens: list[int]) -> tuple[int, ...]:
        bos = self._vocabulary.bos
        if bos is None:
            return tuple(tokens)
        start = 0
        while start < len(tokens) and tokens[start] == bos:
            start += 1
        if start or self._vocabulary.adds_bos:
            return (bos, *tokens[start:])
        return tuple(tokens) if tokens else (bos,)

    # -------------------------------------------------------------------------- raw text

    @property
    def vocabulary_size(self) -> int:
        return self._vocabulary.size

    def tokenize_text(
        self, text: str, *, add_special: bool, parse_special: bool
    ) -> tuple[int, ...]:
        """The tokens of a raw text. CPU-bound. Raises EngineError once the model is unloaded.

        ``parse_special``: literals of control tokens become those tokens. ``add_special``: begin
        with exactly one BOS if the model wants one, also where the text spells one out.
        """
        tokens = self._vocabulary.tokenize(text, parse_special=parse_special)
        return self._with_one_bos(tokens) if add_special else tuple(tokens)

    def piece(self, token: int) -> bytes:
        """What a token stands for; control tokens by their literals.

        Raises EngineError once the model is unloaded.
        """
        literal = self._literal_of.get(token)
        return literal.encode() if literal is not None else self._vocabulary.piece(token)

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of tokens; bytes that are no whole character become U+FFFD."""
        return b"".join(map(self.piece, tokens)).decode("utf-8", "replace")

    # ------------------------------------------------------------------------ inspection

    def status(self, priority: int, phases: Iterable[str]) -> ModelStatus:
        """A snapshot. ``phases``: of this model's reservations."""
        in_flight = dict.fromkeys(("reserved", "prefill", "decode", "draining"), 0)
        in_flight.update(Counter(phases))
        return ModelStatus(
            name=self.name,
            aliases=self.config.aliases,
            path=self.config.path,
            architecture=self.info.architecture,
            placement=PlacementStatus(
                target_device=self.info.device,
                draft_device=None,
                threads=self.info.threads,
                gpu_layers=self.info.gpu_layers,
            ),
            priority=priority,
            max_ctx=self.ledger.max_ctx,
            trained_ctx=self.info.trained_ctx,
            vocab_size=self.info.vocab_size,
            ledger=self.ledger.statistics(),
            engine=self.client.statistics,
            in_flight=in_flight,
            draft=DraftStatus(),
            healthy=self.healthy,
            unhealthy_reason=self.client.unhealthy_reason,
            drains=self.config.sigterm_policy == "drain",
            chat_template=self.template_origin,
        )

    def timings(self) -> EngineTimings:
        """A snapshot, taken without waiting."""
        return self.client.timings

    def properties(self) -> ModelProperties:
        """What stays as it is while the model runs, and who decided it."""
        config, given = self.config, self.config.given

        def default(field: str, value: float | None) -> Default:
            return Default(value, "flag" if field in given else "built-in")

        # These have no option: requests set them, or they stay as they are.
        unset = resolve_sampling(SamplingOverrides(), self.defaults.sampling)
        return ModelProperties(
            sampling=self.defaults.of_sampling()
            | {
                "presence_penalty": Default(unset.presence_penalty, "built-in"),
                "frequency_penalty": Default(unset.frequency_penalty, "built-in"),
                "repeat_last_n": Default(unset.penalty_last_n, "built-in"),
            },
            limits={
                "max_ctx": default("max_ctx", self.ledger.max_ctx),
                "max_concurrency": default("max_concurrency", self.ledger.slots),
                "kv_pool_tokens": default("kv_pool_tokens", self.ledger.statistics().pool),
                "decode_headroom": default("decode_headroom", self.ledger.decode_headroom),
                "chunk": default("chunk", config.chunk),
            }
            | self.defaults.of_limits(),
            chat_template=self._template_source,
            bos_token=self._bos_token,
            eos_token=self._eos_token,
        )
