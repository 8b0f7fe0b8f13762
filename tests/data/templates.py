"""Chat templates of our own in the styles of well-known families, and a tokenizer of bytes that carries them.

They keep what matters for masks: where the beginning token stands, how a turn ends, and what each family rewrites in
the history. Every byte is a token, so that a mask can be read off the text.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Family:
    template: str
    specials: tuple[str, ...]
    eos: str
    bos: str | None = None


LLAMA3 = Family(
    """\
{{- bos_token -}}
{%- if tools -%}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nTools: ' + (tools | tojson) + '<|eot_id|>' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' -}}
{%- if message.tool_calls -%}
{%- set call = message.tool_calls[0].function -%}
{{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}<|eom_id|>' -}}
{%- else -%}
{{- message.content | trim + '<|eot_id|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}
""",
    ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
    eos="<|eot_id|>",
    bos="<|begin_of_text|>",
)

# reasoning only after the last question; the last answer always has a (perhaps empty) block
QWEN3 = Family(
    """\
{%- set ns = namespace(last=0) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- set thought = message.reasoning_content or '' -%}
{%- if message.role == 'assistant' and loop.index0 > ns.last and (loop.last or thought) -%}
{{- '<think>\\n' + thought + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and not enable_thinking -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}
""",
    ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>"),
    eos="<|im_end|>",
)

GEMMA3 = Family(  # no system turn, strict alternation, the assistant is called model
    """\
{{- bos_token -}}
{%- if messages[0].role == 'system' -%}
{%- set first = messages[0].content + '\\n\\n' -%}{%- set turns = messages[1:] -%}
{%- else -%}
{%- set first = '' -%}{%- set turns = messages -%}
{%- endif -%}
{%- for message in turns -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') -}}
{%- endif -%}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' -}}
{{- (first if loop.first else '') + message.content | trim + '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}
""",
    ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    eos="<eos>",
    bos="<bos>",
)

MISTRAL = Family(  # the system prompt moves to the last question
    """\
{{- bos_token -}}
{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}
{%- set turns = messages[1:] if messages[0].role == 'system' else messages -%}
{%- set ns = namespace(last=0) -%}
{%- for message in turns -%}
{%- if message.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in turns -%}
{%- if message.role == 'user' -%}
{{- '[INST]' + (system + '\\n\\n' if system and loop.index0 == ns.last else '') + message.content + '[/INST]' -}}
{%- else -%}
{{- message.content + eos_token -}}
{%- endif -%}
{%- endfor -%}
""",
    ("<s>", "</s>", "[INST]", "[/INST]"),
    eos="</s>",
    bos="<s>",
)

# channels; the last answer ends in <|return|>, earlier ones in <|end|> and lose their analysis
GPT_OSS = Family(
    """\
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{%- if loop.last and message.thinking -%}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' -}}
{%- endif -%}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content -}}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' -}}
{%- else -%}
{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}
""",
    ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"),
    eos="<|return|>",
)

MARKED = Family(  # generation markers that leave the end token out, with white space control
    """\
{%- for message in messages %}
{{- '<|' + message.role + '|>' }}
{%- if message.role == 'assistant' %}
    {%- generation %}
    {{- message.content }}
    {%- endgeneration %}
    {{- '<|end|>' }}
{%- else %}
    {{- message.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}
""",
    ("<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|end|>"),
    eos="<|end|>",
)

FAMILIES = {
    "llama3": LLAMA3,
    "qwen3": QWEN3,
    "gemma3": GEMMA3,
    "mistral": MISTRAL,
    "gpt_oss": GPT_OSS,
    "marked": MARKED,
}


def byte_tokenizer(family: Family) -> PreTrainedTokenizerFast:
    """One token a byte, and the family's special tokens behind them from id 256 on."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(family.specials))
    tokens = {"eos_token": family.eos} | ({"bos_token": family.bos} if family.bos else {})
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **tokens)
    tokenizer.chat_template = family.template
    return tokenizer
