"""Chat templates for model files that bring none.

=============================  ========  ====================================================
``general.architecture``       template  turns
=============================  ========  ====================================================
begins with ``gemma``          gemma     ``<start_of_turn>user`` ... ``<end_of_turn>``; the
                                         assistant is called ``model``; there is no system
                                         role, so system text and tools stand in front of the
                                         first user turn, followed by a blank line; contents
                                         are trimmed
anything else                  chatml    ``<|im_start|>role`` ... ``<|im_end|>``
=============================  ========  ====================================================

Both show tools, tool calls and tool results as JSON in ``<tools>``, ``<tool_call>`` and
``<tool_response>`` tags.
"""

from __future__ import annotations

import attrs

_TOOLS = """\
{%- macro tool_list() -%}
You can call these functions:
<tools>
{% for tool in tools %}
{{ tool | tojson }}
{% endfor %}
</tools>
To call one, answer with its name and arguments as JSON:
<tool_call>
{"name": "...", "arguments": {...}}
</tool_call>
{%- endmacro -%}
{%- macro calls(message) -%}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
{%- if message.content or not loop.first %}{{ '\\n' }}{% endif -%}
<tool_call>
{"name": {{ function.name | tojson }}, "arguments": {{ function.arguments
    if function.arguments is string else function.arguments | tojson }}}
</tool_call>
{%- endfor -%}
{%- endmacro -%}
"""

_CHATML = (
    _TOOLS
    + """\
{%- set head = messages[0].content if messages and messages[0].role == 'system' else '' -%}
{%- if tools -%}
<|im_start|>system
{% if head %}{{ head }}{{ '\\n\\n' }}{% endif %}{{ tool_list() }}<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'system' and loop.first and tools -%}
{%- elif message.role == 'tool' -%}
{%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}

<tool_response>
{{ message.content }}
</tool_response>
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif -%}
{%- else -%}
<|im_start|>{{ message.role }}
{{ message.content }}{{ calls(message) }}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""
)

_GEMMA = (
    _TOOLS
    + """\
{{- bos_token -}}
{%- set ns = namespace(front='') -%}
{%- if messages and messages[0].role == 'system' -%}
{%- set ns.front = messages[0].content | trim -%}
{%- endif -%}
{%- if tools -%}
{%- set ns.front = ns.front ~ ('\\n\\n' if ns.front else '') ~ tool_list() -%}
{%- endif -%}
{%- for message in messages if message.role != 'system' -%}
{%- set role = 'model' if message.role == 'assistant' else 'user' -%}
{%- if ns.front and role != 'user' -%}
<start_of_turn>user
{{ ns.front }}<end_of_turn>
{% set ns.front = '' -%}
{%- endif -%}
<start_of_turn>{{ role }}
{% if ns.front %}{{ ns.front }}{{ '\\n\\n' }}{% set ns.front = '' %}{% endif -%}
{%- if message.role == 'tool' -%}
<tool_response>
{{ message.content | trim }}
</tool_response>
{%- else -%}
{{ message.content | trim }}{{ calls(message) }}
{%- endif -%}
<end_of_turn>
{% endfor -%}
{%- if ns.front -%}
<start_of_turn>user
{{ ns.front }}<end_of_turn>
{% endif -%}
{%- if add_generation_prompt -%}
<start_of_turn>model
{% endif -%}
"""
)


@attrs.frozen
class BuiltInTemplate:
    """A chat template of our own."""

    source: str
    """Jinja text, for ``ChatTemplate``."""
    name: str
    """``gemma`` or ``chatml``."""
    stop_strings: tuple[str, ...]
    """What ends a turn. Where the vocabulary has it as one control token, that token ends
    generation; where it has not, the model writes it letter by letter and the caller adds it to
    the stop strings of each request."""


CHATML = BuiltInTemplate(_CHATML, "chatml", ("<|im_end|>",))
GEMMA = BuiltInTemplate(_GEMMA, "gemma", ("<end_of_turn>",))


def default_template(architecture: str) -> BuiltInTemplate:
    """The template for a model file without one, by its ``general.architecture``."""
    return GEMMA if architecture.startswith("gemma") else CHATML
