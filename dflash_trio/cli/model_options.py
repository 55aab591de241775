"""The options of one model block."""

from __future__ import annotations

from functools import partial
from typing import get_args

from attrs import evolve

from dflash_trio.cli import values
from dflash_trio.cli.option import Option, Scope
from dflash_trio.cli.values import choice, integer, number
from dflash_trio.config import EFFORTS, CacheType, Thinking

_model = partial(Option, scope=Scope.MODEL)
_later = partial(Option, scope=Scope.MODEL, available=False)

_CACHE_TYPE = choice(*get_args(CacheType))

TOOL_PARSERS = (
    *("hermes", "qwen-xml", "llama3-json", "llama-pythonic"),
    *("mistral", "deepseek", "gemma", "gpt-oss"),
)
"""The names of text.tool_calls' formats. Written down here, so that ``--help`` need not import
their parsers; a test compares the two."""

_TOOL_PARSER = evolve(choice(*TOOL_PARSERS), metavar="NAME")

# The formatter would spread each row of the table over eight lines.
# fmt: off
_IDENTITY = (
    _model("model", takes=values.PATH, default="required",
           help="Start a model's block and name its GGUF file (of a split one, the first part)."),
    _model("model-name", takes=values.NAME, default="the file's stem",
           help="The model's name for clients; slashes and blanks are allowed."),
    _model("alias", takes=values.NAME, default="none", field="aliases", repeatable=True,
           help="One more name for the model; may be repeated."),
)

_PLACEMENT = (
    _model("target-device", takes=values.DEVICE_OR_AUTO, default="auto", field="target_device",
           help="Where the model loads; auto is the first GPU with room, else cpu:0."),
    _model("gpu-layers", takes=integer(0, 10_000), default="all on a GPU", field="gpu_layers",
           help="How many layers go to the GPU; the rest stays on the CPU."),
    _model("cpu-moe", takes=None, default="off", field="cpu_moe",
           help="Keep the experts of a mixture-of-experts model on the CPU."),
    # ggml has room for 512 threads in a pool.
    _model("threads", takes=integer(1, 512), default="usable cores / loaded CPU blocks",
           field="threads", help="CPU threads of this model."),
    _model("no-mmap", takes=None, default="off", field="mmap", flag_value=False,
           help="Read the file into memory instead of mapping it."),
    _model("mlock", takes=None, default="off", field="mlock",
           help="Keep the weights from being swapped out."),
)

_CAPACITY = (
    _model("max-ctx", takes=values.CONTEXT, default="min(trained context, 8192)", field="max_ctx",
           help="Tokens that one sequence may hold, prompt and reply together."),
    # llama.cpp knows at most 256 sequences in a context.
    _model("max-concurrency", takes=integer(1, 256), default="1", field="max_concurrency",
           help="Sequences that the model generates at a time."),
    _model("kv-pool-tokens", takes=integer(2, 2**31 - 1), default="max-ctx x max-concurrency",
           field="kv_pool_tokens", help="KV cells that the model's sequences share."),
    _model("decode-headroom", takes=values.TOKENS, default="128", field="decode_headroom",
           help="Cells that admission promises a sequence beyond its prompt."),
    _model("cache-type-k", takes=_CACHE_TYPE, default="f16", field="cache_type_k",
           help="The type of the K cache."),
    _model("cache-type-v", takes=_CACHE_TYPE, default="f16", field="cache_type_v",
           help="The type of the V cache; a quantized one needs flash attention."),
    _model("flash-attn", takes=choice("auto", "on", "off"), default="auto", field="flash_attn",
           help="Whether attention runs in flash kernels."),
    _model("fa-window", takes=values.TOKEN_BUDGET, default="0", only_value="0",
           help="The window of attention in tokens; 0 is full attention."),
    _model("chunk", takes=integer(1, 65536), default="512", field="chunk",
           help="Prompt tokens that one step works off."),
    _model("rope-freq-base", takes=values.POSITIVE, default="the file's", field="rope_freq_base",
           help="The base frequency of the rotary positions."),
    _model("rope-freq-scale", takes=values.POSITIVE, default="the file's",
           field="rope_freq_scale", help="The factor on the rotary frequencies."),
)

_CHAT = (
    _model("chat-template-file", takes=values.FILE, default="the model file's template",
           field="chat_template_file", help="A Jinja chat template to use instead."),
    _model("model-card", takes=values.FILE, field="model_card_file",
           default="MODEL.card.toml beside the model, if there is one",
           help="A TOML file of the model's own defaults."),
    _model("default-max-tokens", takes=values.TOKENS, field="default_max_tokens",
           default="the card's, else 16000, or what there is room for",
           help="The reply limit of requests that name none."),
    _model("hard-limit-reply-budget", takes=values.TOKEN_BUDGET, field="hard_limit_reply_budget",
           default="the card's, else min(4096, half the context)",
           help="Tokens kept for the reply once thinking has used its share."),
    _model("think-max-tokens", takes=values.TOKEN_BUDGET, field="think_max_tokens",
           default="the card's, else default-max-tokens less the reply budget",
           help="The most tokens that one reply may think."),
    *(
        _model(f"reasoning-effort-{effort}", takes=values.TOKEN_BUDGET,
               field=f"reasoning_efforts.{effort}",
               default=f"the card's, else {share} of think-max-tokens",
               help=f"Thinking tokens of a request with reasoning effort {effort}.")
        for effort, share in zip(EFFORTS, ("1/8", "1/2", "all", "all", "all"), strict=True)
    ),
    _model("thinking", takes=choice(*get_args(Thinking)), field="thinking",
           default="the card's, else auto",
           help="Whether the model thinks; auto is what its template does when told nothing."),
    _model("tool-parser", takes=_TOOL_PARSER, field="tool_parser",
           default="the card's, else from the template",
           help=f"The form in which the model writes its tool calls: {_TOOL_PARSER.form}."),
)

_SAMPLING = (
    _model("temperature", takes=number(0, 100), default="the card's, else 0.8",
           field="sampling.temperature",
           help="The temperature of requests that name none; 0 is greedy."),
    _model("top-p", takes=values.RATIO, default="the card's, else 0.95", field="sampling.top_p",
           help="The probability mass to sample from; 1 is all of it."),
    _model("top-k", takes=integer(0, 2**31 - 1), default="the card's, else 40",
           field="sampling.top_k", help="How many tokens to sample from; 0 is all of them."),
    _model("min-p", takes=number(0, 1), default="the card's, else 0.05", field="sampling.min_p",
           help="The least probability, as a share of the likeliest token's."),
    _model("repeat-penalty", takes=number(0.01, 100), default="the card's, else 1 (none)",
           field="sampling.repeat_penalty", help="The penalty on tokens that came up lately."),
    _model("seed", takes=integer(0, 2**63 - 1, words={"-1": None}), default="the card's, else -1",
           field="sampling.seed", help="The seed of requests that name none; -1 is a random one."),
)

_CACHES = (
    _model("prefix-cache-slots", takes=integer(0, 255), default="8", field="prefix_cache_slots",
           help="Ended sequences kept for prompts that begin alike; 0 keeps none."),
    _model("prefill-cache-slots", takes=integer(0, 255), default="0", field="prefill_cache_slots",
           help="Whole prompts kept as such, beside what became of them."),
    _model("disk-prefix-cache", takes=values.DIRECTORY_OR_OFF, default="off",
           field="disk_prefix_cache",
           help="A folder that keeps prompt beginnings over restarts, in the clear."),
)

_DRAFTING = (
    _model("draft", takes=values.PATH, default="none", field="draft",
           help="The GGUF file of a draft for speculative decoding, or prompt-lookup."),
    _model("draft-device", takes=values.DRAFT_DEVICE, default="the target's",
           field="draft_device", help="Where the draft loads."),
    _model("draft-max", takes=integer(1, 256), default="block size - 1, or 16",
           field="draft_max", help="Tokens drafted at a time."),
    _model("ddtree", takes=None, default="off", field="ddtree",
           help="Draft a tree of continuations instead of one chain; all slots share the cells."),
    # With one more for the sequence itself, what a step on a GPU verifies.
    _model("ddtree-budget", takes=integer(1, 255), default="22", field="ddtree_budget",
           help="Nodes of a drafted tree, at most."),
    _model("lazy-draft", takes=None, default="off", field="lazy_draft",
           help="Load the draft when a request comes, and free it after five idle minutes."),
)

_OTHER = (
    _model("on-sigterm", takes=choice("drain", "finalize"), field="on_sigterm",
           default="drain with one slot, else finalize",
           help="On shutdown, finish this model's active requests or end them properly at once."),
    _model("ds4-fused-decode", takes=None, default="as the GPU can", field="ds4_fused_decode",
           help="DeepSeek V4: decode in fused kernels, as is done wherever there are any."),
    _model("ds4-expert-top-k", takes=integer(1, 256), default="the file's",
           field="ds4_expert_top_k", help="DeepSeek V4: experts that a token uses."),
    _model("ds4-prefill", takes=choice("exact"), default="exact", field="ds4_prefill",
           help="DeepSeek V4: how prompts are worked off; there is no other way."),
)

MODEL_OPTIONS: tuple[Option, ...] = (
    *_IDENTITY, *_PLACEMENT, *_CAPACITY, *_CHAT, *_SAMPLING, *_CACHES, *_DRAFTING, *_OTHER,
)
# fmt: on
